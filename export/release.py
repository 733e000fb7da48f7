"""The release: the exported directories that the gate let out, linked, with card, launchers, hashes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from qat import __version__, manifest, plugins
from qat.artifact import link_or_copy
from qat.report import plain

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
PROVENANCE = "tare.json"


def release(export: Path, out: Path, name: str, engines: list[str], facts: dict[str, Any]) -> list[str]:
    """Make `out` the checkpoint in `export` plus README.md, serve/ and tare.json (hashes of every file).

    name: what it is called there; letters that a shell or Markdown has a use for become -. engines: those that load it.
    facts: what the card says; see model_card.md.j2. Existing files of `out` are replaced.
    Returns what a person must know of engines that were not run, `trtllm_legacy: NOT RUN HERE: ...`.
    """
    name = re.sub(r"[^\w.-]+", "-", name).strip("-")
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
        if not path.endswith(".yaml"):
            (out / path).chmod(0o755)
    notes = []
    for engine in engines:
        note = getattr(plugins.find("export.engines", engine), "note", None)
        if note is not None:
            notes.append(f"{engine}: {note()}")
        prepare = getattr(plugins.find("export.engines", engine), "prepare", None)
        if prepare is not None:  # files that this engine wants made of the checkpoint's
            prepare(out)
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["plain"] = plain
    card = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        version=__version__,
        serve=[path for path in sorted(serve) if not path.endswith(".yaml")],
        notes=notes,
        front=_front_matter(name, facts),
        **facts,
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    (out / PROVENANCE).unlink(missing_ok=True)
    said = {"tare": __version__, "status": "released", **facts, "files": manifest.list_files(out)}
    manifest.write_json(out / PROVENANCE, said)
    return notes


def _front_matter(name: str, facts: dict[str, Any]) -> str:
    """The YAML head of a model card, with what was measured as `model-index` (the hub's page on model cards)."""
    row, text = facts["rows"][-1], facts["evaluation"]
    said = {
        "perplexity": ("Perplexity", row["perplexity"]),
        "kl_divergence": ("KL divergence to the parent (nats per token)", row["kl"]),
        "top1_agreement": ("Top-1 agreement with the parent", row["top1"]),
    }
    metrics = [{"type": kind, "name": label, "value": value} for kind, (label, value) in said.items()]
    words = f"{text['source']}, {text['num_windows']} windows of {text['length']} tokens"
    where = {"name": words, "type": text["source"]}
    results = [{"task": {"type": "text-generation"}, "dataset": where, "metrics": metrics}]
    for task in facts["tasks"]:
        dataset = {"name": f"{task['task']}, {task['examples']} examples", "type": task["task"]}
        score = {"type": task["metric"], "name": task["metric"], "value": task["score"]}
        results.append({"task": {"type": "text-generation"}, "dataset": dataset, "metrics": [score]})
    front = {
        "base_model": facts["base_model"],
        **({"license": facts["license"]} if facts["license"] else {}),
        "library_name": "transformers",
        "tags": [facts["scheme"], facts["format"], "tare"],
        "model-index": [{"name": name, "results": results}],
    }
    return yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
