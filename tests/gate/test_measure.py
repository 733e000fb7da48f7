"""Perplexity, KL and top-1 against Hugging Face's whole-model forward and slow loops."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM

from gate import _inputs, _measure, divergence, perplexity
from gate._measure import Measurement, measure, measure_many
from gate.readers import open_export
from qat import model as qat_model
from qat.checkpoint import SafetensorsFolder
from qat.model import Model


def parent_model(tiny: SimpleNamespace) -> Model:
    return Model(AutoConfig.from_pretrained(tiny.parent), SafetensorsFolder(tiny.parent))


def export_model(tiny: SimpleNamespace, form: str, kind: str) -> Model:
    export = open_export(tiny.export(form, kind))
    model = Model(export.config, export)
    model.prepare = _inputs.hooks(model.arch, export.input_quant)
    return model


def whole(config, tensors, windows: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """Log-probabilities (windows, length, vocabulary) of Hugging Face's model, float64."""
    model = LlamaForCausalLM(config).eval().float()
    model.load_state_dict({name: tensors.get(name).float() for name in tensors.names()})
    with torch.no_grad():
        return model(windows).logits.double().log_softmax(-1)


def test_measures_what_a_slow_loop_over_the_whole_model_measures(tiny: SimpleNamespace) -> None:
    export = open_export(tiny.export("awq", "int4"))
    p = whole(AutoConfig.from_pretrained(tiny.parent), SafetensorsFolder(tiny.parent), tiny.windows)
    q = whole(export.config, export, tiny.windows)
    nll, kl, same = [], [], 0
    for w, window in enumerate(tiny.windows):
        for t in range(len(window) - 1):
            nll.append(-q[w, t, window[t + 1]].item())
            kl.append(sum(math.exp(a) * (a - b) for a, b in zip(p[w, t].tolist(), q[w, t].tolist(), strict=True)))
            same += int(p[w, t].argmax() == q[w, t].argmax())
    found = measure(parent_model(tiny), Model(export.config, export), tiny.windows)
    assert found.num_tokens == len(nll) == 5 * 23
    assert found.perplexity == pytest.approx(math.exp(statistics.fmean(nll)), rel=1e-5)
    assert found.mean_kl == pytest.approx(statistics.fmean(kl), rel=1e-4)
    assert found.mean_kl > 0.01
    assert found.agreement == same / len(nll)
    by_window = [statistics.fmean(kl[w * 23 : w * 23 + 23]) for w in range(5)]
    assert found.kl_stderr == pytest.approx(statistics.stdev(by_window) / math.sqrt(5), rel=1e-3)
    assert [v / 23 for v in found.kl] == pytest.approx(by_window, rel=1e-3)


def test_a_copy_of_the_parent_has_divergence_exactly_zero(tiny: SimpleNamespace) -> None:
    copy = measure(parent_model(tiny), parent_model(tiny), tiny.windows)
    own = measure(parent_model(tiny), None, tiny.windows)
    assert (copy.mean_kl, copy.agreement, copy.kl_stderr) == (0.0, 1.0, 0.0)
    assert (copy.nll, copy.kl, copy.top1) == (own.nll, own.kl, own.top1)


