"""What goes together in a recipe: scheme with methods and learnables, formats with the scheme, engines with formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qat import plugins
from qat.scheme import Scheme
from qat.sections import Calibrate, Export

if TYPE_CHECKING:
    from qat.recipe import Recipe


def without_effect(recipe: Recipe) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """(path, problem) for methods and learnables that a dtype of the scheme has no use for."""
    scheme, calibrate = recipe.scheme, recipe.calibrate
    dtypes = {fmt.dtype for fmt in scheme.formats}
    inputs = "plain" if scheme.inputs is None else "quantized"

    def able(question: str) -> str:
        package, names = f"calibrate.{question}", plugins.names(f"calibrate.{question}")
        names = [name for name in names if dtypes <= set(plugins.literal(package, name, "DTYPES"))]
        is_transform = question == "transform"
        return _listed(n for n in names if not is_transform or inputs in plugins.literal(package, n, "INPUTS"))

    for question in ("transform", "range", "round"):
        chosen = getattr(calibrate, question).name
        for dtype in sorted(dtypes - set(plugins.literal(f"calibrate.{question}", chosen, "DTYPES"))):
            yield ("calibrate", question), f"{chosen} does not do {dtype}; these do: {able(question)}"
    if inputs not in plugins.literal("calibrate.transform", chosen := calibrate.transform.name, "INPUTS"):
        what = f"{chosen} is not for {inputs} inputs (scheme.inputs is {scheme.inputs or 'null'})"
        yield ("calibrate", "transform"), f"{what}; these are: {able('transform')}"
    yield from _inputs_without_effect(scheme, calibrate.inputs.name)
    symmetric = {fmt.dtype for fmt in scheme.formats if fmt.symmetric}
    for index, kind in ((index, kind) for index, train in enumerate(recipe.trainings) for kind in train.learn):
        why, path = None, ("train", index) if isinstance(recipe.train, list) else ("train",)
        if missing := dtypes - set(plugins.literal("qat.learn", kind, "DTYPES")):
            why = f"{kind} is not there to be learned in {_listed(missing)}"
        elif symmetric and plugins.literal("qat.learn", kind, "NEEDS_ZERO"):
            why = f"symmetric {_listed(symmetric)} has no zero points"
        if why:
            own = ".".join(map(str, (*path, "learn", kind)))
            yield (*path, "learn", kind), f"{why}; set {own} to null, or train to null"


def _inputs_without_effect(scheme: Scheme, chosen: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, problem) for a range of static activations and KV cache that does not do them, or has none to do."""
    formats = (scheme.inputs, scheme.kv_cache)
    static = {fmt.dtype for fmt in formats if fmt is not None and not fmt.dynamic}
    does = {name: plugins.literal("calibrate.range", name, "INPUTS") for name in plugins.names("calibrate.range")}
    if not static and chosen != Calibrate.model_fields["inputs"].default:
        yield ("calibrate", "inputs"), f"{chosen}, but the scheme has no static inputs and no kv_cache; leave it out"
    elif missing := static - does[chosen]:
        able = [name for name in does if static <= does[name]]
        yield (
            ("calibrate", "inputs"),
            f"{chosen} does not do activations in {_listed(missing)}; these do: {_listed(able)}",
        )


def misfits(scheme: Scheme, export: Export) -> Iterator[tuple[str, str]]:
    """(key of export, problem) for formats that cannot hold the scheme, and where formats and engines do not meet."""

    def holds(name: str) -> bool:
        kinds, mixed = (plugins.literal("export.formats", name, constant) for constant in ("HOLDS", "MIXED_GROUPS"))
        cache = scheme.kv_cache is None or plugins.literal("export.formats", name, "KV_CACHE")
        return scheme.kinds <= kinds and (mixed or not scheme.mixed_groups) and cache

    several = scheme.mixed_groups and len(scheme.kinds) == 1
    what = " and ".join(sorted(scheme.kinds)) + (" with several group sizes" if several else "")
    what += " with KV-cache scales" if scheme.kv_cache else ""
    able = [name for name in plugins.names("export.formats") if holds(name)]
    loads = {}  # dense is a plain checkpoint, which every engine loads
    for engine in plugins.names("export.engines"):
        table = plugins.literal("export.engines", engine, "LOADS")
        loads[engine] = {name for name in able if name == "dense" or scheme.kinds <= set(table.get(name, ()))}
        if scheme.kv_cache:
            loads[engine] &= plugins.literal("export.engines", engine, "KV_CACHE")
    for name in export.formats:
        if name not in able:
            yield "formats", f"{name} cannot hold {what}; these can: {_listed(able)}"
        elif not any(name in loads[engine] for engine in export.engines):
            others = _listed(engine for engine in loads if name in loads[engine])
            yield "formats", f"{name} with {what} is not loaded by {_listed(export.engines)}; it is by: {others}"
    for engine in export.engines:
        if not loads[engine] & set(export.formats):
            yield (
                "engines",
                f"{engine} loads none of the formats asked for; of {what} it loads: {_listed(loads[engine])}",
            )


def _listed(words: Any) -> str:
    return ", ".join(sorted(words)) or "none"
