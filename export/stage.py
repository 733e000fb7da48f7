"""The export stage: an artifact becomes one complete checkpoint directory per format."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from transformers import AutoConfig

from export._layers import check_range, layers
from export.carrier import Carrier, carrier
from qat import plugins
from qat.arch import Arch, arch_of
from qat.artifact import Artifact
from qat.coverage import check_engines, loads
from qat.scheme import Scheme


def run(
    artifact_folder: Path,
    formats: Collection[str],
    engines: Collection[str],
    shard_bytes: int,
    out: Path,
    dtype: str | None = None,
) -> dict[str, Path]:
    """Write each of `formats` into out/<format>/ for all of `engines`; gives the folders by format.

    artifact_folder: of calibration or training; config, tokenizer and licence are taken from it too. dtype: what the
    model is served in, by default the parent's. Equal artifacts give equal bytes; a folder left by an interrupted run
    is replaced. Raises ValueError, before anything is written, when a format or engine cannot take the model.
    """
    artifact = Artifact(artifact_folder)
    config = AutoConfig.from_pretrained(artifact_folder, trust_remote_code=False)
    arch = arch_of(config)
    chosen = carrier(arch, config, engines, biased(artifact, arch), dtype)
    check(artifact, chosen, formats, engines)
    done = {}
    for name in formats:
        folder = out / name
        if folder.exists():
            shutil.rmtree(folder)
        plugins.find("export.formats", name).write(artifact, folder, chosen, shard_bytes)
        done[name] = folder
    return done


def loaders(engines: Collection[str], format_name: str, scheme: Scheme) -> list[str]:
    """Those of `engines` that load a model of this scheme in `format_name`, its KV-cache scales included."""
    able = [engine for engine in engines if loads(engine, format_name, scheme.kinds)]
    if scheme.kv_cache is None:
        return able
    return [engine for engine in able if format_name in plugins.literal("export.engines", engine, "KV_CACHE")]


def biased(artifact: Artifact, arch: Arch) -> set[str]:
    """The linears, relative to a block, that have a bias in at least one block of the artifact."""
    owners = (name.removesuffix(".bias") for name in artifact.stored() if name.endswith(".bias"))
    return {arch.split(name)[1] for name in owners} & set(arch.linears)


def check(artifact: Artifact, chosen: Carrier, formats: Collection[str], engines: Collection[str]) -> None:
    """Raise ValueError when a format cannot hold the artifact, or an engine that loads the format would not run it."""
    found = layers(artifact)
    for name in formats:
        plugins.find("export.formats", name).check(artifact, chosen)
        if name != "dense":  # which is loaded in a dtype that holds everything
            check_range(name, artifact, chosen.dtype)
    check_engines(found, chosen.arch, formats, engines)
