"""Where learning starts when calibration rescaled channels first: what was rounded is not the parent's weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from calibrate import observe
from qat import plugins
from qat.artifact import Artifact
from qat.checkpoint import SafetensorsFolder
from qat.model import Model
from qat.quant import signed_codes
from qat.scheme import Scheme
from qat.sections import Calibrate
from qat.student import Student
from tests.artifacts import ALL, SCHEMES, config_of

WINDOWS = torch.randint(4, 128, (6, 24), generator=torch.Generator().manual_seed(3))
CASES = [("llama", "awq", "int4"), ("qwen2", "awq", "int4-asym"), ("gemma3_text", "awq", "int8"),
         ("llama", "smoothquant", "w8a8")]  # fmt: skip


def calibrated(folder: Path, family: str, transform: str, scheme: str) -> tuple[Any, Model, Artifact]:
    """HF's random model with uneven channels, the same as a `Model`, and what calibration made of it."""
    torch.manual_seed(2)
    config = config_of(family)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in reference.named_parameters():
        if parameter.ndim == 1:
            offset = 1.0 if family.startswith("gemma") and "norm" in name else 0.0
            uneven = torch.exp(torch.randn(parameter.shape)) - offset
            parameter.data = uneven.bfloat16()
    reference.save_pretrained(folder / "parent")
    chosen = Calibrate.model_validate({"transform": transform, "range": "max"})
    methods = {question: getattr(chosen, question) for question in observe.QUESTIONS}
    tensors = SafetensorsFolder(folder / "parent")
    rules = Scheme.model_validate(SCHEMES[scheme])
    observe.run(config, tensors, rules, WINDOWS, methods, folder / "parent", folder / "out")
    return reference.float().eval(), Model(config, tensors, resident=True), Artifact(folder / "out")


def started(model: Model, artifact: Artifact, **learn: dict[str, Any]) -> Student:
    options = {kind: plugins.options("qat.learn", kind)(**given) for kind, given in learn.items()}
    student = Student(model, artifact, options, ALL)
    student.begin(WINDOWS)
    return student


def rounded_from(student: Student) -> dict[str, Tensor]:
    """The weights that the residuals say were rounded."""
    artifact, found = student.artifact, {}
    for name, delta in student.parts["codes"].views(student.delta["round"].detach(), by_row=False).items():
        q = artifact.quantized(name)
        steps = (signed_codes(q) + delta).view(*q.scale.shape, -1)
        found[name] = (steps * q.scale[..., None]).view(delta.shape)
    return found


@pytest.mark.parametrize(("family", "transform", "scheme"), CASES)
def test_residuals_lead_back_to_the_parents_function(tmp_path: Path, family: str, transform: str, scheme: str) -> None:
    reference, model, artifact = calibrated(tmp_path, family, transform, scheme)
    with torch.no_grad():
        expected = reference(WINDOWS).logits
        state = {name: artifact.get(name).float() for name in artifact.names()}
        reference.load_state_dict(state, strict=False)
        quantized = reference(WINDOWS).logits
        weights = rounded_from(started(model, artifact, round={}))
        reference.load_state_dict(state | {f"{name}.weight": w for name, w in weights.items()}, strict=False)
        found = reference(WINDOWS).logits
    moved = [name for name in weights if any((factor != 1).any() for factor in artifact.factors(name))]
    assert len(moved) >= len(weights) // 2  # else the transform did nothing
    # what is left: weights more than 0.49 codes off, and norms and biases in 16 bits
    assert (found - expected).norm() < 0.2 * (quantized - expected).norm()


@pytest.mark.parametrize(("family", "transform", "scheme"), CASES)
def test_the_closed_form_start_is_that_of_the_weights_that_were_rounded(
    tmp_path: Path, family: str, transform: str, scheme: str
) -> None:
    """With it the mean output of every linear is that of the weights before rounding on the same inputs."""
    _, model, artifact = calibrated(tmp_path, family, transform, scheme)
    weights = rounded_from(started(model, artifact, round={}))
    student = started(model, artifact, bias={"start": "mean", "skip_tokens": 3})
    seen = dict[str, Tensor]()
    for name, linear in student.linears.items():
        linear.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    with student.ends(), torch.no_grad():
        states = student.embed(WINDOWS)
        for index in range(len(student.blocks)):
            states = student.run_block(index, states)
    known, biases = set(artifact.names()), student.parts["bias"].views(student.parts["bias"].start, by_row=True)
    assert seen.keys() == biases.keys()
    for name, x in seen.items():
        mean = x[:, 3:].flatten(0, 1).mean(0)
        goal, rounded = weights[name] @ mean, artifact.get(f"{name}.weight") @ mean
        lost = (goal - rounded).norm()
        if f"{name}.bias" in known:
            goal += artifact.raw(f"{name}.bias").float()
        # residuals are cut at 0.49 codes
        assert (rounded + biases[name] - goal).norm() < 0.3 * lost, name
