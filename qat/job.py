"""What the stages of one run share: the parent, the texts as token windows, device and dtype of the computation."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qat import context, loop, outline, report
from qat.outline import Step
from qat.overlap import SAME_TEXT, Cutter, HeldOut, sentence
from qat.parent import Parent, open_parent
from qat.recipe import Recipe
from qat.sections import Compute, Text
from qat.stages import Run, Stage
from qat.texts import pieces
from qat.tokens import Corpus, draw, tokenize, windows

EVALUATION = "data.evaluation.source"


@contextmanager
def of_part(part: str) -> Iterator[None]:
    """A ValueError about a text names the section that it comes from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"data.{part}: {error}") from error


class Job:
    """Opened once per run, on every rank. Raises ValueError for a parent or a text that cannot be used.

    task_texts: gives the texts of the gate's tasks, by the key of the recipe that names them.
    """

    def __init__(self, run: Run, task_texts: Callable[[Recipe], Mapping[str, Iterable[str]]]) -> None:
        self.run, self.recipe, self._task_texts = run, run.recipe, task_texts
        model = self.recipe.model
        cache = outline.parent_cache(self.recipe)
        cache.mkdir(parents=True, exist_ok=True)
        self.parent: Parent = open_parent(model.source, model.revision, model.trust_remote_code, cache)
        context.check(self.recipe, getattr(self.parent.config, "max_position_embeddings", None))
        self.root = outline.inputs(self.recipe, self.parent.folder, run.fingerprints.of)
        run.inputs = self.root
        self.steps = outline.outline(self.recipe, self.root)
        self.made: dict[int, Stage] = {}
        # made once for this job, and gone with it
        self.training, self.check_texts = functools.cache(self._training), functools.cache(self._check_texts)
        self._tokens = functools.cache(self._read)
        self.device = device(self.recipe.compute)
        self.dtype = dtype(self.recipe.compute, self.device)
        report.say(f"{self.parent.name}: {self.parent.arch.class_name}, computing on {self.device} in {self.dtype}")

    def recipe_of(self, step: Step) -> Recipe:
        """The recipe of a step's variant."""
        return dict(self.recipe.by_variant)[step.variant] if step.variant else self.recipe

    def stage(self, index: int, work: Any, everyone: bool = False) -> Stage:
        """The finished stage of step `index`, its parents being finished."""
        step = self.steps[index]
        parents = [self.made[parent] for parent in step.parents]
        self.made[index] = self.run.stage(
            step.name, content=step.content, work=work, parents=parents, variant=step.variant, everyone=everyone
        )
        if step.kind == "train" and self.made[index].reused:
            trackers = self.recipe_of(step).trainings[step.turn].trackers
            if trackers:
                report.say(
                    f"{step.label}: reused, so {', '.join(trackers)} is told nothing; fresh=train trains it again"
                )
        return self.made[index]

    def source(self, index: int) -> Stage:
        """The stage that step `index` works on."""
        return self.made[self.steps[index].parents[0]]

    def _check_texts(self) -> None:
        """Read every text that a later stage needs, so that a bad one fails before any work is done.

        Raises ValueError when evaluation text is also calibration or training text. Every stage that reads text asks,
        as those before it may be an earlier run's, on other texts.
        """
        used = [("calibration", self.calibration.windows)]
        for length in sorted({train.length for _, one in self.recipe.by_variant for train in one.trainings}):
            used.append(("training", self.training(length).windows))
            loop.split_validation(used[-1][1])
        if self.recipe.gate is None:
            return
        judged = {tuple(row.tolist()) for row in self.evaluation.windows}
        for part, rows in used:
            same_file = self.root[part] and self.root[part]["source"] == self.root["evaluation"]["source"]
            if same_file or any(tuple(row.tolist()) in judged for row in rows):
                raise ValueError(
                    f"data.evaluation.source {self.evaluation.source} holds text of data.{part}: a model is judged on "
                    "text that it was not made with; choose another one"
                )

    @cached_property
    def calibration(self) -> Corpus:
        text = self.recipe.data.calibration
        return self._clean("calibration", text, text.length, text.sequences, text.seed)

    @cached_property
    def evaluation(self) -> Corpus:
        text = self.recipe.data.evaluation
        assert text is not None, "the recipe was checked to have evaluation text"
        with of_part("evaluation"):
            return self._check_tokens(windows(self.parent.tokenizer, text, text.length, text.sequences, text.seed))

    def _training(self, length: int) -> Corpus:
        """Windows of the training text. Example: `training(512)` for sequences of 512 tokens."""
        assert self.recipe.data.training is not None, "the recipe was checked to have training text"
        return self._clean("training", self.recipe.data.training, length)

    @cached_property
    def held_out(self) -> HeldOut | None:
        """The n-grams of evaluation text and tasks; None when nothing is compared with them."""
        data = self.recipe.data
        if not data.decontaminate or not data.evaluation:
            return None
        own = {EVALUATION: self._evaluation_pieces(data.evaluation)}
        return HeldOut(own | dict(self._task_texts(self.recipe)), data.decontaminate)

    def _evaluation_pieces(self, text: Text) -> Iterator[str]:
        with of_part("evaluation"):
            for piece in pieces(text, self.parent.tokenizer):
                yield piece.text

    def _clean(self, part: str, text: Text, length: int, *drawn: int) -> Corpus:
        """Windows of a text without what is held out."""
        key = "train.length" if part == "training" else "length"
        ids, overlap = self._tokens(part)
        with of_part(part):
            return replace(self._check_tokens(draw(ids, text, length, *drawn, length_key=key)), overlap=overlap)

    def _read(self, part: str) -> tuple[Tensor, dict[str, Any] | None]:
        """The tokens of a text without what is held out, and what was cut out.

        Raises ValueError when much of the evaluation text is in it.
        """
        data = self.recipe.data
        text: Text = getattr(data, part)
        cutter = Cutter(self.held_out) if self.held_out else None
        with of_part(part):
            ids = tokenize(self.parent.tokenizer, text, keep=cutter)
        if cutter is None:
            return ids, None
        if (share := cutter.share(EVALUATION)) >= SAME_TEXT:
            assert data.evaluation is not None, "it is what is held out"
            raise ValueError(
                f"{EVALUATION} {data.evaluation.source} holds text of data.{part} ({text.source}): {share:.0%} of its "
                f"runs of {cutter.held_out.n} words are in both: a model is judged on text that it was not made with; "
                "choose another one"
            )
        counts = cutter.counts()
        if counts["passages"]:
            report.say(f"{part} text: {sentence(counts)}")
        return ids, counts

    def _check_tokens(self, corpus: Corpus) -> Corpus:
        tokenizer, rows = self.parent.tokenizer, self.parent.config.vocab_size
        if (largest := int(corpus.windows.max())) >= rows:
            raise ValueError(
                f"{corpus.source}: the tokenizer writes {tokenizer.convert_ids_to_tokens(largest)!r} as {largest}, but "
                f"the model has {rows} tokens (vocab_size of config.json); take the tokenizer that belongs to the model"
            )
        return corpus


def device(compute: Compute) -> torch.device:
    """Where Tare computes; on a GPU, this process's own. Raises ValueError for cuda without a GPU."""
    if compute.device == "cpu" or (compute.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("compute.device is cuda, but torch sees no GPU; set compute.device=cpu, or auto")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def dtype(compute: Compute, on: torch.device) -> torch.dtype:
    """auto: bfloat16 on a GPU, float32 on a CPU."""
    if compute.dtype == "auto":
        return torch.bfloat16 if on.type == "cuda" else torch.float32
    return getattr(torch, compute.dtype)
