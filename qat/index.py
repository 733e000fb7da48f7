"""Which files make a checkpoint: the index of its shards, what lies beside the weights, and where. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from qat.manifest import read_json

INDEX = "model.safetensors.index.json"
ARTIFACT = "artifact.json"  # in a folder of Tare's own layout, between the stages
# what travels with a checkpoint beside its weights
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
              "vocab.*", "merges.txt", "chat_template*", "*.model", "LICENSE*", "NOTICE*", "USE_POLICY*")  # fmt: skip
CODE = (".py", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt", ".joblib")  # whoever loads one runs what is in it
DEPTH = 2  # of the folders of a release: VARIANT/FORMAT


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ValueError for an index that is no such map or points outside its folder."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files; fetch the index again")
    for file in sorted(set(found.values())):
        if Path(file).name != file:
            raise ValueError(f"{index} points to {file!r}, outside its folder; shards must lie beside the index")
    return found


def model_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that decide results or are passed on with them, sorted."""
    index = folder / INDEX
    if index.is_file():
        weights = {folder / name for name in weight_map(index).values()}
    else:
        weights = set(folder.glob("*.safetensors"))
    return sorted(weights | {path for pattern in SIDE_FILES for path in folder.glob(pattern) if path.is_file()})


def side_files(folder: Path) -> list[Path]:
    """Config, tokenizer and licence files of a checkpoint folder, sorted by name; no code, and no pickles."""
    found = {path for pattern in SIDE_FILES for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.suffix not in CODE)


def checkpoints_below(folder: Path, depth: int = DEPTH) -> list[Path]:
    """The nearest folders below `folder` that hold a checkpoint, such as the formats of a release."""
    found: list[Path] = []
    for one in sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ():
        if (one / "config.json").is_file():
            found += [one] if not (one / ARTIFACT).is_file() else []
        elif depth > 1:
            found += checkpoints_below(one, depth - 1)
    return found
