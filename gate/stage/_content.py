"""What a state is, as a hash, and results remembered under it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gate._inputs import CacheScales
from gate.readers import InputQuant
from qat import manifest
from qat.arch import arch_of
from qat.checkpoint import Tensors

# these do not change what the gate computes: it runs every state in one dtype, from the values as stored
NOT_EFFECTIVE = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures"}


def digest(*parts: Any) -> str:
    """sha256 of JSON-able parts, shortened."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def files_key(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of every file of a folder: equal while nobody has touched it."""
    found = sorted(p for p in folder.iterdir() if p.is_file())
    return [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in found]


def effective(config: Any) -> dict[str, Any]:
    """The fields of a config that decide the forward pass."""
    return {k: v for k, v in config.to_dict().items() if k not in NOT_EFFECTIVE}


def fingerprint(
    config: Any,
    tensors: Tensors,
    input_quant: Callable[[str], InputQuant] | None,
    cache_scales: CacheScales | None = None,
) -> str:
    """Equal exactly when all that the forward pass depends on is: config, every tensor as float32, quantized inputs and
    KV cache."""
    total = hashlib.sha256(digest(effective(config)).encode())
    for name in sorted(tensors.names()):
        _add(total, name, tensors.get(name))
    arch = arch_of(config)
    for index in range(config.num_hidden_layers):
        for name in arch.block_linears(index):
            how = input_quant(name) if input_quant else None
            if isinstance(how, Tensor):
                _add(total, f"{name} inputs", how)
            else:
                total.update(f"{name} inputs {how}".encode())
        for scale in (cache_scales(index) if cache_scales else None) or ():
            _add(total, f"{index} cache", scale)
    return total.hexdigest()[:32]


def _add(total: Any, name: str, value: Tensor) -> None:
    total.update(f"{name} {tuple(value.shape)}".encode())
    for part in value.detach().flatten().split(2**24):  # 64 MiB of float32 at a time
        total.update(part.to("cpu", torch.float32).numpy().data)


def remembered(cache: Path, kind: str, key: str, compute: Callable[[], Any] | None = None) -> Any:
    """The JSON value stored in `cache` under a kind and a key; computed and stored when there is none.

    Without `compute`: None when there is none.
    """
    path = cache / f"{kind}-{key}.json"
    with suppress(ValueError):  # none, or half a file, which is no memory
        found = manifest.read_json(path)
        if found.keys() == {"value"}:
            return found["value"]
    if compute is None:
        return None
    return remember(cache, kind, key, compute())


def remember(cache: Path, kind: str, key: str, value: Any) -> Any:
    """Store a JSON value for `remembered`; gives it back."""
    write_json(cache / f"{kind}-{key}.json", {"value": value})
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all; a number that is not finite is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_json(path, value, allow_nan=False)
