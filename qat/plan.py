"""What a run would do and need, before it does it: stages to run and to reuse, disk, memory and rough time.

Everything is counted from config and weight-file headers; torch is not imported. Memory and disk are upper estimates of
the formulas in the docstrings; times are rough: floating-point operations at the stated rate.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import yaml

from qat import context, coverage, manifest, outline, plugins, report, serving, sizes
from qat.arch import arch_of, known
from qat.index import model_files
from qat.outline import Step
from qat.recipe import Recipe, RecipeError, load
from qat.sizes import Sizes

GB = 2**30
PROCESS_GB = 0.6  # python, torch and transformers with nothing loaded; measured on Linux, CPU build
WAVE_GB = 0.25  # activations that a streamed forward pass keeps at once
KEPT_GB = 4  # hidden states of the parent that the gate keeps for what is measured later
CPU_FLOPS_PER_CORE, GPU_FLOPS = 2.5e10, 1.5e14  # rough rates, forward and backward of small models
HEADROOM = 1.1  # of disk
BYTES_PER_TOKEN = 4  # of English text, when a text is only measured by its file size
HASH_AT_ONCE = 64 * 2**20  # bytes that a plan reads to compute keys; beyond, it waits for a run to have hashed them


@dataclass(frozen=True)
class Needs:
    """What one stage takes: GB of disk, GB of memory, and seconds (rough)."""

    disk_gb: float
    memory_gb: float
    seconds: float


def needs(step: Step, recipe: Recipe, model: Sizes, rate: float, on_gpu: bool = False) -> Needs:
    """The needs of one stage of a variant's recipe.

    With N weights in linears, R other parameters, g weights per scale, c bytes per code (int4 1/2, int8 and fp8 1; the
    largest where overrides mix), a bytes per number while computing (4 for float32), h hidden size, V vocabulary, T
    tokens in all, m = micro_batch x length, P = N + V h multiplied weights:

    disk    calibrate  N c + 5 N / g + 2 R
            train      16 N / g: scales and their optimizer state; half of BYTES_PER_WEIGHT of what is learned; of a
                       cached teacher h a, or 6 K, for each token that is trained on, while it trains
            export     N c + 2.5 N / g + 2 R, dense 2 (N + R), dense not of symmetric int4 4 (N + R)
            gate       T h a, the parent's last hidden states, kept when they are at most 4 GB      release 0: links
    memory  0.6 GB for the process, and
            calibrate  the largest block and R at a, hidden states T h a for one or two streams (what is over
                       compute.activation_gb goes to disk)
            train      both models: a (2 N + R) + N, with a packed student a (N + R) + N c; block inputs
                       (blocks + 8) m h a; four logits 4 m V; BYTES_PER_WEIGHT of what is learned
            export     the largest block at 4, R at 2        gate    the largest block and R at a, 0.25 GB, two logits
    time    calibrate 6 N T, with the windows that the steps of `learned` look at in T; train 10 P T (teacher, forward,
            recomputed forward, backward), gate 2 P T (1 + formats), at `rate` operations a second; hashing and writing
            0.3 GB a second
    """
    formats = recipe.scheme.formats
    code = max(fmt.bits for fmt in formats) / 8
    group = min(fmt.scale_rows * fmt.group_of(max(model.hidden, 1)) for fmt in formats)
    a = 2 if recipe.compute.dtype == "bfloat16" or (on_gpu and recipe.compute.dtype == "auto") else 4
    linear, rest, blocks = model.linear, model.rest, model.num_blocks
    if step.name == "calibrate":
        tokens = recipe.data.calibration.sequences * recipe.data.calibration.length
        disk = linear * code + 5 * linear / group + 2 * rest
        states, room = 2 * tokens * model.hidden * a, recipe.compute.activation_gb * 2**30
        memory: float = a * (model.largest_block + rest) + min(states, room)
        rounding = recipe.calibrate.round.options
        looked_at = getattr(rounding, "steps", 0) * getattr(rounding, "batch", 0) * recipe.data.calibration.length
        return _needs(disk + max(0, states - room), memory, 6 * linear * (tokens + looked_at), rate)
    if step.kind == "train":
        train = recipe.trainings[step.turn]
        m = (train.micro_batch or train.batch) * train.length
        learned = sum(plugins.stated("qat.learn", kind, "BYTES_PER_WEIGHT") or 0 for kind in train.learn)
        student = code if train.student == "packed" else a + 1
        memory = a * (linear + rest) + (student + learned) * linear
        memory += (blocks + 8) * m * model.hidden * a + 16 * m * model.vocabulary
        disk = 16 * linear / group + learned * linear / 2
        if train.teacher != "resident" and recipe.data.training:
            seen = min(train.steps * train.batch * train.length, int(1e6 * recipe.data.training.max_mb))
            disk += seen * (model.hidden * a if train.teacher == "hidden" else 6 * train.teacher)
        return _needs(disk, memory, 10 * model.matmul * train.steps * train.batch * train.length, rate)
    if step.name == "export":
        disk = linear * code + 2.5 * linear / group + 2 * rest
        if step.format == "dense":
            disk = (2.0 if recipe.scheme.kinds == {"int4"} else 4) * model.total
        return _needs(disk, 4 * model.largest_block + 2 * rest, 0, rate)
    text = recipe.data.evaluation
    if step.name == "gate" and text:
        path = Path(text.source)
        available = int(min(path.stat().st_size, 1e6 * text.max_mb)) // BYTES_PER_TOKEN if path.is_file() else 0
        tokens = text.sequences * text.length if text.sequences else available
        memory = a * (model.largest_block + rest) + WAVE_GB * GB + 8 * text.length * model.vocabulary
        kept = tokens * model.hidden * a
        return _needs(
            kept if kept <= KEPT_GB * GB else 0,
            memory,
            2 * model.matmul * tokens * (1 + len(recipe.export.formats)),
            rate,
        )
    return _needs(0, 0, 0, rate)


def _needs(disk: float, memory: float, operations: float, rate: float) -> Needs:
    return Needs(HEADROOM * disk / GB, PROCESS_GB + memory / GB, operations / rate + disk / (0.3 * GB))


@dataclass(frozen=True)
class Row:
    """One stage of a plan. key: None while inputs are unread. state: reused, run, or unknown."""

    step: Step
    key: str | None
    state: str
    needs: Needs | None


@dataclass(frozen=True)
class Plan:
    """Stages of a run with what is known of them. notes: what is not known, and when it will be."""

    rows: list[Row]
    rate: str
    free_gb: float
    notes: list[str]

    @property
    def disk_gb(self) -> float:
        """Disk that the stages still to run take."""
        return sum(row.needs.disk_gb for row in self.rows if row.needs and row.state != "reused")


def make(recipe: Recipe) -> Plan:
    """The plan of a recipe. Reads headers, and small inputs whole for their hashes; writes nothing."""
    memory = manifest.Fingerprints(Path(recipe.output) / ".fingerprints.json")
    notes: list[str] = []
    on_gpu = recipe.compute.device != "cpu" and Path("/dev/nvidia0").exists()
    cores = psutil.cpu_count(logical=False) or 1
    rate = GPU_FLOPS if on_gpu else CPU_FLOPS_PER_CORE * cores
    shown = f"{rate:.1e} operations a second ({'one GPU' if on_gpu else f'{cores} CPU cores'})"

    folder = outline.local_parent(recipe, memory.remembered)
    model = _model_sizes(recipe, folder, notes)
    if folder is not None:
        context.check(recipe, manifest.read_json(folder / "config.json").get("max_position_embeddings"))
        check_scheme(recipe, folder)
    root = _root(recipe, folder, memory, notes)
    steps = outline.outline(recipe, root or dict.fromkeys(("parent", *outline.TEXTS)))
    keys = outline.keys(steps) if root else [None] * len(steps)
    variants = dict(recipe.by_variant)
    rows, seen = [], set()
    for step, key in zip(steps, keys, strict=True):
        if key is not None and (step.name, key) in seen:
            continue
        seen.add((step.name, key))
        state = "unknown"
        if key is not None:
            finished = (recipe.folder / f"{step.name}-{key}" / manifest.FILE).is_file()
            state = "reused" if finished and step.kind not in recipe.fresh else "run"
        needed = needs(step, variants.get(step.variant, recipe), model, rate, on_gpu) if model else None
        rows.append(Row(step, key, state, needed))
    return Plan(rows, shown, free_gb(recipe), notes)


def check_scheme(recipe: Recipe, folder: Path) -> None:
    """Raise RecipeError when the scheme of a variant does not fit the model: patterns that name nothing, group sizes,
    a range that does not do the model, and what the engines of export.engines do not take.

    Raises ValueError for an architecture that is not known, and for weight files that lack a linear of it.
    """
    config, shapes = manifest.read_json(folder / "config.json"), sizes.folder_shapes(folder)
    config.setdefault("num_local_experts", config.get("num_experts", 0))  # transformers has one name for both
    for key in ("num_hidden_layers", "num_local_experts"):
        if type(count := config.get(key)) is not int or not 0 <= count <= len(shapes):
            raise ValueError(f"{folder / 'config.json'}: {key} is {count!r}, for {len(shapes)} tensors; correct it")
    arch = arch_of(SimpleNamespace(**config))
    linears = [name for index in range(config["num_hidden_layers"]) for name in arch.block_linears(index)]
    if missing := [name for name in linears if len(shapes.get(f"{name}.weight", ())) != 2]:
        raise ValueError(f"{folder} lacks {missing[0]}.weight, or has it in another shape; fetch the model again")
    written = known()[arch.relabel_to] if arch.relabel_to else arch  # what an export with biases may be written as
    inputs = {name: shapes[f"{name}.weight"][1] for name in linears}
    for variant, one in recipe.by_variant:
        try:
            found = coverage.formats(arch, inputs, one.scheme)
            coverage.check_range(arch, one.calibrate.range.name)
            if set(one.export.formats) - {"dense"}:
                coverage.whole_groups(arch, config["num_hidden_layers"], one.scheme)
            if one.until not in ("calibrate", "train"):
                layers = [
                    coverage.Layer(name, shapes[f"{name}.weight"][0], inputs[name], fmt, one.scheme.inputs)
                    for name, fmt in found.items()
                ]
                coverage.check_engines(layers, written, one.export.formats, one.export.engines)
        except ValueError as error:
            raise RecipeError(f"variant {variant}: {error}" if variant else str(error)) from error


def _model_sizes(recipe: Recipe, folder: Path | None, notes: list[str]) -> Sizes | None:
    source = Path(recipe.model.source).expanduser()
    if folder is not None:
        return sizes.of_folder(folder)
    if source.suffix == ".gguf" and source.is_file():
        return sizes.of_gguf(source)
    when = "the run has made it" if recipe.model.source == "micro" else "it is downloaded"
    notes.append(f"{recipe.model.source}: not on this machine; sizes are unknown until {when}")
    return None


def _root(recipe: Recipe, folder: Path | None, memory: manifest.Fingerprints, notes: list[str]) -> dict | None:
    """Fingerprints of the inputs, or None while a large one was never hashed."""
    if folder is None:
        return None
    texts = [Path(part["source"]) for part in map(recipe.model_dump()["data"].get, outline.TEXTS) if part]
    unread = [p for p in [*model_files(folder), *texts] if p.is_file() and memory.remembered(p) is None]
    if sum(path.stat().st_size for path in unread) > HASH_AT_ONCE:
        notes.append(
            f"{len(unread)} input files were not hashed yet; which stages are reused is known after the first run"
        )
        return None
    known = {path: manifest.hash_file(path) for path in unread}
    return outline.inputs(recipe, folder, lambda path: known.get(path) or memory.of(path))


def free_gb(recipe: Recipe) -> float:
    """Free disk where the run's folder is, or will be."""
    folder = recipe.folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / GB


