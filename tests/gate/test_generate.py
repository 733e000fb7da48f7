"""Generation tasks against transformers' `generate`, one prompt at a time, and against decoding without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from gate import _examples, _generate, stage, tasks
from gate._generate import Prompt, contains, exact_match, numeric
from gate._inputs import hooks
from qat.checkpoint import SafetensorsFolder
from qat.micro import make_micro
from qat.model import Model
from tests.artifacts import config_of

WORDS = ["the", "model", "reads", "a", "line", "of", "text", "and", "says", "what", "it", "thinks", "comes", "next"]
PROMPTS = [" ".join(WORDS[n % 5 : 2 + n]) for n in range(11)]


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_micro(tmp_path_factory.mktemp("micro") / "model")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def resident(micro: Path, **more: Any) -> Model:
    return Model(AutoConfig.from_pretrained(micro), SafetensorsFolder(micro), resident=True, **more)


def alone(micro: Path, text: str, count: int, ends: list[int]) -> list[int]:
    """What transformers' own model says after one prompt, without padding."""
    tokenizer, model = AutoTokenizer.from_pretrained(micro), LlamaForCausalLM.from_pretrained(micro).float().eval()
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    how = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=ends)
    found: list[int] = model.generate(ids, generation_config=how)[0, ids.shape[1] :].tolist()
    return found


def test_texts_in_batches_are_those_of_one_prompt_at_a_time(micro: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(micro)
    said = [alone(micro, text, 6 if n % 2 else 9, [0]) for n, text in enumerate(PROMPTS)]
    end = said[3][2]  # a token that is said ends texts: some early, the batch goes on
    said = [alone(micro, text, 6 if n % 2 else 9, [0, end]) for n, text in enumerate(PROMPTS)]
    assert len({len(one) for one in said}) > 2 and len(PROMPTS) > _generate.BATCH
    rows = [{"prompt": p, "answer": "x", "max_tokens": 6 if n % 2 else 9} for n, p in enumerate(PROMPTS)]
    prompts: Any = _examples.read(write(tmp_path / "a.jsonl", rows), tokenizer, None, 256)
    done: list[int] = []
    model = resident(micro)
    own = model.root.generation_config
    found = _generate.texts(model, prompts, tokenizer, [0, end], done.append)
    kept = [one[: one.index(end)] if end in one else one for one in said]
    assert found == [tokenizer.decode(one, skip_special_tokens=True) for one in kept]
    assert sum(done) == len(PROMPTS) and model.root.generation_config is own

    rows = [{**row, "answer": ["nothing", text]} for row, text in zip(rows, found, strict=True) if text.strip()]
    assert len(rows) > 3
    prompts = _examples.read(write(tmp_path / "a.jsonl", [*rows, {**rows[0], "answer": "€"}]), tokenizer, None, 256)
    assert _generate.score(model, prompts, tokenizer, [0, end]) == [1.0] * len(rows) + [0.0]


def test_a_stop_text_ends_the_text_before_it(micro: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(micro)
    whole = tokenizer.decode(alone(micro, PROMPTS[4], 30, [0]), skip_special_tokens=True)
    stop = whole[12:14]
    before = whole[: whole.index(stop)]
    row = {"prompt": PROMPTS[4], "answer": before + "€", "max_tokens": 30, "stop": ["€€", stop]}
    prompts: Any = _examples.read(write(tmp_path / "a.jsonl", [row]), tokenizer, None, 256)
    (text,) = _generate.texts(resident(micro), prompts, tokenizer, [0])
    assert text.startswith(before + stop) and len(text) < len(whole), "it did not run on"
    assert _generate.cut(text, prompts[0].stop) == before
    assert _generate.right(Prompt((1,), (before,), "exact_match", 1, (stop,)), whole) == 1.0
    assert _generate.right(Prompt((1,), (whole,), "exact_match", 1, (stop,)), whole) == 0.0


def test_a_quantized_cache_is_the_one_that_is_decoded_from(micro: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(micro)

    def model() -> Model:
        made = resident(micro)
        scales = (torch.tensor([0.02]), torch.tensor([0.04]))  # coarse enough to change what is said
        made.prepare = hooks(made.arch, None, lambda index: scales)
        return made

    slow = model()
    expected = []
    with slow.ends(), torch.no_grad():
        for index in range(len(slow.blocks)):
            slow.load_block(index)
        for text in PROMPTS:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            start = len(ids)
            for _ in range(12):  # the whole text again for every token
                ids = [*ids, int(slow.root(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())]
            expected.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    rows = [{"prompt": text, "answer": "x", "max_tokens": 12} for text in PROMPTS]
    prompts: Any = _examples.read(write(tmp_path / "a.jsonl", rows), tokenizer, None, 256)
    assert _generate.texts(model(), prompts, tokenizer, []) == expected
    assert _generate.texts(resident(micro), prompts, tokenizer, []) != expected


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "mixtral", "qwen3_moe"])
def test_every_architecture_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    config = config_of(family, eos_token_id=None)
    torch.manual_seed(1)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path, save_original_format=True)
    ids = [[4, 5, 6], [6, 5, 4, 6, 5, 4, 6, 5], [5]]
    how = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)
    said = [whole.generate(torch.tensor([one]), generation_config=how)[0, len(one) :].tolist() for one in ids]
    prompts = [Prompt(tuple(one), ("x",), "exact_match", 9, ()) for one in ids]
    numbers = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    assert _generate.texts(resident(tmp_path), prompts, numbers, []) == [numbers.decode(one) for one in said]
    assert len({tuple(one) for one in said}) == len(said)


