"""The full-precision model that everything is compared with: a local folder, a hub id, a GGUF file, `demo` or `micro`.

Whatever it was, it ends as a local Hugging Face folder with safetensors weights, which all stages read block by block.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from qat import fits, report
from qat.arch import Arch, arch_of, find
from qat.checkpoint import SafetensorsFolder
from qat.index import SIDE_FILES
from qat.manifest import read_json

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "recipes" / "demo" / "model"


@dataclass(frozen=True)
class Parent:
    """A local folder with the parent. name: what a model card calls it (`base_model`). revision: as asked for."""

    folder: Path
    name: str
    revision: str | None = None
    trust_remote_code: bool = False

    @cached_property
    def config(self) -> Any:
        return read_config(self.folder, self.trust_remote_code)

    @cached_property
    def arch(self) -> Arch:
        return arch_of(self.config)

    @cached_property
    def tensors(self) -> SafetensorsFolder:
        return SafetensorsFolder(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        if not any(self.folder.glob("tokenizer*")) and not any(self.folder.glob("vocab.*")):
            raise ValueError(
                f"{self.folder} has no tokenizer files; text cannot be read: copy the model's tokenizer there"
            )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (self.folder / name).is_file():
                read_json(self.folder / name)
        try:
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise ValueError(
                f"the tokenizer files of {self.folder} make no tokenizer: {type(error).__name__}: {one_line(error)}; "
                "fetch them again"
            ) from error

    def check(self) -> Parent:
        """Raise ValueError for an unknown architecture, an already quantized model, bad shards or no tokenizer.

        Also for tensors that do not fit the config; no weight is read.
        """
        if getattr(self.config, "quantization_config", None):
            method = self.config.quantization_config.get("quant_method")
            raise ValueError(f"{self.name} is already quantized ({method}); Tare starts from full-precision weights")
        _ = self.arch, self.tensors
        # without added tokens: Gemma 3's text models share a tokenizer that has one for images, beyond their embedding
        size, rows = self.tokenizer.vocab_size, self.config.vocab_size
        if size > rows:
            raise ValueError(
                f"the tokenizer of {self.name} has {size} tokens, its config only {rows} (vocab_size); take the "
                "tokenizer that belongs to the model"
            )
        fits.check(self.config, self.tensors.entries(), self.name)
        return self


def read_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The config of a checkpoint. Raises ValueError, naming the file, when there is none that transformers takes."""
    said = read_config_json(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except StrictDataclassError as error:  # a field of a type or value that the architecture cannot have
        raise ValueError(f"{folder / 'config.json'}: {one_line(error)}; correct the field") from error
    except Exception as error:  # what transformers raises for a config that makes no sense has no common class
        find(SimpleNamespace(**said))  # for one that it does not know, our own error names those that we know
        raise ValueError(f"{folder / 'config.json'}: {one_line(error)}; correct it") from error


def read_config_json(folder: Path) -> dict[str, Any]:
    """config.json as it stands. Raises ValueError, naming the file, when it is no config."""
    said = read_json(folder / "config.json")
    if not isinstance(said.get("quantization_config"), dict | None):
        raise ValueError(
            f"{folder / 'config.json'}: quantization_config is {said['quantization_config']!r}, where an object is "
            "expected; correct the field"
        )
    return said


def one_line(error: Exception) -> str:
    """An error of another library as one line, cut where it becomes a page."""
    return " ".join(str(error).split())[:300]


def open_parent(source: str, revision: str | None, trust_remote_code: bool, cache: Path) -> Parent:
    """Find or fetch `source`; `cache` takes folders made from GGUF files and the random `micro` model."""
    disable_progress_bar()  # of loading and saving, which would be in the midst of Tare's own
    report.quiet_transfers()
    if source == "demo":
        return Parent(DEMO, "tare-demo").check()
    if source == "micro":
        from qat.micro import make_micro

        return Parent(make_micro(cache / "micro"), "tare-micro").check()
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        return Parent(from_gguf(path, cache), path.stem).check()
    if path.is_dir():
        return Parent(path, path.resolve().name, revision, trust_remote_code).check()
    if path.exists() or source.startswith(("/", ".", "~")):
        raise ValueError(f"model.source {source} is not a folder with a Hugging Face model, a .gguf file or a hub id")
    return Parent(from_hub(source, revision), source, revision, trust_remote_code).check()


def from_hub(repo: str, revision: str | None) -> Path:
    """Download (or find in the local cache) config, tokenizer and safetensors of a hub model.

    HF_TOKEN, HF_HOME and HF_HUB_OFFLINE act as in huggingface_hub. Raises ValueError when it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.safetensors", "*.safetensors.index.json", *SIDE_FILES]
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        offline = (
            " (HF_HUB_OFFLINE is set: only the local cache was searched)" if os.environ.get("HF_HUB_OFFLINE") else ""
        )
        raise ValueError(
            f"model.source {repo!r} is no local folder and could not be fetched from the hub{offline}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def from_gguf(path: Path, cache: Path) -> Path:
    """A folder with the dequantized weights of a GGUF file, through transformers' reader; made once per file content.

    The reader holds the whole model in float32 while it converts.
    """
    if not path.is_file():
        raise ValueError(f"model.source {path} does not exist")
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(2**24):
            digest.update(chunk)
    folder = cache / f"gguf-{digest.hexdigest()[:12]}"
    if folder.exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM

    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    how = {"gguf_file": path.name, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **how)
    # transformers marks the loaded model as GGUF-quantized and then refuses to save it
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized, model.hf_quantizer = False, None
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(path.parent, **how).save_pretrained(part)
    for licence in path.parent.glob("LICENSE*"):
        shutil.copy2(licence, part)
    try:
        os.replace(part, folder)
    except OSError:  # another process was first
        shutil.rmtree(part)
    return folder
