"""Which linears of a model a scheme covers, and what about them can be refused before any work is done.

`tare plan` asks as well, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from qat import plugins
from qat.arch import Arch
from qat.scheme import Scheme, TensorFormat, kind_of, matches

SMALLEST_OFFERED = 8  # group sizes under this are not offered: a scale would cost more than the codes


class Layer(NamedTuple):
    """One quantized linear: `rows` outputs (N), `columns` inputs (K). inputs: how its activations are quantized."""

    name: str
    rows: int
    columns: int
    fmt: TensorFormat
    inputs: TensorFormat | None = None

    @property
    def groups(self) -> int:
        """Scales in a row."""
        return self.fmt.scale_shape(self.rows, self.columns)[1]

    @property
    def kind(self) -> str:
        return kind_of(self.fmt, self.inputs)


def formats(arch: Arch, inputs: Mapping[str, int], scheme: Scheme) -> dict[str, TensorFormat]:
    """The format of every linear that the scheme covers, by full name, in the order they run.

    inputs: the in_features of every linear of the blocks, by full name, in that order; as `Model.in_features`.
    Raises ValueError for a pattern of the scheme that names nothing, for a scheme that leaves nothing to quantize, for
    overrides that give linears which share an input different formats, and for group sizes that do not divide a layer's
    inputs (all layers at once).
    """
    linears, num_blocks = list(inputs), num_blocks_of(arch, inputs)
    others = [arch.head, arch.embed]
    others += [name for index in range(num_blocks) for name in arch.block_routers(index)]
    for what, patterns, known in (
        ("skip", scheme.skip, [*linears, *others]),
        ("overrides", tuple(scheme.overrides), linears),
    ):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in known):
                never = " that is ever quantized" if any(matches(pattern, name) for name in others) else ""
                raise ValueError(
                    f"scheme.{what}: {pattern!r} names no linear of this model{never}; names look like {linears[0]}, "
                    "and * stands for any characters"
                )
    found = {name: fmt for name in linears if (fmt := scheme.format_of(name)) is not None}
    if not found:
        raise ValueError("scheme.skip leaves no linear to quantize; narrow its patterns")
    _check_shared(arch, num_blocks, found)
    _check_group_sizes(found, {name: inputs[name] for name in found})
    return found


def num_blocks_of(arch: Arch, names: Iterable[str]) -> int:
    """How many blocks full names of linears come from."""
    return len({arch.split(name)[0] for name in names})


def whole_groups(arch: Arch, num_blocks: int, scheme: Scheme) -> None:
    """Raise ValueError when the scheme leaves some but not all linears that share an input as they are.

    For export formats whose engines run them as one linear: any but dense.
    """
    for index in range(num_blocks):
        for names in arch.fused(index):
            kept = [name for name in names if scheme.format_of(name) is None]
            if 0 < len(kept) < len(names):
                raise ValueError(
                    f"scheme.skip leaves {', '.join(kept)} as they are, but engines run {listed(names)} as one; skip "
                    "all of them or none, or export dense only"
                )


def check_range(arch: Arch, name: str) -> None:
    """Raise ValueError for a range method that does not do the model."""
    if arch.experts and "kl_hessian" in plugins.literal("calibrate.range", name, "NEEDS"):
        raise ValueError(
            f"calibrate.range: {name} does not do mixtures of experts: tokens come to them in another order; set it to "
            "activation"
        )


def base(engine: str) -> str:
    """The engine whose rules and bias slots `engine` has: the BASE that its file states, or itself."""
    return plugins.stated("export.engines", engine, "BASE") or engine


def loads(engine: str, format_name: str, kinds: Collection[str] = ()) -> bool:
    """Whether `engine` loads `format_name` holding `kinds` (of `Scheme.kinds`)."""
    table = plugins.literal("export.engines", engine, "LOADS")
    return format_name in table and set(kinds) <= table[format_name]


def check_engines(found: Sequence[Layer], arch: Arch, formats: Collection[str], engines: Collection[str]) -> None:
    """Raise ValueError with what every engine has against the layers, in those of the formats that it loads."""
    wrong, kinds = dict[str, None](), {layer.kind for layer in found}
    for name in formats:
        for engine in engines:
            if loads(engine, name, kinds):
                try:
                    plugins.find("export.engines", engine).check(name, found, arch)
                except ValueError as error:
                    wrong[str(error)] = None
    if wrong:
        raise ValueError("\n".join(wrong))


def _check_shared(arch: Arch, num_blocks: int, found: Mapping[str, TensorFormat]) -> None:
    """Engines run linears that share an input as one, and all experts of a block: one format for all of them."""
    for index in range(num_blocks):
        for fused in arch.fused(index):
            names = [name for name in fused if name in found]
            other = next((name for name in names if found[name] != found[names[0]]), None)
            if other:
                leaves = dict.fromkeys(f"'*.{name.rpartition('.')[2]}'" for name in names)
                raise ValueError(
                    f"scheme.overrides: {other} would be {found[other]}, {names[0]} {found[names[0]]}, but engines run "
                    f"{listed(fused)} as one; give them the same format, e.g. {' and '.join(leaves)}"
                )


def listed(names: Sequence[str]) -> str:
    """The last parts of module names, the middle left out when there are many."""
    leaves = [name.rpartition(".")[2] for name in names]
    return ", ".join(leaves) if len(leaves) < 5 else f"{names[0]} ... {names[-1]}"


def _check_group_sizes(found: Mapping[str, TensorFormat], inputs: Mapping[str, int]) -> None:
    wrong: dict[tuple[int, int], list[str]] = {}
    for name, fmt in found.items():
        size = fmt.group_of(inputs[name])
        if fmt.per != "block" and (inputs[name] % size or (fmt.bits == 4 and inputs[name] % 2)):
            wrong.setdefault((size, inputs[name]), []).append(name)
    if not wrong:
        return
    lines, offers = [], set(_divisors(min(inputs.values())))
    for (size, width), names in wrong.items():
        kinds = list(dict.fromkeys(name.split(".", 3)[-1] for name in names))
        lines.append(f"  {size} does not divide the {width} inputs of {', '.join(kinds)} ({len(names)} linears)")
    for width in set(inputs.values()):
        offers &= set(_divisors(width))
    sizes = ", ".join(map(str, sorted(offers, reverse=True))) or f"none of {SMALLEST_OFFERED} or more"
    first = next(iter(wrong.values()))[0]
    example = first.split(".")[-1]
    own = f"{{dtype: {found[first].dtype}, group_size: {next(iter(_divisors(next(iter(wrong))[1])), 2)}}}"
    raise ValueError(
        f"the group size does not fit {sum(map(len, wrong.values()))} of {len(found)} linears:\n"
        + "\n".join(lines)
        + f"\nsizes that divide every layer's inputs: {sizes}. Set scheme.weights.group_size to one of them, or give "
        f"each kind of layer its own, e.g. scheme.overrides: {{'*.{example}': {own}}}"
    )


def _divisors(width: int) -> list[int]:
    """Even group sizes up to 256 that divide `width`, the largest first."""
    return [size for size in range(256, SMALLEST_OFFERED - 1, -2) if width % size == 0]
