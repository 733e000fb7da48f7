"""What a finished stage says about itself, and the small tools for saying it: canonical JSON, file hashes.

Nothing here needs torch. Nothing from the environment is ever written.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from qat import __version__

FILE = "manifest.json"
Model = TypeVar("Model", bound=BaseModel)
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")
WRITTEN = {"files", "parents", "metrics", "seconds", "peak_rss_gb", "peak_gpu_gb"}  # of a manifest, and read again
RACY_SECONDS = 2.0  # a file younger than this may still change within one tick of its time stamp


def digest(value: Any) -> str:
    """sha256 of the canonical JSON of `value`: keys sorted, no spaces; NaN and unknown types are errors."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that is to be there whole or not at all, also after a power cut or on a full disk."""
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        yield part
        fsync(part)  # else the new name may outlive a power cut, and the bytes may not
        os.replace(part, path)
    except OSError as error:
        name_place(error, path)
        raise
    finally:
        part.unlink(missing_ok=True)


def name_place(error: OSError, path: Path) -> None:
    """Put a place into an error of the system's that has none, as of a write to an open file.

    One that a library made, without a number, keeps its words.
    """
    if error.errno is not None and error.filename is None:
        error.filename = str(path)


def write_json(path: Path, value: Any, allow_nan: bool = True) -> None:
    """Write a JSON file whole or not at all."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=allow_nan)
    with whole(path) as part:
        part.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, naming the file, when it holds none."""
    try:
        return json_object(path.read_bytes(), path)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; fetch it again, or give the folder that has it") from error


