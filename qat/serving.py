"""What the gate needs of this machine beside Tare: lm-eval for its tasks, an engine for its latency check, and what the
latter's results hold for. Never imports torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from qat import plugins
from qat.recipe import Recipe, RecipeError


def check(recipe: Recipe) -> None:
    """Raise RecipeError when tasks of lm-eval are asked for and it is not installed, or when latency is and there is no
    such engine, program, or export for it."""
    if recipe.gate is None or recipe.until in ("calibrate", "train", "export"):
        return
    tasks: Any = recipe.gate.get("tasks")
    if tasks is not None and tasks.lm_eval:
        need_lm_eval()
    asked: Any = recipe.gate.get("latency")
    if asked is None:
        return
    where = "gate.latency"
    try:
        plugins.check("gate.servers", asked.engine)
    except ValueError as error:
        raise RecipeError(f"{where}.engine: {error}") from error
    for_it = {engine for _, one in recipe.by_variant for engine in one.export.engines}
    if asked.engine not in for_it:
        raise RecipeError(
            f"{where}.engine: {asked.engine} is none of export.engines ({', '.join(sorted(for_it))}), so nothing "
            "would be measured; name it there, or leave gate.latency out"
        )
    if shutil.which(asked.program) is None:
        raise RecipeError(
            f"{where}.program: there is no {asked.program} on the PATH; install the engine, set {where}.program to its "
            f"path or to a python that has it, or leave {where} out"
        )


def need_lm_eval() -> None:
    """Raise RecipeError when lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError(
            "gate.tasks.lm_eval needs lm-evaluation-harness: .venv/bin/pip install -e '.[eval]' in Tare's folder, or "
            "leave it out and name files of examples in gate.tasks.offline"
        )


def machine(program: str) -> dict[str, Any]:
    """What decides speed beside the model: host, processor, GPUs, and the file of the engine's program."""
    info, gpus = Path("/proc/cpuinfo"), sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    path = shutil.which(program)
    file = Path(path).resolve() if path else None
    return {
        "host": platform.node(),
        "cpu": sorted(names),
        "cores": os.cpu_count(),
        "gpus": [gpu.read_text(encoding="utf-8").partition("\n")[0] for gpu in gpus],
        "program": [str(file), file.stat().st_size, file.stat().st_mtime_ns] if file else None,
    }
