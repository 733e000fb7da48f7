"""The gate as a whole: what is released, what is refused, what is measured again."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from gate import _measure, divergence, lint, perplexity, stage
from gate._bootstrap import Sampling
from gate.stage import Exported, table
from tests.judging import judge

ENGINES = ("vllm",)
GATE = {
    "lint": lint.Options(),
    "perplexity": perplexity.Options(max_relative_increase=10),
    "divergence": divergence.Options(max_kl=10, min_top1=0),
}


def run(tiny: SimpleNamespace, exports: list[Exported], gate: Any = GATE) -> dict[str, Any]:
    config = AutoConfig.from_pretrained(tiny.parent)
    rtn = stage.artifact_state("RTN", tiny.artifact("int4", biases=False), config, "1")
    trained = stage.artifact_state("train", tiny.artifact("int4"), config, "2", baseline="RTN", seconds=1.5)
    parent = stage.plain_state("parent", tiny.parent, "0")
    path = tiny.folder / "gate" / "verdict.json"
    found = judge(path, parent, [rtn, trained], exports, tiny.windows, gate, tiny.folder / "cache")
    assert json.loads(path.read_text()) == found
    return found


def exported(tiny: SimpleNamespace, form: str, kind: str = "int4", artifact: bool = True) -> Exported:
    source = tiny.artifact(kind) if artifact else None
    return Exported(form, tiny.export(form, kind), ENGINES, form, source, baseline="RTN")


def test_good_exports_are_released_and_equal_tensors_measured_once(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = ["awq", "gptq", "compressed_tensors", "dense"]
    measured: list[str] = []
    many = _measure.measure_many
    monkeypatch.setattr(
        _measure, "measure_many", lambda p, c, *rest, **more: measured.extend(c) or many(p, c, *rest, **more)
    )
    found = run(tiny, [exported(tiny, form) for form in forms])
    assert found["status"] == "released"
    assert measured == ["RTN", "train", "awq"]
    rows = {row["state"]: row for row in found["table"]}
    assert list(rows) == ["parent", "RTN", "train", *forms]
    assert [rows[form]["note"] for form in forms] == ["", *["same tensors as awq"] * 3]
    assert len({(rows[form]["perplexity"], rows[form]["kl"]) for form in forms}) == 1
    assert rows["parent"]["kl"] == 0
    assert rows["parent"]["bits_per_weight"] == 16
    assert rows["train"]["seconds"] == 1.5
    assert rows["RTN"]["kl_recovered"] is None
    rtn, own = rows["RTN"], rows["parent"]
    for row in (rows["train"], rows["gptq"]):
        assert row["kl_recovered"] == pytest.approx(1 - row["kl"] / rtn["kl"])
        lost = rtn["perplexity"] - own["perplexity"]
        assert row["perplexity_recovered"] == pytest.approx((rtn["perplexity"] - row["perplexity"]) / lost)
    assert found["exports"]["awq"]["path"] == "../awq-int4-True"
    assert len(found["checks"]) == 3 * len(forms)
    lines = table.text(found["table"]).splitlines()
    assert lines[0].split()[:4] == ["state", "format", "ppl", "KL"]
    assert len(lines) == 1 + len(rows)


def test_the_second_time_nothing_is_measured_but_bounds_are_judged(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(tiny, [exported(tiny, "awq")])
    for name in ("measure_many", "Model", "fingerprint"):
        monkeypatch.setattr(_measure if name == "measure_many" else stage, name, None)
    monkeypatch.setattr(lint, "check", None)
    assert run(tiny, [exported(tiny, "awq")]) == before
    found = run(tiny, [exported(tiny, "awq")], {**GATE, "divergence": divergence.Options(max_kl=1e-6)})
    assert found["status"] == "refused"
    assert [c["name"] for c in found["checks"] if not c["passed"]] == ["divergence.max_kl"]
    assert not found["exports"]["awq"]["released"]


def test_scales_off_by_five_percent_are_refused(tiny: SimpleNamespace) -> None:
    good = run(tiny, [exported(tiny, "awq")])["states"]["awq"]["kl"]
    name = "model.layers.1.mlp.down_proj.scales"
    tiny.edit(tiny.export("awq", "int4"), lambda t: t.update({name: (t[name] * 1.05).bfloat16().half()}))
    found = run(tiny, [exported(tiny, "awq")])  # the remembered results of the good directory do not count
    assert found["status"] == "refused"
    assert [fault["kind"] for fault in found["exports"]["awq"]["faults"]] == ["source"]
    assert found["table"][-1]["note"] == "not measured: 1 fault"
    foreign = run(
        tiny, [exported(tiny, "awq", artifact=False)], {**GATE, "divergence": divergence.Options(max_kl=good)}
    )
    assert foreign["exports"]["awq"]["faults"] == []
    assert foreign["status"] == "inconclusive"  # five windows: tests/gate/test_damage.py has enough of them
    assert foreign["states"]["awq"]["kl"] > good


def test_a_copy_of_the_parent_is_released_with_difference_zero(tiny: SimpleNamespace) -> None:
    shutil.copytree(tiny.parent, tiny.folder / "copy")
    strict = {
        "perplexity": perplexity.Options(max_relative_increase=0),
        "divergence": divergence.Options(max_kl=0, min_top1=1),
    }
    found = run(tiny, [Exported("copy", tiny.folder / "copy", ENGINES)], {"lint": lint.Options(), **strict})
    assert found["status"] == "released"
    assert [check["value"] for check in found["checks"]] == [0, 0, 1]


def test_one_bad_export_refuses_the_run_but_not_the_other_export(tiny: SimpleNamespace) -> None:
    tiny.edit_json(tiny.export("gptq", "int4") / "config.json", lambda c: c.update(mlp_bias=False))
    found = run(tiny, [exported(tiny, "awq"), exported(tiny, "gptq")])
    assert found["status"] == "refused"
    assert {name: e["released"] for name, e in found["exports"].items()} == {"awq": True, "gptq": False}
    assert "vllm drops it silently" in found["exports"]["gptq"]["faults"][0]["text"]


def test_logits_that_are_not_finite_are_refused_whatever_the_bounds(tiny: SimpleNamespace) -> None:
    name = "model.layers.0.mlp.down_proj.bias"
    tiny.edit(tiny.export("awq", "int4"), lambda t: t[name].fill_(float("nan")))
    found = run(tiny, [exported(tiny, "awq", artifact=False)], {"perplexity": perplexity.Options()})
    assert found["status"] == "refused"
    assert found["exports"]["awq"]["faults"][0]["kind"] == "finite"


def test_fp8_artifact_and_export_are_measured_with_the_same_quantized_inputs(tiny: SimpleNamespace) -> None:
    for kind, form in (("fp8-channel", "compressed_tensors"), ("fp8-tensor", "modelopt")):
        export = exported(tiny, form, kind)
        config = AutoConfig.from_pretrained(export.directory)
        config.__dict__.pop("quantization_config")
        states = [
            stage.artifact_state("artifact", tiny.artifact(kind), config),
            stage.plain_state("export", export.directory),
        ]
        parent = stage.plain_state("parent", tiny.parent)
        found = stage.measure_all(parent, states, tiny.windows, tiny.folder / "cache")
        assert found["states"]["export"]["same_as"] == "artifact"
        assert found["states"]["export"]["kl"] > 0


def test_the_same_tokens_in_shorter_windows_are_measured_again(tiny: SimpleNamespace, tmp_path: Path) -> None:
    states = [stage.plain_state("parent", tiny.parent), stage.plain_state("awq", exported(tiny, "awq").directory)]
    halves = tiny.windows.reshape(2 * len(tiny.windows), -1)
    stage.measure_all(states[0], states[1:], tiny.windows, tmp_path / "one")
    for some in (states[:1], states):  # parent's states and both measurements are remembered of the longer windows
        again = stage.measure_all(states[0], some[1:], halves, tmp_path / "one")["states"]
        fresh = stage.measure_all(states[0], some[1:], halves, tmp_path / str(len(some)))["states"]
        for name in fresh:
            assert (
                again[name]["windows"] == fresh[name]["windows"] and again[name]["num_tokens"] == halves[:, 1:].numel()
            )


def test_names_are_unique(tiny: SimpleNamespace) -> None:
    state = stage.plain_state("parent", tiny.parent)
    with pytest.raises(ValueError, match="different names"):
        stage.measure_all(state, [state], tiny.windows, Path("unused"))


def test_nothing_is_recovered_of_a_loss_that_may_be_noise() -> None:
    def state(nll: list[float], kl: list[float], baseline: str | None = None) -> dict[str, Any]:
        mean = sum(nll) / len(nll)
        numbers = {"nll": mean, "perplexity": math.exp(mean), "kl": sum(kl) / len(kl), "num_tokens": len(nll)}
        windows = {"nll": nll, "kl": kl, "top1": [1] * len(nll)}
        rest = dict.fromkeys(
            ("kl_stderr", "size_on_disk", "bits_per_weight", "bits_per_parameter", "seconds", "same_as")
        )
        return {**numbers, **rest, "top1": 1.0, "windows": windows, "format": "x", "baseline": baseline}

    own = [5.0, 6.0, 5.5, 6.2]
    ours = state([4.9, 5.9, 5.45, 6.1], [0.05] * 4, "rtn")

    def recovered(*rtn: Any) -> tuple[float | None, float | None]:
        found = table.rows({"parent": state(own, [0.0] * 4), "rtn": state(*rtn), "ours": ours}, {}, Sampling())
        return found[2]["perplexity_recovered"], found[2]["kl_recovered"]

    noise = [own[0] + 0.1, own[1] - 0.05, own[2] + 0.05, own[3] - 0.05]
    assert sum(noise) > sum(own), "it looks like a loss"
    perplexity, kl = recovered(noise, [0.10, 0.11, 0.10, 0.11])
    assert perplexity is None and kl == pytest.approx(1 - 0.05 / 0.105)
    assert recovered([one - 0.1 for one in own], [0.0] * 4) == (None, None), "better than the parent, and equal to it"
    assert recovered([one + 0.1 for one in own], [0.10, 0.0, 0.0, 0.0])[1] is None
    perplexity, _ = recovered([one + 0.1 for one in own], [0.1] * 4)
    assert perplexity is not None and perplexity > 1, "what is lost for certain is compared with"


def test_no_loss_at_all_is_not_written_as_a_negative_one() -> None:
    spec = {key: spec for key, _, spec in table.COLUMNS}["kl_recovered"]
    assert [table.cell(value, spec) for value in (-1e-6, 0.5, -0.5)] == ["0.0%", "50.0%", "-50.0%"]
