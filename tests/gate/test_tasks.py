"""Offline tasks against Hugging Face's whole-model forward on one unpadded sequence at a time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from gate import _examples, _lm_eval, _paired, stage, tasks
from gate._bootstrap import Sampling
from qat.checkpoint import SafetensorsFolder
from qat.micro import make_micro
from qat.model import Model

WORDS = ["the", "model", "reads", "a", "line", "of", "text", "and", "says", "what", "it", "thinks", "comes", "next"]


def test_two_tasks_have_two_names() -> None:
    tasks.Options(offline={"a": "a.jsonl"}, lm_eval=["b"])
    with pytest.raises(ValueError, match="a: names of tasks in offline and in lm_eval"):
        tasks.Options(offline={"a": "a.jsonl"}, lm_eval=["b", "a"])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro(tmp_path_factory.mktemp("micro") / "model")


def choices(count: int) -> list[dict[str, Any]]:
    rows = []
    for n in range(count):
        context = " ".join(WORDS[: 1 + n % 9])
        options = [f" {WORDS[(n + k) % len(WORDS)]}" * (1 + k % 3) for k in range(2 + n % 3)]
        rows.append({"context": context + " " * (n % 2), "choices": options, "answer": n % len(options)})
    return rows


def slow_logp(model: Any, tokenizer: Any, context: str, text: str) -> tuple[float, bool]:
    before = tokenizer(context, add_special_tokens=False)["input_ids"]
    ids = tokenizer(context + text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logp = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    total, greedy = 0.0, True
    for place in range(len(before), len(ids)):
        total += logp[place - 1, ids[place]].item()
        greedy &= int(logp[place - 1].argmax()) == ids[place]
    return total, greedy


@pytest.mark.parametrize("wave_bytes", [_examples.WAVE_BYTES, 5_000])
def test_choices_are_scored_as_by_a_loop_over_the_whole_model(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wave_bytes: int
) -> None:
    monkeypatch.setattr(_examples, "WAVE_BYTES", wave_bytes)
    rows = choices(30)
    tokenizer = AutoTokenizer.from_pretrained(micro)
    model = LlamaForCausalLM.from_pretrained(micro).float().eval()
    expected = []
    for row in rows:
        head = row["context"].rstrip(" ")  # as lm-eval: spaces at its end are scored with the choice
        tail = row["context"][len(head) :]
        rates = [slow_logp(model, tokenizer, head, tail + text)[0] / len(text) for text in row["choices"]]
        expected.append(float(rates.index(max(rates)) == row["answer"]))
    assert 0 < sum(expected) < 30
    examples = _examples.read(write(tmp_path / "a.jsonl", rows), tokenizer, None, 256)
    done: list[int] = []
    found = _examples.score(Model(AutoConfig.from_pretrained(micro), SafetensorsFolder(micro)), examples, done.append)
    assert found == expected
    assert sum(done) == sum(len(row["choices"]) for row in rows) and (len(done) > len(model.model.layers)) == (
        wave_bytes == 5_000
    )


def test_a_continuation_is_right_when_greedy_decoding_gives_it(micro: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(micro)
    model = LlamaForCausalLM.from_pretrained(micro).float().eval()
    rows = []
    for n in range(12):
        context = " ".join(WORDS[: n + 1])
        ids = tokenizer(context, return_tensors="pt", add_special_tokens=False)["input_ids"]
        greedy = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        text = tokenizer.decode(greedy)
        if text.strip() and tokenizer(text, add_special_tokens=False)["input_ids"] == greedy.tolist():
            rows += [{"context": context, "continuation": text}, {"context": context, "continuation": text[0] + "€"}]
    assert len(rows) >= 6
    examples = _examples.read(write(tmp_path / "a.jsonl", rows), tokenizer, None, 256)
    found = _examples.score(Model(AutoConfig.from_pretrained(micro), SafetensorsFolder(micro)), examples)
    assert found == [1.0, 0.0] * (len(rows) // 2)


def test_a_model_without_numbers_answers_nothing_right(micro: Path, tmp_path: Path) -> None:
    """Else it would have the share of questions whose first choice is the right one."""
    rows = [{"context": "a", "choices": [" b", " c"], "answer": n % 2} for n in range(4)]
    examples = _examples.read(write(tmp_path / "a.jsonl", rows), AutoTokenizer.from_pretrained(micro), None, 256)
    broken = LlamaForCausalLM.from_pretrained(micro).float()
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    broken.save_pretrained(tmp_path / "broken")
    for folder, right in ((micro, 2), (tmp_path / "broken", 0)):
        model = Model(AutoConfig.from_pretrained(folder), SafetensorsFolder(folder))
        assert sum(_examples.score(model, examples)) == right


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"context": "a"}, "has the keys"),
        ({"context": "a", "choices": [" b", " c"], "answer": 2}, "from 0, got 2 of 2"),
        ({"context": "a", "choices": [" b"], "answer": 0}, "two or more"),
        ({"context": "a", "choices": [" b", " "], "answer": 0}, "at least one letter"),
        ({"context": "a" * 300, "continuation": " b"}, r"302 tokens are more than the model reads \(256\)"),
        ({"context": "x", "continuation": "y"}, "mixes examples scored by acc and acc_norm"),
    ],
)
def test_a_bad_example_is_named_with_its_line(micro: Path, tmp_path: Path, row: dict[str, Any], why: str) -> None:
    path = write(tmp_path / "a.jsonl", [*choices(1), row])
    with pytest.raises(ValueError, match=why) as error:
        _examples.read(path, AutoTokenizer.from_pretrained(micro), None, 256)
    assert "mixes" in why or "a.jsonl line 2: " in str(error.value)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{'context'", "Expecting property name"),
        (b"\xff\xfe", "can't decode byte 0xff"),
        (b"[" * 100_000, "recursion"),
        (rb'{"context": "\ud800", "continuation": " b"}', "surrogates not allowed"),
    ],
    ids=["json", "bytes", "deep", "surrogate"],
)
def test_a_line_that_is_no_example_is_named_whatever_it_is(micro: Path, tmp_path: Path, line: bytes, why: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=f"a.jsonl line 2: .*{why}"):
        _examples.read(tmp_path / "a.jsonl", AutoTokenizer.from_pretrained(micro), None, 256)


def test_tasks_are_remembered_by_content(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(micro)
    windows = torch.randint(1, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    path = write(tmp_path / "a.jsonl", choices(9))
    options = tasks.Options(offline={"words": str(path)}, limit=8)
    states = [stage.plain_state("parent", micro), stage.plain_state("copy", micro)]
    calls: list[int] = []
    score = _examples.score
    monkeypatch.setattr(_examples, "score", lambda *args: calls.append(1) or score(*args))

    def measure() -> dict[str, Any]:
        found = stage.measure_all(states[0], states[1:], windows, tmp_path / "cache")
        stage.measure_tasks(found, states, tokenizer, options, tmp_path / "cache")
        return {name: state["tasks"]["words"] for name, state in found["states"].items()}

    first = measure()
    assert len(calls) == 1 and measure() == first and len(calls) == 1
    assert first["copy"] == first["parent"]
    assert len(first["copy"]["scores"]) == 8 and first["copy"]["metric"] == "acc_norm"
    assert first["copy"]["score"] == sum(first["copy"]["scores"]) / 8
    write(path, [{**row, "answer": 1} for row in choices(9)])
    assert measure() != first and len(calls) == 2


def test_drops_are_judged_by_example() -> None:
    named = {"t": "t.jsonl"}

    def state(right: int, kl: float = 0.1, count: int = 400) -> dict[str, Any]:
        scores = [1.0] * right + [0.0] * (count - right)
        return {"kl": kl, "tasks": {"t": {"metric": "acc", "score": right / count, "scores": scores}}}

    def outcome(ours: int, max_drop: float) -> str:
        options = tasks.Options(offline=named, max_drop=max_drop)
        (check,) = tasks.judge(state(ours), state(300), options, Sampling(resamples=2000))
        assert check.name == "tasks.t.max_drop" and check.value == pytest.approx((300 - ours) / 400)
        return check.outcome

    assert [outcome(300, bound) for bound in (0.0, 0.01, 0.02)] == ["undecided", "undecided", "passed"]
    bound, sampling = tasks.Options(offline=named, max_drop=0.01), Sampling()
    (few,) = tasks.judge(state(1, count=2), state(1, count=2), bound, sampling)
    assert few.outcome == "undecided" and few.needed is not None and 500 < few.needed < 550
    for count, says in ((few.needed - 5, "undecided"), (few.needed, "passed")):
        (check,) = tasks.judge(state(1, count=count), state(1, count=count), bound, sampling)
        assert check.outcome == says, "what would decide does"
    exact = tasks.Options(offline=named, max_drop=0.0)
    (copy,) = tasks.judge(state(1, kl=0.0, count=2), state(1, count=2), exact, sampling)
    assert copy.outcome == "passed" and copy.value == 0, "a copy of the parent computes what it computes"
    assert [outcome(280, bound) for bound in (0.01, 0.05, 0.10)] == ["failed", "undecided", "passed"]
    assert outcome(310, 0.0) == "passed"
    assert tasks.judge(state(1), state(300), tasks.Options(), Sampling()) == []
    gain = _paired.gain("t", state(1, count=2), state(0, count=2), Sampling())
    assert (gain.value, gain.low, gain.high) == (0.5, -1, 1), "no more can be lost or won than all questions"


def test_a_bound_that_no_task_is_held_to_is_refused() -> None:
    with pytest.raises(ValueError, match="max_drop has no task to bound; name one in offline or lm_eval"):
        tasks.Options(max_drop=0.01)
    assert tasks.Options(lm_eval=["arc_easy"], max_drop=0.01).max_drop == 0.01


def test_lm_eval_that_is_not_installed_is_said(micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    state = stage.plain_state("parent", micro)
    measured = {"states": {"parent": {"fingerprint": "x"}}}
    with pytest.raises(ValueError, match=r"\.venv/bin/pip install -e '\.\[eval\]'"):
        stage.measure_tasks(measured, [state], None, tasks.Options(lm_eval=["arc_easy"]), Path("unused"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub"), "lm-eval cannot have the data of x: Couldn't reach 'a/b'"),
        (FileNotFoundError("Dataset 'a/b' doesn't exist"), "the data of x: Dataset 'a/b' .*or name files of examples"),
        (KeyError("x"), "lm-eval has no task 'x'"),
    ],
)
def test_a_task_of_lm_eval_that_cannot_be_had_is_said(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def raises(names: list[str]) -> None:
        raise error

    monkeypatch.setattr(_lm_eval, "version", lambda: "0")
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(get_task_dict=raises))
    with pytest.raises(ValueError, match=words):
        list(_lm_eval.texts(["x"]))


LM_EVAL_TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def test_lm_eval_scores_the_same_file_alike(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the extra `eval`: not among what the tests install
    lm_eval = pytest.importorskip("lm_eval")
    tasks_of = pytest.importorskip("lm_eval.tasks")

    rows = [{**row, "context": row["context"].strip()} for row in choices(24)]
    path = write(tmp_path / "words.jsonl", rows)
    (tmp_path / "words.yaml").write_text(LM_EVAL_TASK.format(path=path))
    manager = tasks_of.TaskManager(include_path=str(tmp_path), include_defaults=False)
    evaluate = lm_eval.simple_evaluate
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda *a, **more: evaluate(*a, **more, task_manager=manager))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    config, tokenizer = AutoConfig.from_pretrained(micro), AutoTokenizer.from_pretrained(micro)
    ours = _examples.score(Model(config, SafetensorsFolder(micro)), _examples.read(path, tokenizer, None, 256))
    resident = Model(config, SafetensorsFolder(micro), resident=True)
    assert _lm_eval.score(resident, tokenizer, ["words"], None) == {"words": {"metric": "acc_norm", "scores": ours}}


def test_questions_of_lm_eval_are_read_to_be_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks_of = pytest.importorskip("lm_eval.tasks")
    path = write(tmp_path / "words.jsonl", choices(3))
    (tmp_path / "words.yaml").write_text(LM_EVAL_TASK.format(path=path))
    manager, get = tasks_of.TaskManager(include_path=str(tmp_path), include_defaults=False), tasks_of.get_task_dict
    monkeypatch.setattr(tasks_of, "get_task_dict", lambda names: get(names, manager))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    found = stage.task_texts({}, ["words"])["gate.tasks.lm_eval"]
    assert list(found) == [" ".join([row["context"], *row["choices"]]) for row in choices(3)]
    with pytest.raises(ValueError, match="lm-eval has no task"):
        list(stage.task_texts({}, ["nowhere"])["gate.tasks.lm_eval"])