@pytest.mark.parametrize(
    ("match", "text", "answer", "expected"),
    [
        (exact_match, " Paris\n", "Paris", True),
        (exact_match, "Paris.", "Paris", False),
        (contains, "It is Paris.", "Paris", True),
        (contains, "It is paris.", "Paris", False),
        (numeric, "6 x 7 = 42.", "42", True),
        (numeric, "42 of 50", "42", False),
        (numeric, "that is 1,234.50 EUR", "1234.5", True),
        (numeric, "10-5", "5", True),
        (numeric, "it fell to -5", "-5.0", True),
        (numeric, "none", "0", False),
    ],
)
def test_an_answer_is_met_as_the_example_says(match: Any, text: str, answer: str, expected: bool) -> None:
    assert match(text, answer) is expected


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a"}, "answer must be there"),
        ({"prompt": "a", "answer": "b", "stpo": "x"}, "'stpo'"),
        ({"prompt": ["a"], "answer": "b"}, "a prompt is a text"),
        ({"prompt": "a", "answer": []}, "got none"),
        ({"prompt": "a", "answer": 4}, "answer is a text or a list of texts"),
        ({"prompt": "a", "answer": "b", "stop": [""]}, "none of them empty"),
        ({"prompt": "a", "answer": "b", "match": ["exact"]}, "match is one of exact_match, contains, numeric"),
        ({"prompt": "a", "answer": "four", "match": "numeric"}, "is a number, got 'four'"),
        ({"prompt": "a", "answer": "b", "max_tokens": 0}, "from 1, got 0"),
        ({"prompt": "", "answer": "b"}, "has no token"),
        ({"prompt": "a", "answer": "b", "max_tokens": 256}, r"more than the model reads \(256\)"),
        ({"prompt": "a", "answer": "b", "match": "contains"}, "mixes examples scored by contains and exact_match"),
    ],
)
def test_a_bad_prompt_is_named_with_its_line(micro: Path, tmp_path: Path, row: dict[str, Any], why: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "b"}, row])
    with pytest.raises(ValueError, match=why) as error:
        _examples.read(path, AutoTokenizer.from_pretrained(micro), None, 256)
    assert "mixes" in why or "a.jsonl line 2: " in str(error.value)


def test_the_tokens_that_end_a_text_are_all_that_the_model_names(micro: Path, tmp_path: Path) -> None:
    config, tokenizer = AutoConfig.from_pretrained(micro), AutoTokenizer.from_pretrained(micro)
    config.eos_token_id = [5, 7]
    assert _generate.ends(tmp_path, config, tokenizer) == sorted({5, 7, tokenizer.eos_token_id})
    GenerationConfig(eos_token_id=[9, 7]).save_pretrained(tmp_path)
    assert _generate.ends(tmp_path, config, tokenizer) == sorted({5, 7, 9, tokenizer.eos_token_id})


def test_generation_is_paired_and_remembered_like_other_tasks(
    micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(micro)
    said = [tokenizer.decode(alone(micro, text, 5, [0]), skip_special_tokens=True) for text in PROMPTS]
    rows = [{"prompt": p, "answer": s or "x", "max_tokens": 5} for p, s in zip(PROMPTS, said, strict=True)]
    options = tasks.Options(offline={"say": str(write(tmp_path / "a.jsonl", rows))}, limit=10, max_drop=0.5)
    states = [stage.plain_state("parent", micro), stage.plain_state("copy", micro)]
    calls: list[int] = []
    score = _generate.score
    monkeypatch.setattr(_generate, "score", lambda *args: calls.append(1) or score(*args))
    windows = torch.randint(1, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    steps: list[tuple[int, int]] = []
    leave = stage.report.Steps.__exit__
    monkeypatch.setattr(
        stage.report.Steps, "__exit__", lambda self, *e: steps.append((self.done, self.total)) or leave(self, *e)
    )

    def measure() -> dict[str, Any]:
        found = stage.measure_all(states[0], states[1:], windows, tmp_path / "cache")
        stage.measure_tasks(found, states, tokenizer, options, tmp_path / "cache")
        return found["states"]

    first = measure()
    assert len(calls) == 1 and measure() == first and len(calls) == 1
    assert steps == [(20, 20), (20, 20)], "what is remembered is done too"
    assert first["copy"]["tasks"] == first["parent"]["tasks"]
    found = first["copy"]["tasks"]["say"]
    assert found["metric"] == "exact_match" and found["scores"] == [float(bool(s)) for s in said[:10]]
    (check,) = tasks.judge(first["copy"], first["parent"], options, stage._verdict.Sampling(resamples=500))
    assert check.value == 0 and check.examples == 10
