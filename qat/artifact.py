"""The folder that passes between stages: integer codes, scales, zero points, biases and every untouched parameter.

    block-00000.safetensors ...   one file per decoder block: X.codes X.scale [X.zero] [X.input_scale] [X.bias], norms,
                                  [A.k_scale A.v_scale]
    rest.safetensors              embeddings, final norm, head
    overlay.safetensors           (after training) scales and biases that replace those of the blocks
    transform-00000.safetensors   (after a transform) the vectors that tensors of the block were multiplied by
    artifact.json                 scheme, linears and their formats, architecture config
    config.json tokenizer ...     copied from the parent

int4 codes lie two per byte (`quant.pack_nibbles`, uint8), int8 and fp8 codes one. Static scales of an fp8 KV cache are
float32 (1,): A.k_scale and A.v_scale of each attention A. Full-precision weights are not copied.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qat import manifest
from qat.checkpoint import SafetensorsFolder
from qat.index import ARTIFACT
from qat.quant import Quantized, dequantize, pack_nibbles, unpack_nibbles
from qat.scheme import Scheme, TensorFormat

REST, OVERLAY, META = "rest.safetensors", "overlay.safetensors", ARTIFACT
CACHE_SCALES = (".k_scale", ".v_scale")
ROWS, COLUMNS = "#out", "#in"  # which side of a weight a transform's vector multiplies; a bias or norm needs no mark


def block_file(index: int) -> str:
    return f"block-{index:05d}.safetensors"


def transform_file(index: int) -> str:
    return f"transform-{index:05d}.safetensors"


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file whole or not at all, names sorted so that equal content is equal bytes."""
    check_finite(tensors)
    with manifest.whole(path) as part:
        save_whole({k: tensors[k].contiguous().cpu() for k in sorted(tensors)}, part)


def save_whole(tensors: dict[str, Tensor], path: Path) -> None:
    """safetensors' `save_file`, with an OSError for what the disk refuses."""
    with refusals(path):
        save_file(tensors, path, metadata={"format": "pt"})


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Safetensors' own error for what the disk refuses becomes an OSError of `path`."""
    try:
        yield
    except SafetensorError as error:
        if refused := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(refused[1]), os.strerror(int(refused[1])), str(path)) from error
        raise


