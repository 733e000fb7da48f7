"""What `tare lint` prints, written out again, is every fault."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from gate import lint
from gate._check import Fault

NUMBERS = st.sets(st.integers(0, 30), min_size=1)
LINEAR = "model.layers.{}.mlp.experts.{}.w2"


@given(st.dictionaries(st.tuples(st.integers(0, 2), st.sampled_from(["8 inputs", "9 inputs"])), NUMBERS, min_size=1))
def test_lines_say_every_fault_and_layers_share_them(planted: dict[tuple[int, str], set[int]]) -> None:
    every = [(layer, *key) for key, layers in planted.items() for layer in layers]
    random.Random(0).shuffle(every)  # in any order
    faults = [
        Fault("fused", name := LINEAR.format(layer, expert), what, f"engines fuse {name} and others", "skip all")
        for layer, expert, what in every
    ]
    lines, said = list(lint.report([*faults, Fault("head", "lm_head", "1.5", "is plain", "skip it")])), []
    for line in lines[:-1]:  # written out again, by hand
        numbers, count = re.search(r"layers\.([0-9.,]+)\.mlp", line), re.search(r" \((\d+) layers\)$", line)
        assert numbers is not None
        ends = [[int(end) for end in part.split("..")] for part in numbers[1].split(",")]
        layers = [layer for first, *last in ends for layer in range(first, (last or [first])[0] + 1)]
        assert len(layers) == (int(count[1]) if count else 1)
        text = line.removesuffix(count[0]) if count else line
        said += [text.replace(f"layers.{numbers[1]}.", f"layers.{layer}.") for layer in layers]
    assert sorted(said) == sorted(map(str, faults)) and len(lines) == len(planted) + 1
    assert lines[-1] == "lm_head: 1.5; is plain; skip it"
