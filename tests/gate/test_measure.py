"""Perplexity, KL and top-1 against Hugging Face's whole-model forward and slow loops."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from gate import _inputs, _measure, divergence, perplexity
from gate._bootstrap import Sampling
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


def test_progress_is_told_within_a_wave(tiny: SimpleNamespace) -> None:
    told = list[tuple[str, int, int]]()
    blocks, count = AutoConfig.from_pretrained(tiny.parent).num_hidden_layers, len(tiny.windows)
    measure_many(parent_model(tiny), {"a": parent_model(tiny)}, tiny.windows, lambda *said: told.append(said))
    for name in ("parent", "a"):
        counts = [done for who, done, of in told if who == name and of == count]
        assert counts == sorted(counts) and counts[-1] == count
        assert len(counts) == blocks + 1, "after each block, and when the wave is measured"
        assert counts[0] == (count - 1) // blocks


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
    assert [step for step in seen if step[1] == 5] == [("parent", 5, 5), ("a", 5, 5), ("b", 5, 5)]
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
    checks = perplexity.judge(bad, good, perplexity.Options(max_relative_increase=0.1), Sampling())
    checks += divergence.judge(bad, good, divergence.Options(max_kl=1), Sampling())
    assert [(c.passed, c.value, c.outcome) for c in checks] == [(False, None, "failed")] * 2
    assert "not finite" in checks[0].text


def test_a_bound_holds_when_it_is_just_met() -> None:
    parent = Measurement(10, nll=[30.0] * 4, kl=[0.0] * 4, top1=[10] * 4).as_dict()
    measured = Measurement(10, nll=[30.0 + 10 * math.log(1.05)] * 4, kl=[1.0] * 4, top1=[9] * 4).as_dict()
    both = divergence.Options(max_kl=0.1, min_top1=0.9)
    assert [c.outcome for c in divergence.judge(measured, parent, both, Sampling())] == ["passed"] * 2
    worse = Measurement(10, nll=[31.0] * 4, kl=[1.001] * 4, top1=[9, 9, 9, 9]).as_dict()
    tight = divergence.Options(max_kl=0.1, min_top1=0.9001)
    assert [c.outcome for c in divergence.judge(worse, parent, tight, Sampling())] == ["failed"] * 2
    (check,) = perplexity.judge(measured, parent, perplexity.Options(max_relative_increase=0.0500001), Sampling())
    assert check.passed and check.value == pytest.approx(0.05)
    assert check.text.startswith("perplexity 21.090, the parent's 20.086: +5.00%; at most +5.00%")
    assert not perplexity.judge(worse, parent, perplexity.Options(max_relative_increase=0.05), Sampling())[0].passed
    assert perplexity.judge(measured, parent, perplexity.Options(), Sampling()) == []
    assert divergence.judge(measured, parent, divergence.Options(), Sampling()) == []


def test_token_kl_and_the_worst_positions_are_those_of_the_whole_model(tiny: SimpleNamespace) -> None:
    export = open_export(tiny.export("awq", "int4"))
    p = whole(AutoConfig.from_pretrained(tiny.parent), SafetensorsFolder(tiny.parent), tiny.windows)[:, :-1]
    q = whole(export.config, export, tiny.windows)[:, :-1]
    kl = (p.exp() * (p - q)).sum(-1)
    found = measure(parent_model(tiny), Model(export.config, export), tiny.windows).as_dict()
    spread = found["token_kl"]
    assert spread["quantiles"]["1.0"] == pytest.approx(kl.max().item(), rel=1e-3)
    ordered = sorted(kl.flatten().tolist())
    assert spread["quantiles"]["0.5"] == pytest.approx(ordered[len(ordered) // 2 - (1 - len(ordered) % 2)], rel=1e-2)
    assert sum(spread["counts"]) == kl.numel() and len(spread["counts"]) == len(spread["edges"]) + 1
    largest = sorted(range(5), key=lambda w: -kl[w].max().item())
    assert [one["window"] for one in found["worst"]] == largest
    one = found["worst"][0]
    w, t = one["window"], int(kl[one["window"]].argmax())
    assert one["position"] == t and one["next"] == tiny.windows[w, t + 1]
    assert one["context"] == tiny.windows[w, : t + 1].tolist()
    for key, logs in (("top", q), ("parent_top", p)):
        best = logs[w, t].exp().sort(descending=True)
        assert [token for token, _ in one[key]] == best.indices[:5].tolist()
        assert [share for _, share in one[key]] == pytest.approx(best.values[:5].tolist(), rel=1e-3)
    assert one["parent_nll"] == pytest.approx(-p[w, t, one["next"]].item(), rel=1e-4)


def test_kept_hidden_states_of_the_parent_give_the_same_numbers_without_a_pass(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_measure, "WAVE_BYTES", 2 * 24 * 64 * 4)  # three waves
    candidate = {"a": export_model(tiny, "awq", "int4")}
    own, others = measure_many(parent_model(tiny), candidate, tiny.windows, store=tiny.folder / "hidden")
    again, parent = {"a": export_model(tiny, "awq", "int4")}, parent_model(tiny)
    monkeypatch.setattr(parent, "hidden", None)
    for given in (again, {}):
        same, kept = measure_many(parent, given, tiny.windows, store=tiny.folder / "hidden")
        assert same.nll == own.nll
        assert all(kept[name].kl == others[name].kl for name in given)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that was made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else [out]:
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def test_logits_of_a_large_vocabulary_are_made_a_few_positions_at_a_time(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the heads (and the embedding) is larger than the share of one of LIVE tensors."""
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=50_000,
        tie_word_embeddings=True,
    )  # fmt: skip
    tensors = dict(LlamaForCausalLM(config).state_dict())
    tensors.pop("lm_head.weight")
    source = SimpleNamespace(names=lambda: sorted(tensors), get=lambda name: tensors[name])
    monkeypatch.setattr(_measure, "LOGIT_BYTES", 4 * 50_000 * _measure.LIVE * 20)  # room for 20 positions
    windows = torch.randint(50_000, (1, 200), generator=torch.Generator().manual_seed(0))
    with Largest() as largest:
        measure(Model(config, source), Model(config, source), windows)
    assert 16 * 50_000 <= largest.numel <= 20 * 50_000
