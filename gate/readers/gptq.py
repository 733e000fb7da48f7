"""AutoGPTQ: w[n, k] = (q[n, k] - z[n, g_idx[k]]) * s[n, g_idx[k]].

X.qweight  int32 [K / 8, N]    bits 4 i .. 4 i + 3 of word [j, n] are input 8 j + i
X.qzeros   int32 [K / g, N / 8]   bits 4 i .. of word [j, m] are output 8 m + i;
                               checkpoint_format gptq (v1) stores z - 1, gptq_v2 stores z
X.scales   float16 or bfloat16 [K / g, N]
X.g_idx    int32 [K]           group of each input, k // g unless activation order was used; may be left out
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from gate.readers._export import BrokenRule, Export, Spec, unpack_nibbles

SYMMETRIC_WORD = 0x77777777  # eight zero points of 8, less the 1 of version 1


class Reader(Export):
    """A directory in AutoGPTQ's layout, version 1 or 2."""

    PARTS = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def check(self) -> None:
        q = self.quantization
        found = {"bits": q.get("bits"), "sym": q.get("sym"), "checkpoint_format": q.get("checkpoint_format", "gptq")}
        for key, right in (("bits", (4,)), ("sym", (True,)), ("checkpoint_format", ("gptq", "gptq_v2"))):
            if found[key] not in right:
                raise ValueError(
                    f"{self.folder}: gptq with {key} {found[key]!r} is not read; write {key}: {right[0]!r}"
                )

    def group_size(self, name: str) -> int | None:
        size = self.quantization.get("group_size", -1)
        for pattern, options in (self.quantization.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), name):
                size = options.get("group_size", size)
                break
        return None if size == -1 else int(size)

    def excluded(self, name: str) -> bool | None:
        skips = [p.removeprefix("-:") for p in self.quantization.get("dynamic") or {} if p.startswith("-:")]
        if any(re.match(pattern, name) for pattern in skips):
            return True
        listed = self.quantization.get("modules_in_block_to_quantize")
        if not listed:
            return None
        flat = [m for entry in listed for m in (entry if isinstance(entry, list) else [entry])]
        return not any(name.endswith(module) for module in flat)

    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        groups = columns // (self.group_size(name) or columns)
        return {
            "qweight": Spec(("I32",), ((columns // 8, rows),)),
            "qzeros": Spec(("I32",), ((groups, rows // 8),)),
            "scales": Spec(("F16", "BF16"), ((groups, rows),)),
            "g_idx": Spec(("I32",), ((columns,),), required=False),
        }

    def codes(self, name: str) -> Tensor:
        return unpack_nibbles(self.raw(f"{name}.qweight").T)

    def zero(self, name: str) -> Tensor:
        stored = unpack_nibbles(self.raw(f"{name}.qzeros"))
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
        offset = torch.index_select(self.zero(name).float(), 1, groups)
        return (self.codes(name).float() - offset) * torch.index_select(self.scale(name), 1, groups)

    def broken_rules(self, name: str, rows: int, columns: int) -> Iterator[BrokenRule]:
        words = self.raw(f"{name}.qzeros")
        right = -2004318072 if self.quantization.get("checkpoint_format") == "gptq_v2" else SYMMETRIC_WORD
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
