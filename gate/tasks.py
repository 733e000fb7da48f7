"""How many questions of a task a candidate answers right, against the parent, question by question.

offline: name -> a JSONL file on this machine, one example a line:

    {"context": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}     multiple choice
    {"context": "Once upon a", "continuation": " time"}                                     continuation
    {"prompt": "Q: 6 times 7?\\nA:", "answer": "42", "match": "numeric", "max_tokens": 32, "stop": ["\\n"]}  generation

A choice is right when its log-likelihood divided by its characters is the largest (lm-eval's acc_norm), a continuation
when greedy decoding gives all of it (acc of LAMBADA). Texts are joined as they are: begin a choice with its space.
A generation is right when the text that greedy decoding writes after the prompt, at most max_tokens (64) and up to the
first of the texts in `stop`, meets the answer, or one of several: `match` is exact_match (the default: the same text,
spaces around it aside), contains, or numeric (the last number is the answer). It holds the whole model in memory.
lm_eval: names of tasks of lm-evaluation-harness, which the extra `eval` installs; it holds the whole model in memory.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from gate import _paired
from gate._bootstrap import Sampling
from gate._check import Check, estimated
from qat.scheme import Section

VERSION = 2


class Options(Section):
    """limit: the first so many examples of each task; null takes all.

    max_drop: 0.01 allows one answer in a hundred to be lost on each task, those newly right counted against those newly
    wrong; null: measured, not judged.
    """

    offline: dict[str, str] = Field({})
    lm_eval: list[str] = Field([])
    limit: int | None = Field(None, gt=0)
    max_drop: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _names(self) -> Options:
        if both := sorted(self.offline.keys() & set(self.lm_eval)):
            raise ValueError(f"{', '.join(both)}: names of tasks in offline and in lm_eval; give the file another name")
        if self.max_drop is not None and not (self.offline or self.lm_eval):
            raise ValueError("max_drop has no task to bound; name one in offline or lm_eval, or leave it out")
        return self


def judge(measured: dict[str, Any], parent: dict[str, Any], options: Options, sampling: Sampling) -> list[Check]:
    """The checks of one state, one for each task. measured, parent: with `tasks` of the same examples."""
    checks = []
    for name, task in measured["tasks"].items():
        if options.max_drop is not None:
            own = parent["tasks"][name]
            gain = _paired.gain(name, measured, parent, sampling)
            drop = _paired.negated(gain)
            text = f"{name}: {task['metric']} {task['score']:.2%}, the parent's {own['score']:.2%}: a drop of {{value}}"
            checks.append(estimated(f"tasks.{name}.max_drop", drop, options.max_drop, "+z.2%", text, "examples"))
    return checks
