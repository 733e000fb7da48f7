"""`tare serve`: start the installed engine on a released directory, by its own script."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from qat import plugins
from qat.index import checkpoints_below


def command(directory: Path, engine: str | None, arguments: Sequence[str]) -> list[str]:
    """What to run. Raises ValueError when the directory or the engine is not there."""
    scripts = {path.stem: path for path in sorted((directory / "serve").glob("*.sh"))}
    if not scripts:
        below = [str(one) for one in checkpoints_below(directory) if (one / "serve").is_dir()]
        there = f"one of {', '.join(below)}" if below else "runs/NAME/release-KEY/FORMAT, or .../VARIANT/FORMAT"
        raise ValueError(f"{directory} has no serve/*.sh; give a released directory: {there}")
    if engine is not None and engine not in scripts:
        raise ValueError(f"{directory} was not exported for {engine!r}; it was for {', '.join(scripts)}")
    wanted = [engine] if engine else list(scripts)
    program = {name: plugins.literal("export.engines", name, "PROGRAM") for name in wanted}
    installed = [name for name in wanted if shutil.which(program[name])]
    if not installed:
        programs = " or ".join(dict.fromkeys(program.values()))
        raise ValueError(
            f"there is no {programs} on the PATH; install the engine, or run {scripts[wanted[0]]} elsewhere"
        )
    return [str(scripts[installed[0]].resolve()), *arguments]


def main(directory: Path, engine: str | None, arguments: Sequence[str]) -> None:
    """Become the engine's server. Raises ValueError."""
    words = command(directory, engine, arguments)
    os.execv(words[0], words)
