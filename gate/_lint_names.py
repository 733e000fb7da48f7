"""Names, shapes, dtypes, biases and the list of unquantized linears, from headers and configs alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gate._check import Fault
from gate.readers import Export
from gate.readers._export import COMP, FLOATS
from qat.arch import known as known_archs
from qat.coverage import base

AGAIN = "export again"


def check(export: Export, engines: Collection[str]) -> Iterator[Fault]:
    """Faults that show without reading a weight."""
    yield from _class(export)
    linears = [name for index in range(export.config.num_hidden_layers) for name in export.arch.block_linears(index)]
    slots = {f"{name}.bias" for name in linears}
    wanted = {name: shape for name, shape in export.shapes.items() if name not in slots}
    known = set(wanted)
    for name in export.linears:
        if f"{name}.weight" not in wanted:
            yield Fault("unexpected", name, "stored quantized", f"{export.arch.class_name} has no such linear", AGAIN)
            continue
        yield from _quantized(export, name)
        known |= {f"{name}.{part}" for part in export.PARTS}
    quantized = set(export.linears)
    for name, shape in wanted.items():
        if name.removesuffix(".weight") not in quantized:
            yield from _plain(export, name, shape)
    yield from _head(export)
    if export.has_cache_scales():
        for index in range(export.config.num_hidden_layers):
            known |= set(export.cache_names(index))
            yield from _cache(export, index)
    tied = {f"{export.arch.head}.weight"} if export.config.tie_word_embeddings else set()
    carried = [name for name in linears if _leaf(export, name) in export.comp_bias]
    for name in carried:
        known.add(name + COMP)
        yield from _plain(export, name + COMP, export.shapes[f"{name}.weight"][:1])
    for name in sorted(export.stored.keys() - known - slots - tied):
        rule = f"{export.arch.class_name} in {export.format} has no tensor of that name"
        yield Fault("unexpected", name, f"stored ({export.stored[name].dtype})", rule, "leave it out")
    yield from _biases(export, linears, engines)
    yield from _choice(export, linears)


def _class(export: Export) -> Iterator[Fault]:
    """Engines choose the model class by `architectures`, transformers and Tare by `model_type`."""
    right, named = export.arch.class_name, getattr(export.config, "architectures", None) or []
    others = {arch.class_name for arch in known_archs().values()} - {right}
    if not named or others & set(named):
        rule = f"engines choose the class by it, and model_type is {export.config.model_type}"
        yield Fault("config", "config.json", f"architectures {named or None}", rule, f"write [{right!r}]")


def _quantized(export: Export, name: str) -> Iterator[Fault]:
    rows, columns = export.shapes[f"{name}.weight"]
    size = export.group_size(name) or columns
    if columns % size:
        sizes = [s for s in (16, 32, 64, 128, 256) if columns % s == 0]
        rule = f"it must divide the {columns} inputs"
        yield Fault("group_size", name, f"group size {size}", rule, f"use one of {sizes or [columns]}")
        return
    layout = export.layout(name, rows, columns)
    for part, spec in layout.items():
        full = f"{name}.{part}"
        entry = export.stored.get(full)
        if entry is None:
            if spec.required:
                yield Fault("missing", full, "missing", f"{export.format} stores it for every quantized linear", AGAIN)
            continue
        if entry.dtype not in spec.dtypes:
            yield Fault("dtype", full, f"dtype {entry.dtype}", f"must be {' or '.join(spec.dtypes)}", AGAIN)
        if entry.shape not in spec.shapes:
            shapes = " or ".join(map(str, spec.shapes))
            rule = f"{export.format} stores {shapes} for ({rows}, {columns}) in groups of {size}"
            yield Fault("shape", full, f"shape {entry.shape}", rule, "make config and tensors agree")
    for part in export.PARTS | {"weight"}:
        if f"{name}.{part}" in export.stored and part not in layout:
            rule = f"the config's scheme has no {part} for it"
            yield Fault("unexpected", f"{name}.{part}", "stored", rule, "make config and tensors agree")


def _plain(export: Export, name: str, shape: tuple[int, ...]) -> Iterator[Fault]:
    entry = export.stored.get(name)
    if entry is None:
        what = "missing"
        if name == f"{export.arch.head}.weight":
            what += ", and tie_word_embeddings is false"
        yield Fault("missing", name, what, f"{export.arch.class_name} needs it; engines leave it uninitialised", AGAIN)
        return
    if entry.shape != shape:
        yield Fault("shape", name, f"shape {entry.shape}", f"the config says {shape}", "make config and tensors agree")
    if entry.dtype not in FLOATS:
        yield Fault("dtype", name, f"dtype {entry.dtype}", f"an unquantized tensor is {', '.join(FLOATS)}", AGAIN)


def _cache(export: Export, index: int) -> Iterator[Fault]:
    for name in export.cache_names(index):
        entry = export.stored.get(name)
        if entry is None:
            yield Fault(
                "missing", name, "missing", "the config declares an fp8 KV cache: engines run it at scale 1", AGAIN
            )
        elif entry.dtype not in FLOATS or entry.shape not in ((), (1,)):
            rule = "a KV-cache scale is one float"
            yield Fault("shape", name, f"{entry.dtype} {entry.shape}", rule, AGAIN)


def _head(export: Export) -> Iterator[Fault]:
    name = f"{export.arch.head}.weight"
    if export.config.tie_word_embeddings and name in export.stored:
        rule = "tie_word_embeddings is true: vLLM loads it and unties the head when it differs"
        yield Fault("tied", name, "stored beside the embedding", rule, "leave it out, or set the flag to false")


def _leaf(export: Export, name: str) -> str:
    """A linear's name relative to its block."""
    return name.removeprefix(export.arch.blocks + ".").partition(".")[2]


