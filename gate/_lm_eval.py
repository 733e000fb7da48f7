"""Tasks of lm-evaluation-harness on a state, through its Hugging Face backend. The whole model is in memory."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gate._examples import strings
from qat.model import Model
from qat.serving import need_lm_eval

VERSION = 2  # raised when the numbers change
BATCH = 8
METRICS = ("acc_norm", "exact_match", "acc", "pass@1", "f1", "bleu")  # the first that a task reports is judged


def version() -> str:
    """Of lm-eval. Raises ValueError when it is not installed."""
    need_lm_eval()
    return importlib.metadata.version("lm_eval")


def score(model: Model, tokenizer: Any, tasks: Sequence[str], limit: int | None) -> dict[str, dict[str, Any]]:
    """Task -> {metric, scores of every example, in the order of the documents}.

    model: resident; what its hooks do to activations is done here too. Raises ValueError for an unknown task, and for
    one that reports no score of single examples.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with model.ends():
        for index in range(len(model.blocks)):
            model.load_block(index)
        language_model = HFLM(pretrained=model.root, tokenizer=tokenizer, batch_size=BATCH)
        with _explained(tasks):
            found = simple_evaluate(language_model, tasks=list(tasks), limit=limit, log_samples=True, bootstrap_iters=0)
    return {task: _scores(task, samples) for task, samples in found["samples"].items()}


def texts(tasks: Sequence[str]) -> Iterator[str]:
    """All that the documents of tasks say, those that are asked about. Raises ValueError for an unknown task."""
    version()
    from lm_eval.tasks import get_task_dict

    with _explained(tasks):
        found = get_task_dict(list(tasks))
    for task in _flat(found):
        yield from (" ".join(strings(document)) for document in task.eval_docs)


@contextmanager
def _explained(tasks: Sequence[str]) -> Iterator[None]:
    """Say in a ValueError what lm-eval and the library it loads data with raise of a task that cannot be had."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"lm-eval has no task {error}; `lm_eval --tasks list` names those it has") from error
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"lm-eval cannot have the data of {', '.join(tasks)}: {error}; fetch it once on a machine with a network "
            "and bring its HF_HOME, or name files of examples in gate.tasks.offline"
        ) from error


def _flat(found: Mapping[Any, Any]) -> Iterator[Any]:
    """The tasks of a mapping in which groups are mappings."""
    for value in found.values():
        yield from _flat(value) if isinstance(value, Mapping) else [value]


def _scores(task: str, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    metric = next((name for name in METRICS if all(isinstance(s.get(name), int | float) for s in ordered)), None)
    if metric is None or not ordered:
        raise ValueError(f"lm-eval gives {task} no score for single examples ({', '.join(METRICS)}); leave it out")
    return {"metric": metric, "scores": [float(sample[metric]) for sample in ordered]}
