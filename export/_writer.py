"""Write a complete checkpoint directory, one tensor in memory at a time.

A safetensors file is 8 bytes with the header's length, a JSON header, and the data. Shapes are known before any tensor
is made, so the header is written first and the tensors follow. Order and header are those of the safetensors library:
the bytes are what its `save_file` would give.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from export._layers import by_number, layers, stored
from export.carrier import Carrier, keep_tokenizer
from qat.artifact import CACHE_SCALES, Artifact
from qat.checkpoint import INDEX
from qat.coverage import Layer
from qat.index import side_files

CODE_OF = {  # in the order in which the library lays tensors out: a wide one first, so that each is aligned
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}


class Lazy(NamedTuple):
    """A tensor that is made when its turn comes to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# what is stored for one quantized linear, by suffix, given the serving dtype
Parts = Callable[[Artifact, Layer, torch.dtype], dict[str, Lazy]]
# under which name and shape an artifact's KV-cache scale is stored
Cache = Callable[[str], tuple[str, tuple[int, ...]]]


def as_it_is(name: str) -> tuple[str, tuple[int, ...]]:
    """The `Cache` of a format that stores A.k_scale and A.v_scale as float32 [1]."""
    return name, (1,)


def exactly(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`value` in `dtype`. Raises ValueError, naming the tensor, when that would round it."""
    cast = value.to(dtype)
    bad = cast.float() != value.float()
    if bad.any():
        raise ValueError(
            f"{name} holds {value[bad][0].item():.9g}, which {dtype} does not represent; round scales and biases to "
            "the shared 16-bit grid before they are stored, or set model.dtype to the parent's"
        )
    return cast


def _exact_raw(artifact: Artifact, name: str, dtype: torch.dtype) -> Tensor:
    return exactly(artifact.raw(name), dtype, name)


def _viewed(artifact: Artifact, name: str, shape: tuple[int, ...]) -> Tensor:
    return artifact.raw(name).view(shape)


def write_checkpoint(
    artifact: Artifact,
    out: Path,
    carrier: Carrier,
    shard_bytes: int,
    parts: Parts,
    quantization: dict[str, Any] | None,
    cache: Cache = as_it_is,
) -> None:
    """Write weights, config, generation config, tokenizer and licence into the folder `out`.

    quantization: the `quantization_config` of config.json, if any. cache: where KV-cache scales go. Bytes depend
    on nothing but the arguments' content.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_weights(tensors(artifact, carrier, parts, cache), out, shard_bytes)
    for path in side_files(artifact.path):
        shutil.copyfile(path, out / path.name)
    if quantization and carrier.by_plugin:
        quantization = {"quant_method": "tare", "comp_bias": sorted(carrier.by_plugin), "base": quantization}
    write_json(carrier.config | ({"quantization_config": quantization} if quantization else {}), out / "config.json")
    keep_tokenizer(carrier, artifact.path, out)


def tensors(artifact: Artifact, carrier: Carrier, parts: Parts, cache: Cache = as_it_is) -> dict[str, Lazy]:
    """Every tensor of the checkpoint: packed linears, biases (zeros where a slot has none), the rest as it is."""
    at, dtype = stored(artifact), carrier.dtype
    found: dict[str, Lazy] = {}
    hidden = set()
    for layer in layers(artifact):
        hidden |= {f"{layer.name}.{part}" for part in ("codes", "scale", "zero", "input_scale")}
        found |= {f"{layer.name}.{suffix}": lazy for suffix, lazy in parts(artifact, layer, dtype).items()}
    for name in carrier.bias_names():
        if name not in at:
            owner = name.removesuffix(".bias")
            rows = at[f"{owner}.codes" if f"{owner}.codes" in at else f"{owner}.weight"].shape[:1]
            found[carrier.stored_bias(name)] = Lazy(dtype, rows, partial(torch.zeros, rows, dtype=dtype))
    for name in at.keys() - hidden:
        if name == carrier.tied_head:  # engines tie it themselves; vLLM unties a head that it finds in the file
            continue
        if name.endswith(CACHE_SCALES):
            place, shape = cache(name)
            found[place] = Lazy(torch.float32, shape, partial(_viewed, artifact, name, shape))
        elif name.endswith(".bias"):
            exact = partial(_exact_raw, artifact, name, dtype)
            found[carrier.stored_bias(name)] = Lazy(dtype, at[name].shape, exact)
        else:
            found[name] = Lazy(*at[name], partial(artifact.raw, name))
    return dict(sorted(found.items(), key=lambda item: by_number(item[0])))


def write_weights(tensors: dict[str, Lazy], out: Path, shard_bytes: int) -> None:
    """Write `tensors` in order into files of at most `shard_bytes`, with an index when there are several."""
    shards: list[dict[str, Lazy]] = [{}]
    size = 0
    for name, lazy in tensors.items():
        if shards[-1] and size + lazy.num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = lazy
        size += lazy.num_bytes
    if len(shards) == 1:
        write_safetensors(shards[0], out / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(shard, out / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(lazy.num_bytes for lazy in tensors.values())
    write_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, out / INDEX)


def write_safetensors(tensors: dict[str, Lazy], path: Path) -> None:
    """Write one file; each tensor is made, appended and dropped."""
    place = {dtype: i for i, dtype in enumerate(CODE_OF)}
    order = sorted(tensors, key=lambda name: (place[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in order:
        lazy = tensors[name]
        end = start + lazy.num_bytes
        header[name] = {"dtype": CODE_OF[lazy.dtype], "shape": list(lazy.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            value = tensors[name].make()
            assert (value.dtype, tuple(value.shape)) == tensors[name][:2], name
            f.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)


def write_json(content: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