@pytest.mark.parametrize(("form", "kind"), [("awq", "int4"), ("modelopt", "fp8-tensor")])
def test_waves_and_chunks_do_not_change_the_numbers(
    tiny: SimpleNamespace, form: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = measure(parent_model(tiny), export_model(tiny, form, kind), tiny.windows, batch=2)
    for module in (_measure, qat_model):
        monkeypatch.setattr(module, "WAVE_BYTES", 2 * 24 * 64 * 4)  # two windows: every block is loaded three times
    monkeypatch.setattr(_measure, "LOGIT_BYTES", 0)
    in_parts = measure(parent_model(tiny), export_model(tiny, form, kind), tiny.windows, batch=2)
    assert in_parts.nll == pytest.approx(at_once.nll, rel=1e-6)
    assert in_parts.kl == pytest.approx(at_once.kl, rel=1e-4)
    assert in_parts.top1 == at_once.top1


def test_fp8_inputs_count_in_the_measurement(tiny: SimpleNamespace) -> None:
    export = open_export(tiny.export("compressed_tensors", "fp8-channel"))
    weights_only = measure(parent_model(tiny), Model(export.config, export), tiny.windows)
    both = measure(parent_model(tiny), export_model(tiny, "compressed_tensors", "fp8-channel"), tiny.windows)
    model = LlamaForCausalLM(export.config).eval().float()
    model.load_state_dict({name: export.get(name).float() for name in export.names()})
    for name, module in model.named_modules():
        if name in export.linears:
            module.register_forward_pre_hook(lambda m, args: (_inputs.quantize_input(args[0], "token"),))
    with torch.no_grad():
        log_q = model(tiny.windows).logits.log_softmax(-1)
    nll = -log_q[:, :-1].gather(2, tiny.windows[:, 1:, None]).mean().item()
    assert both.mean_nll == pytest.approx(nll, rel=1e-5)
    assert both.mean_nll != pytest.approx(weights_only.mean_nll, rel=1e-5)


def test_many_candidates_share_one_pass_of_the_parent(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, passes = parent_model(tiny), []
    hidden = parent.hidden
    monkeypatch.setattr(parent, "hidden", lambda *args: passes.append(args) or hidden(*args))
    candidates = {"a": export_model(tiny, "awq", "int4"), "b": export_model(tiny, "gptq", "int4-channel")}
    seen: list[tuple[str, int, int]] = []
    own, others = measure_many(parent, candidates, tiny.windows, lambda *step: seen.append(step))
    assert len(passes) == 1
    assert seen == [("parent", 5, 5), ("a", 5, 5), ("b", 5, 5)]
    alone = measure(parent_model(tiny), export_model(tiny, "gptq", "int4-channel"), tiny.windows)
    assert (others["b"].nll, others["b"].kl) == (alone.nll, alone.kl)
    assert own.mean_kl == 0


def test_what_cannot_be_measured_is_an_error(tiny: SimpleNamespace) -> None:
    parent = parent_model(tiny)
    with pytest.raises(ValueError, match=r"length >= 2"):
        measure(parent, None, tiny.windows[:, :1])
    with pytest.raises(ValueError, match="vocabulary of 96"):
        measure(parent, None, tiny.windows + 90)
    config = AutoConfig.from_pretrained(tiny.parent)
    config.vocab_size = 97
    with pytest.raises(ValueError, match="vocabulary of 97, the parent of 96"):
        measure(parent, Model(config, SafetensorsFolder(tiny.parent)), tiny.windows)
    tiny.edit(tiny.parent, lambda t: t["model.norm.weight"].fill_(math.nan))
    with pytest.raises(ValueError, match="parent's logits are not finite"):
        measure(parent_model(tiny), None, tiny.windows)


def test_numbers_that_are_not_finite_become_null_and_are_refused() -> None:
    good = Measurement(2, nll=[2.0, 2.0], kl=[0.0, 0.0], top1=[2, 2]).as_dict()
    bad = Measurement(2, nll=[2.0, math.nan], kl=[math.inf, 0.0], top1=[2, 0]).as_dict()
    assert (bad["perplexity"], bad["kl"], bad["kl_stderr"], bad["windows"]["kl"]) == (None, None, None, [None, 0.0])
    checks = perplexity.judge(bad, good, perplexity.Options(max_relative_increase=0.1))
    checks += divergence.judge(bad, good, divergence.Options(max_kl=1))
    assert [(c.passed, c.value) for c in checks] == [(False, None), (False, None)]
    assert "not finite" in checks[0].text


def test_a_bound_holds_when_it_is_just_met() -> None:
    parent = {"perplexity": 20.0}
    measured = {"perplexity": 21.0, "kl": 0.1, "top1": 0.9}
    both = divergence.Options(max_kl=0.1, min_top1=0.9)
    assert [c.passed for c in divergence.judge(measured, parent, both)] == [True, True]
    assert [c.passed for c in divergence.judge({**measured, "kl": 0.1001, "top1": 0.89}, parent, both)] == [
        False,
        False,
    ]
    options = perplexity.Options(max_relative_increase=0.05)
    (check,) = perplexity.judge(measured, parent, options)
    assert check.passed
    assert check.text == "perplexity 21.000, the parent's 20.000: +5.00%; at most +5.00%"
    assert not perplexity.judge({"perplexity": 21.01}, parent, options)[0].passed
    assert perplexity.judge(measured, parent, perplexity.Options()) == []
    assert divergence.judge(measured, parent, divergence.Options()) == []
