"""key=value arguments of the scripts beside this file."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def read(argv: list[str], defaults: Mapping[str, str], more: Collection[str] = ()) -> dict[str, str]:
    """`defaults` with what is given in their place; more: keys without a default. Ends the script for another key."""
    if odd := [argument for argument in argv if "=" not in argument]:
        raise SystemExit(f"{' '.join(odd)}: arguments are key=value; see the top of the script")
    given = dict(argument.split("=", 1) for argument in argv)
    if unknown := sorted(given.keys() - defaults.keys() - set(more)):
        raise SystemExit(f"unknown arguments {unknown}; known: {', '.join([*defaults, *more])}")
    return {**defaults, **given}