def is_whole(path: Path) -> bool:
    """Whether a safetensors file is there, with a header that accounts for all its bytes."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (FileNotFoundError, SafetensorError):
        return False


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError naming the first tensor with a NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            bad = ~torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)
            if bad.any():
                where = tuple(bad.nonzero()[0].tolist())
                raise ValueError(f"{name} holds {tensor[where].item()} at {where} ({int(bad.sum())} such values)")


def block_tensors(name: str, q: Quantized, input_scale: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
    """The stored tensors of one quantized linear."""
    out = {f"{name}.scale": q.scale, f"{name}.codes": q.codes}
    if q.codes.dtype == torch.uint8:
        out[f"{name}.codes"] = pack_nibbles(q.codes)
    if q.zero is not None:
        out[f"{name}.zero"] = q.zero
    if input_scale is not None:
        out[f"{name}.input_scale"] = input_scale
    if bias is not None:
        out[f"{name}.bias"] = bias
    return out


def read_block(file: Path, formats: dict[str, TensorFormat]) -> dict[str, Tensor]:
    """The tensors of one block file as in a plain checkpoint: dequantized weights, norms, biases."""
    tensors = SafetensorsFolder(file.parent, [file.name])
    found = {name: tensors.get(name) for name in tensors.names() if not name.endswith(CACHE_SCALES)}
    for linear in [name.removesuffix(".codes") for name in found if name.endswith(".codes")]:
        codes, scale, zero = (found.pop(f"{linear}.{part}", None) for part in ("codes", "scale", "zero"))
        found.pop(f"{linear}.input_scale", None)
        assert codes is not None and scale is not None
        codes = unpack_nibbles(codes) if codes.dtype == torch.uint8 else codes
        found[f"{linear}.weight"] = dequantize(Quantized(codes, scale, zero), formats[linear])
    return found


class Artifact:
    """Reader of an artifact folder. As a `Tensors` source it gives the dequantized model, float32 where quantized."""

    def __init__(self, path: Path) -> None:
        self.path = path
        meta = json.loads((path / META).read_text())
        self.meta: dict[str, Any] = meta
        self.scheme = Scheme.model_validate(meta["scheme"])
        self.formats = {name: TensorFormat.model_validate(fmt) for name, fmt in meta["linears"].items()}
        files = [*sorted(p.name for p in path.glob("block-*.safetensors")), REST]
        self._base = SafetensorsFolder(path, files)
        self._vectors = SafetensorsFolder(path, sorted(p.name for p in path.glob("transform-*.safetensors")))
        self._multiplied = frozenset(self._vectors.names())
        self._overlay = SafetensorsFolder(path, [OVERLAY]) if (path / OVERLAY).exists() else None
        over = set(self._overlay.names()) if self._overlay else set()
        self._names = set(self._base.names()) | over
        self._over = over

    def stored(self) -> list[str]:
        """Names of the tensors as stored (codes, scales...)."""
        return sorted(self._names)

    def raw(self, name: str) -> Tensor:
        """A tensor as stored, the trained one where training replaced it."""
        source = self._overlay if name in self._over else self._base
        assert source is not None
        return source.get(name)

    def quantized(self, name: str) -> Quantized:
        """Codes, scale and zero point of the linear `name`."""
        codes = self.raw(f"{name}.codes")
        zero = self.raw(f"{name}.zero") if f"{name}.zero" in self._names else None
        if codes.dtype == torch.uint8:
            codes = unpack_nibbles(codes)
        return Quantized(codes, self.raw(f"{name}.scale"), zero)

    def optional(self, name: str) -> Tensor | None:
        return self.raw(name) if name in self._names else None

    def factors(self, linear: str) -> tuple[Tensor, Tensor]:
        """What a transform multiplied the parent's weight of `linear` by before it was rounded.

        Rows (N, 1), as its bias was but for rounding to 16 bits, and columns (1, K); float32, ones where nothing did.
        """
        names = [f"{linear}.weight{side}" for side in (ROWS, COLUMNS)]
        found = [self._vectors.get(n).float() if n in self._multiplied else torch.ones(1) for n in names]
        return found[0][:, None], found[1][None]

    def names(self) -> list[str]:
        """Names as in a plain Hugging Face checkpoint, biases included."""
        hidden = {f"{n}.{part}" for n in self.formats for part in ("codes", "scale", "zero", "input_scale")}
        hidden |= {name for name in self._names if name.endswith(CACHE_SCALES)}
        return sorted((self._names - hidden) | {f"{n}.weight" for n in self.formats})

    def cache_scales(self, attention: str) -> tuple[Tensor, Tensor] | None:
        """The static KV-cache scales (1,) of an attention module, by its full name, or None."""
        if self.scheme.kv_cache is None:
            return None
        return self.raw(f"{attention}.k_scale"), self.raw(f"{attention}.v_scale")

    def get(self, name: str) -> Tensor:
        owner = name.removesuffix(".weight")
        if name.endswith(".weight") and owner in self.formats:
            return dequantize(self.quantized(owner), self.formats[owner])
        return self.raw(name)


def write_meta(path: Path, scheme: Scheme, linears: dict[str, TensorFormat], extra: dict[str, Any]) -> None:
    """Write artifact.json; the folder is readable from then on."""
    meta = {
        "scheme": scheme.model_dump(),
        "linears": {name: fmt.model_dump() for name, fmt in linears.items()},
        **extra,
    }
    (path / META).write_text(json.dumps(meta, indent=1, sort_keys=True))


def derive(parent: Path, path: Path, overlay: dict[str, Tensor], extra: dict[str, Any]) -> None:
    """Make `path` the artifact `parent` with the tensors of `overlay` replaced or added; the rest is hard-linked."""
    path.mkdir(parents=True, exist_ok=True)
    for file in parent.iterdir():
        if file.is_file() and file.name not in ("manifest.json", META, OVERLAY):
            link_or_copy(file, path / file.name)
    before = SafetensorsFolder(parent, [OVERLAY]) if (parent / OVERLAY).exists() else None
    kept = {n: before.get(n) for n in before.names()} if before else {}
    save_tensors({**kept, **overlay}, path / OVERLAY)
    meta = json.loads((parent / META).read_text())
    (path / META).write_text(json.dumps({**meta, **extra}, indent=1, sort_keys=True))


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system has no links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
