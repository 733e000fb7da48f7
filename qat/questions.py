"""What `tare compare` asks every state: --task, --lm-eval and --limit as options of gate/tasks.py, and their faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import gate.stage
from gate.tasks import Options
from qat import arguments
from qat.parent import Parent

# what errors call a key of the recipe -> the option that stands for it; the longer key first
KEYS = {"gate.tasks.offline.": "--task ", "gate.tasks.offline": "--task", "gate.tasks.lm_eval": "--lm-eval"}


def asked(files: Sequence[str], lm_eval: Sequence[str], limit: int | None) -> tuple[Options, list[str]]:
    """The options of gate/tasks.py, and what is wrong with what they were made from. files: NAME=FILE."""
    offline, names, wrong = dict[str, str](), list(lm_eval), list[str]()
    for given in files:
        name, _, source = given.partition("=")
        if not name or not source:
            wrong.append(f"--task {given}: give a name and a file, such as --task capitals=capitals.jsonl")
            continue
        names.append(name)
        path = arguments.locate(source, Path())
        if path is None:
            wrong.append(f"--task {name}: {source} does not exist")
        elif not Path(path).is_file():
            wrong.append(f"--task {name}: {source} is no file; give one with an example a line")
        else:
            offline[name] = path
    twice = (name for name, count in Counter(names).items() if count > 1)
    wrong += [f"two tasks are called {name}; give each a name of its own" for name in twice]
    if limit is not None and not (files or lm_eval):
        wrong.append(f"--limit {limit} is of the examples of tasks, and none is given: add --task or leave it out")
    try:
        for texts in gate.stage.task_texts({}, lm_eval).values():
            next(texts, None)
    except ValueError as error:  # lm-eval is not installed, or does not have the task
        wrong += _told(error)
    others = [name for name in lm_eval if name not in offline]  # a name that is given twice is among what is wrong
    return Options(offline=offline, lm_eval=others, limit=limit), wrong


def unreadable(options: Options, parent: Parent) -> list[str]:
    """What is wrong first with each file of examples. Raises ValueError for a parent without a tokenizer."""
    tokenizer = parent.tokenizer
    try:
        gate.stage.examples_of(options, tokenizer, parent.config)
    except ValueError as error:
        return _told(error)
    return []


def sentence(options: Options) -> str:
    """What was asked, for people; empty when nothing was."""
    said = [*(f"{name} ({Path(path).name})" for name, path in options.offline.items()), *options.lm_eval]
    of_each = f"; at most {options.limit} examples of each" if options.limit else ""
    return ", ".join(said) + of_each if said else ""


def _told(error: ValueError) -> list[str]:
    said = str(error)
    for key, option in KEYS.items():
        said = said.replace(key, option)
    return said.splitlines()
