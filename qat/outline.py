"""Which stages a recipe makes, and what decides the content of each; for the run and for `tare plan`, without torch.

    calibrate -> train, or several -> export (one per format), once per variant; then one gate over all exports

A variant's stage that has the same content as another's is the same stage, and is made once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat import plugins, serving
from qat.arguments import KEYWORDS
from qat.index import model_files
from qat.recipe import BOUNDS, Recipe
from qat.sections import ANSWERS, text_kind
from qat.stages import kind, stage_key

TEXTS, WINDOWS = ("calibration", "training", "evaluation"), ("sequences", "length", "seed")
HELD_OUT = 1  # raised when `qat.overlap` cuts out other passages


@dataclass(frozen=True)
class Step:
    """One stage to be: what `Run.stage` wants. parents: indices of earlier steps. format: of an export, else None.

    turn: place in `Recipe.trainings` of a stage of training; where there are several they are `train-1`, `train-2`...
    """

    name: str
    variant: str | None
    content: dict[str, Any]
    parents: tuple[int, ...]
    format: str | None = None
    turn: int = 0

    @property
    def kind(self) -> str:
        """`train` of every stage of training; else the name."""
        return kind(self.name)

    @property
    def label(self) -> str:
        return "/".join(word for word in (self.variant, self.name, self.format) if word)


def outline(recipe: Recipe, root: dict[str, Any]) -> list[Step]:
    """The stages in order, up to `recipe.until`. root: the fingerprints of parent and texts that `inputs` gives."""
    steps: list[Step] = []
    for variant, one in recipe.by_variant:
        steps += _steps(variant, one, root, len(steps))
    if recipe.until in ("calibrate", "train", "export") or recipe.gate is None:
        return steps
    exports = tuple(index for index, step in enumerate(steps) if step.name == "export")
    return [*steps, Step("gate", None, _gate(recipe, root), exports)]


def _gate(recipe: Recipe, root: dict[str, Any]) -> dict[str, Any]:
    checks: dict[str, Any] = {
        name: {
            "version": plugins.version("gate", name),
            "options": {key: value for key, value in options.items() if not key.startswith(BOUNDS)},
        }
        for name, options in (recipe.model_dump()["gate"] or {}).items()
    }
    if "tasks" in checks:  # where a file lies does not matter, what is in it does
        checks["tasks"]["options"]["offline"] = root.get("tasks")
    if "latency" in checks:  # of this machine only
        asked = checks["latency"]["options"]
        server = plugins.version("gate.servers", asked["engine"])
        checks["latency"] |= {"server": server, "machine": serving.machine(asked["program"])}
    return {"checks": checks, "text": root["evaluation"], "compute": recipe.compute.dtype}


# keys of train that do not decide its result
NO_EFFECT = ("save_every", "checkpoint", "cuda_graph", "compile", "student", "trackers")


def _steps(variant: str | None, recipe: Recipe, root: dict[str, Any], first: int) -> list[Step]:
    """The stages of one variant, when `first` steps come before them."""
    dumped = recipe.model_dump()  # as a whole: a section dumped by itself would lose the options of its plugins
    dtype = recipe.compute.dtype
    questions = dumped["calibrate"]
    content = {
        "parent": root["parent"],
        "text": root["calibration"],
        "held_out": root.get("held_out"),
        "scheme": dumped["scheme"],
        "calibrate": questions,
        "versions": {q: plugins.version(ANSWERS[q], chosen["name"]) for q, chosen in questions.items()},
        "compute": dtype,
    }
    steps = [Step("calibrate", variant, content, ())]
    if recipe.until == "calibrate":
        return steps
    # training depends on the engines: they decide which linears can hold a bias
    engines = sorted(recipe.export.engines)
    asked = dumped["train"] if isinstance(dumped["train"], list) else [dumped["train"]]
    for turn in range(len(recipe.trainings)):
        learning = {key: value for key, value in asked[turn].items() if key not in NO_EFFECT}
        versions = {kind: plugins.version("qat.learn", kind) for kind in learning["learn"]}
        content = {
            "train": learning,
            "versions": versions,
            "text": root["training"],
            "held_out": root.get("held_out"),
            "engines": engines,
            "compute": dtype,
        }
        name = "train" if recipe.train is not None and not isinstance(recipe.train, list) else f"train-{turn + 1}"
        steps.append(Step(name, variant, content, (first + turn,), turn=turn))
    if recipe.until == "train":
        return steps
    source = (first + len(steps) - 1,)
    for name in recipe.export.formats:
        content = {
            "format": name,
            "version": plugins.version("export.formats", name),
            "engines": engines,
            "shard_gb": recipe.export.shard_gb,
            "dtype": recipe.model.dtype,
        }
        steps.append(Step("export", variant, content, source, name))
    return steps


def keys(steps: list[Step]) -> list[str]:
    """The key of each step."""
    found: list[str] = []
    for step in steps:
        found.append(stage_key(step.name, step.content, [found[parent] for parent in step.parents]))
    return found


def inputs(recipe: Recipe, parent: Path, hash_of: Callable[[Path], str]) -> dict[str, Any]:
    """What the first stages depend on outside the recipe: hashes of the parent's files and of the texts.

    hash_of: such as `Fingerprints.of`. A hub dataset stands by its id and split. Where a text lies does not matter.
    """
    root: dict[str, Any] = {"parent": {path.name: hash_of(path) for path in model_files(parent)}}
    data = recipe.model_dump()["data"]
    for part in TEXTS:
        section = data[part]
        if section is not None:
            path = Path(section["source"])
            root[part] = {key: value for key, value in section.items() if key != "stream"}  # the same rows either way
            if path.is_file():
                root[part] |= {"source": hash_of(path), "kind": text_kind(path.name)}
    tasks = (recipe.model_dump()["gate"] or {}).get("tasks")
    if tasks is not None:
        root["tasks"] = {name: hash_of(Path(path)) for name, path in tasks["offline"].items()}
    if data["decontaminate"] and data["evaluation"]:  # the whole evaluation text, whatever windows of it are judged
        held = {key: value for key, value in root["evaluation"].items() if key not in WINDOWS}
        root["held_out"] = {"words": data["decontaminate"], "evaluation": held, "version": HELD_OUT}
        if tasks is not None:
            root["held_out"] |= {"offline": sorted(root["tasks"].values()), "lm_eval": sorted(tasks["lm_eval"])}
    return root


def parent_cache(recipe: Recipe) -> Path:
    """Where folders made from GGUF files and the random `micro` model are kept."""
    return Path(recipe.output) / ".parents"


def local_parent(recipe: Recipe, remembered: Callable[[Path], str | None]) -> Path | None:
    """The parent's folder when it is on this machine already, without asking a hub or hashing a file; else None."""
    source = recipe.model.source
    path = Path(source).expanduser()
    if source in KEYWORDS:
        path = plugins.ROOT / "recipes/demo/model" if source == "demo" else parent_cache(recipe) / source
    elif path.suffix == ".gguf":
        sha256 = remembered(path) if path.is_file() else None
        path = parent_cache(recipe) / f"gguf-{(sha256 or '')[:12]}"
    elif not path.is_dir():
        path = _hub_snapshot(source, recipe.model.revision or "main")
    return path if (path / "config.json").is_file() else None


def _hub_snapshot(repo: str, revision: str) -> Path:
    """Where huggingface_hub keeps a downloaded model (its documented cache layout)."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    repo_folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{repo.replace('/', '--')}"
    ref = repo_folder / "refs" / revision
    return repo_folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
