"""How fast an export is served, against the parent, by the engine's own benchmark on this machine.

In each pair the engine is started on the parent and on every export that it must load, one after the other, beginning
with another one each time, and asked `batches` requests at once of `prompt_tokens` and `output_tokens`: time to the
first token, time between tokens, tokens a second. Bounds are on the geometric mean over pairs of export / parent.
Memory is what the engine logs of the weights on the GPU, on a CPU what its processes hold. The result is kept for this
machine and program; `fresh=gate` measures again, as it must after the engine was updated.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gate import _paired
from gate._bootstrap import Sampling
from gate._check import FAILED, Check, estimated
from qat.scheme import Section

VERSION = 1


class Options(Section):
    """engine: a file of gate/servers, one of export.engines. program: how it is called, or a python that has it.

    pairs: starts of parent and exports. arguments: passed on to the engine's server, such as --max-model-len 4096.
    max_first_token_ratio, max_inter_token_ratio: of seconds, 1.1 allows 10% more than the parent takes;
    min_throughput_ratio: of tokens a second. null: measured, not judged.
    """

    engine: str = Field("vllm")
    program: str = Field("vllm", min_length=1)
    batches: list[Annotated[int, Field(gt=0)]] = Field([1, 8], min_length=1)
    prompt_tokens: int = Field(512, gt=0)
    output_tokens: int = Field(64, gt=1)
    pairs: int = Field(5, ge=2)
    arguments: list[str] = Field([])
    max_first_token_ratio: float | None = Field(None, gt=0)
    max_inter_token_ratio: float | None = Field(None, gt=0)
    min_throughput_ratio: float | None = Field(None, gt=0)


def judge(measured: dict[str, Any], parent: dict[str, Any], options: Options, sampling: Sampling) -> list[Check]:
    """The checks of one state, of each batch. measured, parent: with `latency` of the same pairs.

    None for a state that the engine need not load.
    """
    ours, theirs = measured.get("latency"), parent.get("latency")
    if ours is None or theirs is None:
        return []
    if "error" in ours:
        text = f"{options.engine} does not serve it: {ours['error']}"
        return [Check("latency.served", 0.0, 1.0, False, text, FAILED)]
    bounds = (
        ("max_first_token_ratio", "first_token_s", "{:.2f} ms to the first token", 1e3),
        ("max_inter_token_ratio", "inter_token_s", "{:.2f} ms between tokens", 1e3),
        ("min_throughput_ratio", "tokens_per_s", "{:.1f} tokens/s", 1.0),
    )
    checks = []
    for batch, numbers in ours["batches"].items():
        for option, key, spec, factor in bounds:
            bound = getattr(options, option)
            if bound is not None:
                own = theirs["batches"][batch][key]
                means = (spec.format(factor * sum(each) / len(each)) for each in (numbers[key], own))
                text = f"batch {batch}: {next(means)}, the parent's {next(means)}: {{value}} of it"
                ratio = _paired.ratio(numbers[key], own, sampling)
                name, upper = f"latency.batch{batch}.{option}", option.startswith("max_")
                checks.append(estimated(name, ratio, bound, ".3f", text, "pairs", upper))
    return checks
