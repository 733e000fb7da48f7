"""AutoGPTQ, 4 bits: w[n, k] = (q[n, k] - z[n, g_idx[k]]) * s[n, g_idx[k]].

X.qweight  int32 [K / 8, N]    bits 4 i .. 4 i + 3 of word [j, n] are input 8 j + i
X.qzeros   int32 [K / g, N / 8]   bits 4 i .. of word [j, m] are output 8 m + i;
                               checkpoint_format gptq (v1) stores z - 1, gptq_v2 stores z
X.scales   float16 or bfloat16 [K / g, N]
X.g_idx    int32 [K]           group of each input, k // g unless activation order was used; may be left out
8 bits: the same with four bytes in a word. `dynamic` gives linears that match a pattern other bits or group sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gate.readers._export import BrokenRule, Export, Shape, Spec, fits, unpack_bytes, unpack_nibbles

SYMMETRIC_WORD = {4: 0x77777777, 8: 0x7F7F7F7F}  # zero points of 8 and 128, less the 1 of version 1
SYMMETRIC_WORD_2 = {4: -2004318072, 8: -2139062144}  # in version 2: 0x88888888 and 0x80808080


class Rule(Shape):
    bits: int = 4
    group_size: int = -1


class Config(Shape):
    bits: int | None = None
    group_size: int = -1
    dynamic: dict[str, Rule] | None = None
    modules_in_block_to_quantize: list[str | list[str]] | None = None


class Reader(Export):
    """A directory in AutoGPTQ's layout, version 1 or 2."""

    PARTS = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    SHAPE = Config

    def check(self) -> None:
        q = self.quantization
        found = {"bits": q.get("bits"), "sym": q.get("sym"), "checkpoint_format": q.get("checkpoint_format", "gptq")}
        for key, right in (("bits", (4, 8)), ("sym", (True,)), ("checkpoint_format", ("gptq", "gptq_v2"))):
            if found[key] not in right:
                raise ValueError(
                    f"{self.folder}: gptq with {key} {found[key]!r} is not read; write {key}: {right[0]!r}"
                )

        for pattern, options in (q.get("dynamic") or {}).items():
            if options.get("bits", 4) not in (4, 8) or options.get("sym", True) is not True:
                raise ValueError(
                    f"{self.folder}: gptq with {options} for {pattern} is not read; 4 or 8 bits, sym: true"
                )

    def _option(self, name: str, key: str) -> int:
        """`bits` or `group_size` of a linear: the first rule that matches it, else that of the whole model."""
        usual: int = self.quantization.get(key, -1)
        for pattern, options in (self.quantization.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and fits(pattern.removeprefix("+:"), name):
                return int(options.get(key, usual))
        return usual

    def group_size(self, name: str) -> int | None:
        size = self._option(name, "group_size")
        return None if size == -1 else size

    def stored_as(self, name: str) -> str:
        return f"{self._option(name, 'bits')} bits {super().stored_as(name)}"

    def excluded(self, name: str) -> bool | None:
        skips = [p.removeprefix("-:") for p in self.quantization.get("dynamic") or {} if p.startswith("-:")]
        if any(fits(pattern, name) for pattern in skips):
            return True
        listed = self.quantization.get("modules_in_block_to_quantize")
        if not listed:
            return None
        flat = [m for entry in listed for m in (entry if isinstance(entry, list) else [entry])]
        return not any(name.endswith(module) for module in flat)

    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        groups, per_word = columns // (self.group_size(name) or columns), 32 // self._option(name, "bits")
        return {
            "qweight": Spec(("I32",), ((columns // per_word, rows),)),
            "qzeros": Spec(("I32",), ((groups, rows // per_word),)),
            "scales": Spec(("F16", "BF16"), ((groups, rows),)),
            "g_idx": Spec(("I32",), ((columns,),), required=False),
        }

    def codes(self, name: str) -> Tensor:
        words = self.raw(f"{name}.qweight").T
        return unpack_nibbles(words) if self._option(name, "bits") == 4 else unpack_bytes(words)

    def zero(self, name: str) -> Tensor:
        words = self.raw(f"{name}.qzeros")
        is_4 = self._option(name, "bits") == 4
        stored = unpack_nibbles(words) if is_4 else (unpack_bytes(words).int() + 128).to(torch.uint8)
        is_v2 = self.quantization.get("checkpoint_format") == "gptq_v2"
        return (stored if is_v2 else stored + 1).T.contiguous()

    def scale(self, name: str) -> Tensor:
        return self.raw(f"{name}.scales").float().T.contiguous()

    def group_of_input(self, name: str) -> Tensor | None:
        """The stored g_idx, int64 (K,), or None."""
        return self.raw(f"{name}.g_idx").long() if f"{name}.g_idx" in self.stored else None

    def weight(self, name: str) -> Tensor:
        groups = self.group_of_input(name)
        if groups is None:
            return super().weight(name)
        codes = self.codes(name)
        offset = self.offset(name, codes.dtype)
        assert isinstance(offset, Tensor), "zero points are always stored"
        offset = torch.index_select(offset.squeeze(-1), 1, groups)
        return (codes.float() - offset) * torch.index_select(self.scale(name), 1, groups)

    def broken_rules(self, name: str, rows: int, columns: int) -> Iterator[BrokenRule]:
        words = self.raw(f"{name}.qzeros")
        is_v2 = self.quantization.get("checkpoint_format") == "gptq_v2"
        right = (SYMMETRIC_WORD_2 if is_v2 else SYMMETRIC_WORD)[self._option(name, "bits")]
        bad = words != right
        if bad.any():
            value = f"{int(words[bad][0]) & 0xFFFFFFFF:#010x} in {int(bad.sum())} of {bad.numel()} words"
            rule = f"symmetric codes have the zero word {right & 0xFFFFFFFF:#010x}; vLLM assumes it, others read it"
            yield BrokenRule("qzeros", value, rule, "write it everywhere; asymmetric weights go into awq")
        groups = self.group_of_input(name)
        if groups is not None:
            trivial = torch.arange(columns) // (self.group_size(name) or columns)
            bad = groups != trivial
            if bad.any():
                k = int(bad.nonzero()[0])
                value = f"{int(groups[k])} at input {k}, {int(bad.sum())} not k // group_size"
                yield BrokenRule("g_idx", value, "engines drop g_idx, so that it must be trivial", "use static groups")
