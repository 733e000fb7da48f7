"""The release: the exported directories that the gate let out, linked, with card, launchers, hashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from qat import __version__, manifest, plugins
from qat.artifact import link_or_copy

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
PROVENANCE = "tare.json"


def release(export: Path, out: Path, name: str, engines: list[str], facts: dict[str, Any]) -> None:
    """Make `out` the checkpoint in `export` plus README.md, serve/ and tare.json (hashes of every file).

    engines: those that load it. facts: what the card says; see model_card.md.j2. Existing files of `out` are replaced.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(p for p in export.rglob("*") if p.is_file()):
        target = out / file.relative_to(export)
        target.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(file, target)
    config = json.loads((export / "config.json").read_text(encoding="utf-8"))
    serve: dict[str, str] = {}
    for engine in engines:
        serve |= plugins.find("export.engines", engine).launch(name, config)
    for path, text in serve.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(text, encoding="utf-8")
        (out / path).chmod(0o755)
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    card = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name, version=__version__, serve=sorted(serve), **facts
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    (out / PROVENANCE).unlink(missing_ok=True)
    said = {"tare": __version__, **facts, "files": manifest.list_files(out)}
    manifest.write_json(out / PROVENANCE, said)