def json_object(content: bytes, where: Path) -> dict[str, Any]:
    """The object that `content`, of the file `where`, writes out. Raises ValueError when it is none."""
    try:
        found = json.loads(content.decode("utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is no text that can be shown
    except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        raise ValueError(
            f"{where} is not JSON: {error}; it was cut short, or is not what its name says: fetch it again"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds a JSON {type(found).__name__}, where an object is expected; fetch it again")
    return found


def shaped(model: type[Model], found: dict[str, Any], where: Path) -> Model:
    """What `found`, of the file `where`, says as a `model`. Raises ValueError when it does not say that."""
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where} is not what Tare writes: {key}: {first['msg'].lower()}; make it again") from error


def sweep(parts: Iterable[Path], min_age: float = 0.0) -> None:
    """Remove what killed writers left, NAME.part and a process id, if it is at least so many seconds old."""
    for path in parts:
        with suppress(FileNotFoundError):  # its writer lives, and was faster
            if time.time() - path.stat().st_mtime >= min_age:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage, or None: a folder without one, or with half of one, is not finished."""
    try:
        found = read_json(folder / FILE)
    except ValueError:
        return None
    return found if found.keys() >= WRITTEN else None


def list_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Relative path -> sha256 and size of every file below `folder`, except its own manifest."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / FILE)
    return {p.relative_to(folder).as_posix(): {"sha256": hash_file(p), "size": p.stat().st_size} for p in paths}


def damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    """What is wrong with a finished folder at a quick look (sizes, not hashes), or None."""
    for name, file in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != file["size"]:
            return f"{name} has {path.stat().st_size} bytes, not {file['size']}"
    return None


def altered(folder: Path, manifest: dict[str, Any]) -> str | None:
    """The first file of a finished folder whose bytes are not those of its manifest, or None. Reads all of it."""
    for name, file in manifest["files"].items():
        path = folder / name
        if not path.is_file() or hash_file(path) != file["sha256"]:
            return name
    return None


def fsync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(folder: Path) -> None:
    """Have the disk hold all of `folder`, so that a rename after it survives a power cut."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def versions() -> dict[str, str]:
    """Versions that can move a result, of tare, python and the libraries installed."""
    found = {"tare": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "accelerate", "safetensors", "compressed-tensors", "gguf"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def seeds(value: Any, path: str = "") -> dict[str, int]:
    """Every `seed` of a dumped recipe by dotted path."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {}
    found = {f"{path}{key}": inner for key, inner in value.items() if key == "seed"}
    for key, inner in value.items():
        found |= seeds(inner, f"{path}{key}.")
    return found


def redact(text: str) -> str:
    """`text` without Hugging Face tokens, the values of HF_TOKEN and its like, and what gives access in URLs."""
    for name in TOKENS:
        if len(secret := os.environ.get(name, "").strip()) >= 8:
            text = text.replace(secret, "***")
    text = re.sub(r"\bhf_[A-Za-z0-9]{8,}", "hf_***", text)
    text = re.sub(r"(\w+://[^\s:/@]*):[^\s/@]+@", r"\1:***@", text)
    text = re.sub(r"(\w+://)[^\s:/@]+@", r"\1***@", text)
    return re.sub(r"(?i)([?&](?:access_token|token|api_key|key|password|signature)=)[^&\s'\"]+", r"\1***", text)


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR}
NO_MEMORY = ("can't allocate memory", "out of memory")  # torch's own words on a CPU and on a GPU


def told(error: BaseException) -> str:
    """An error in one sentence for people, with the way out where the error itself cannot know it."""
    way = way_out(error)
    if isinstance(error, MemoryError | RuntimeError) and way:  # of another library, and often a page
        return redact(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}; {way}")
    return redact(f"{type(error).__name__}: {error}" + (f"; {way}" if way else ""))


def way_out(error: BaseException) -> str:
    """What a person can do when the machine refuses disk, memory or a right, or a process is gone; else nothing."""
    kept = "what is finished is kept"
    if isinstance(error, OSError) and error.errno in FULL:
        return f"free some disk or set output=FOLDER on a larger one, and run again: {kept}"
    if isinstance(error, OSError) and error.errno in FORBIDDEN:
        return "make it a folder that this user may read and write, or set output=FOLDER elsewhere"
    said = str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in said for word in NO_MEMORY)):
        return (
            "out of memory: lower train.micro_batch, the lengths under data or compute.activation_gb, or take a larger "
            f"machine: {kept}"
        )
    # torch has classes for NCCL and its store, whose names begin like this, and none for gloo
    lost = "/gloo/" in said or "by peer" in said or type(error).__name__.startswith("Dist")
    if isinstance(error, RuntimeError) and lost:
        return f"another process of this launch is gone: see what it said last, and run again: {kept}"
    return ""


class Fingerprints:
    """sha256 of input files, remembered in a JSON file by path, size and time of change: weights are read once."""

    def __init__(self, memory: Path) -> None:
        self.memory = memory
        self._known: dict[str, list[Any]] = {}
        with suppress(ValueError):  # only a memory: without it files are read again
            known = read_json(memory)
            self._known = {path: line for path, line in known.items() if isinstance(line, list) and len(line) == 3}

    def of(self, path: Path) -> str:
        """sha256 of a file."""
        found = self.remembered(path)
        if found is None:
            stat = path.stat()
            found = hash_file(path)
            if time.time() - stat.st_mtime > RACY_SECONDS:
                self._known[str(path.resolve())] = [stat.st_size, stat.st_mtime_ns, found]
                self.memory.parent.mkdir(parents=True, exist_ok=True)
                write_json(self.memory, self._known)
        return found

    def remembered(self, path: Path) -> str | None:
        """sha256 of a file read before and not changed since, else None."""
        size, mtime_ns, found = self._known.get(str(path.resolve()), (None, None, None))
        stat = path.stat()
        return found if (size, mtime_ns) == (stat.st_size, stat.st_mtime_ns) else None

    def of_all(self, paths: Iterable[Path], folder: Path) -> dict[str, str]:
        """Path relative to `folder` -> sha256."""
        return {p.relative_to(folder).as_posix(): self.of(p) for p in sorted(paths)}