def _biases(export: Export, linears: list[str], engines: Collection[str]) -> Iterator[Fault]:
    """A bias is stored exactly where every engine loads one."""
    for engine in sorted({base(engine) for engine in engines}):
        if engine not in export.arch.bias_slots:
            known = ", ".join(sorted(export.arch.bias_slots))
            what, rule = f"{export.arch.class_name} for {engine}", f"which biases it loads is known of {known}"
            yield Fault("engine", "config.json", what, rule, "choose one of these")
            continue
        slots = export.arch.bias_slots[engine]
        loaded = slots.loaded(export.config)
        for name in linears:
            leaf = _leaf(export, name)
            flags = [f for f, leaves in (*slots.by_flag.items(), *slots.unless.items()) if leaf in leaves]
            full, shape = f"{name}.bias", export.shapes[f"{name}.weight"][:1]
            entry = export.stored.get(full)
            if entry is not None and leaf not in loaded and export.raw(full).any():  # zeros serve other readers
                off = [flag for flag in flags if not getattr(export.config, flag, flag in slots.unless)]
                way_out = f"set {' and '.join(off)}: true" if off else "relabel the architecture or train another slot"
                rule = f"no flag of the config declares it: {engine} drops it silently"
                yield Fault("bias_dropped", full, "stored", rule, way_out)
            elif entry is None and leaf in loaded:
                cause = f"{flags[0]} is true" if leaf not in slots.always else f"{export.arch.class_name} always has it"
                rule = f"{cause}, for every block and every fused linear: {engine} would run on uninitialised memory"
                yield Fault("bias_missing", full, "missing", rule, "write zeros where nothing was learned")
            elif entry is not None and (entry.dtype not in FLOATS or entry.shape != shape):
                rule = f"a bias is one float for each of {shape[0]} outputs"
                yield Fault("shape", full, f"{entry.dtype} {entry.shape}", rule, AGAIN)


def _choice(export: Export, linears: list[str]) -> Iterator[Fault]:
    """Config and files agree on which linears are quantized, and fused linears agree with each other."""
    if export.format == "dense":
        return
    if not export.linears:
        yield Fault("ignore", "config.json", f"{export.format}, yet nothing is quantized", "it must be", "use dense")
        return
    quantized = set(export.linears)
    for name in [*linears, export.arch.head]:
        is_quantized, excluded = name in quantized, export.excluded(name)
        if excluded is not None and is_quantized == excluded:
            what = "stored quantized, yet excluded" if is_quantized else "not quantized, yet not excluded"
            rule = "the list of unquantized linears in the config decides how engines load it"
            yield Fault("ignore", name, what, rule, "make the list name exactly the unquantized linears")
    for index in range(export.config.num_hidden_layers):
        for names in export.arch.fused(index):
            plain = [name for name in names if name not in quantized]
            if plain and len(plain) < len(names):
                rule = f"engines fuse {names[0]} ... {names[-1].rpartition('.')[2]}: all or none"
                yield Fault("fused", plain[0], "not quantized", rule, "skip all of them or none")
            ways = {name: export.stored_as(name) for name in names if name in quantized}
            if len(set(ways.values())) > 1:
                what = ", ".join(f"{name.rpartition('.')[2]} {way}" for name, way in ways.items())
                rule = f"engines fuse {', '.join(names)}: one format for all"
                yield Fault("fused", names[0], what, rule, "give them the same scheme.overrides")
