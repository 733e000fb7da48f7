"""AutoAWQ, GEMM layout: w[n, k] = (q[n, k] - z[n, k // g]) * s[n, k // g].

X.qweight  int32 [K, N / 8]    bits 4 i .. 4 i + 3 of word j are column 8 j + (0, 2, 4, 6, 1, 3, 5, 7)[i]
X.qzeros   int32 [K / g, N / 8]   the same order; the true zero point 0..15
X.scales   float16 or bfloat16 [K / g, N]
"""

from __future__ import annotations

from torch import Tensor

from gate.readers._export import Export, Shape, Spec, unpack_nibbles

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Config(Shape):
    group_size: int = -1
    q_group_size: int = -1
    modules_to_not_convert: list[str] | None = None


class Reader(Export):
    """A directory in AutoAWQ's GEMM layout."""

    PARTS = frozenset({"qweight", "qzeros", "scales"})
    SHAPE = Config

    def check(self) -> None:
        q = self.quantization
        found = {"bits": q.get("bits", q.get("w_bit")), "zero_point": q.get("zero_point")}
        found["version"] = str(q.get("version", "gemm")).lower()
        for key, right in (("bits", 4), ("zero_point", True), ("version", "gemm")):
            if found[key] != right:
                raise ValueError(f"{self.folder}: awq with {key} {found[key]!r} is not read; write {key}: {right!r}")

    def group_size(self, name: str) -> int | None:
        size = int(self.quantization.get("group_size", self.quantization.get("q_group_size", -1)))
        return None if size == -1 else size

    def excluded(self, name: str) -> bool | None:
        # engines match these words anywhere in a name, and infer the list from the files when there is none
        words = self.quantization.get("modules_to_not_convert")
        return any(word in name for word in words) if words else None

    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        groups = columns // (self.group_size(name) or columns)
        return {
            "qweight": Spec(("I32",), ((columns, rows // 8),)),
            "qzeros": Spec(("I32",), ((groups, rows // 8),)),
            "scales": Spec(("F16", "BF16"), ((groups, rows),)),
        }

    def codes(self, name: str) -> Tensor:
        return unpack_nibbles(self.raw(f"{name}.qweight"), ORDER).T.contiguous()

    def zero(self, name: str) -> Tensor:
        return unpack_nibbles(self.raw(f"{name}.qzeros"), ORDER).T.contiguous()

    def scale(self, name: str) -> Tensor:
        return self.raw(f"{name}.scales").float().T.contiguous()