def check_disk(plan: Plan, recipe: Recipe) -> None:
    """Raise RecipeError when the stages to run need more disk than is free. The run itself calls this at its start."""
    if plan.disk_gb > plan.free_gb:
        raise RecipeError(
            f"{recipe.folder} needs {plan.disk_gb:.3g} GB more disk and {plan.free_gb:.3g} GB is free; "
            "free some, choose fewer export.formats, or set output=FOLDER on a larger disk"
        )


def _shown(gb: float) -> float:
    """Up to the next megabyte."""
    return math.ceil(gb * 1000) / 1000


def main(argv: list[str]) -> int:
    """`tare plan`: print the resolved recipe, the stages and the estimates. Raises RecipeError."""
    recipe = load(argv)
    serving.check(recipe)
    plan = make(recipe)
    report.say(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=120))
    rows = [
        (row.step.label, row.key, row.state,
         *([_shown(row.needs.disk_gb), _shown(row.needs.memory_gb)] if row.needs else [None, None]),
         report.duration(row.needs.seconds) if row.needs and row.state != "reused" else None)
        for row in plan.rows
    ]  # fmt: skip
    columns = ("stage", "key", "state", "disk GB", "memory GB", "time (rough)")
    report.table(f"plan of {recipe.folder}", columns, rows)
    for note in plan.notes:
        report.say(note)
    if all(row.needs for row in plan.rows):
        total = sum(row.needs.seconds for row in plan.rows if row.needs and row.state != "reused")
        disk = f"{_shown(plan.disk_gb):.3g} GB of disk ({plan.free_gb:.3g} GB free)"
        report.say(f"to do: {disk}, roughly {report.duration(total)} at {plan.rate}")
    check_disk(plan, recipe)
    return 0
