"""The examples for CI services, their steps executed here one by one on the micro recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from qat.plugins import ROOT

EXAMPLES = ROOT / "recipes" / "ci"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With a `tare` that is this checkout's."""
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "tare"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from qat.cli import app; app()" "$@"\n')
    shim.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    own = {"OUTPUT": str(tmp_path / "runs"), "PATH": path}
    own |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), "GITHUB_OUTPUT": str(tmp_path / "outputs")}
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **own}


def execute(step: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", step], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def given(values: dict[str, Any], environment: dict[str, str]) -> dict[str, str]:
    """The variables of an example, but for those that the test sets."""
    return {**{key: str(value) for key, value in values.items()}, **environment}


def counts(junit: Path) -> dict[str | None, tuple[str | None, ...]]:
    """Suite -> (tests, failures, errors), each suite's cases counted again."""
    found = {}
    for suite in ElementTree.parse(junit).getroot():
        said = tuple(suite.get(key) for key in ("tests", "failures", "errors"))
        cases = suite.findall("testcase")
        again = (len(cases), *(sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error")))
        assert said == tuple(map(str, again))
        found[suite.get("name")] = said
    return found


@pytest.mark.slow
def test_the_steps_of_the_github_example(tmp_path: Path, environment: dict[str, str]) -> None:
    workflow = yaml.safe_load((EXAMPLES / "github.yml").read_text())
    environment = given(workflow["env"], environment)
    steps = {step["name"]: step for step in workflow["jobs"]["release"]["steps"] if "run" in step}
    assert list(steps) == ["install", "forget", "plan", "run", "verify", "summary", "release"]
    (tmp_path / "runs/micro/release-000000000000").mkdir(parents=True)  # an earlier run's, from the cache
    for name in ("forget", "plan", "run", "verify", "summary", "release"):
        done = execute(steps[name]["run"], environment)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
    summary = Path(environment["GITHUB_STEP_SUMMARY"])
    assert summary.read_text().startswith("## ✅ micro: released\n")
    kept = [
        line for step in workflow["jobs"]["release"]["steps"] for line in step.get("with", {}).get("path", "").split()
    ]
    patterns = {line for line in kept if "*" in line}
    assert len(patterns) == 4
    assert all(list(tmp_path.glob(pattern)) for pattern in patterns), patterns
    assert counts(tmp_path / "runs/micro/junit.xml") == {"compressed_tensors": ("1", "0", "0")}
    verdict = json.loads((tmp_path / "runs/micro/verdict.json").read_text())
    jsonschema.validate(verdict, json.loads((ROOT / "gate/verdict.schema.json").read_text()))
    assert verdict["status"] == "released" and "Released: `compressed_tensors`" in summary.read_text()
    (released,) = tmp_path.glob("runs/*/release-*/*/tare.json")
    assert Path(environment["GITHUB_OUTPUT"]).read_text() == f"path={released.parent.parent}\n"
    pushed = execute(f"tare push {released.parent} me/micro --dry-run", environment)
    assert pushed.returncode == 0 and "would go to me/micro" in pushed.stdout, pushed.stderr

    summary.unlink()
    environment["OVERRIDES"] = "gate.divergence.max_kl=0.000001"
    assert execute(steps["run"]["run"], environment).returncode == 3
    assert steps["summary"]["if"] == "always()" and "if" not in steps["verify"]
    assert execute(steps["summary"]["run"], environment).returncode == 0
    assert summary.read_text().startswith("## ❌ micro: refused\n") and "KL to the parent" in summary.read_text()
    assert counts(tmp_path / "runs/micro/junit.xml") == {"compressed_tensors": ("1", "1", "0")}
    for step in ("forget", "forget"):  # again when there is nothing
        assert execute(steps[step]["run"], environment).returncode == 0
    left = [path for pattern in patterns for path in tmp_path.glob(pattern)]
    assert left == [] and execute(steps["summary"]["run"], environment).returncode == 1


def test_the_github_example_keeps_the_release_of_every_variant(environment: dict[str, str]) -> None:
    """GitHub takes the last of several lines that set the same output."""
    workflow = yaml.safe_load((EXAMPLES / "github.yml").read_text())
    environment = given(workflow["env"], environment)
    run = Path(environment["OUTPUT"]) / environment["NAME"]
    run.mkdir(parents=True)
    paths = {
        "int4/awq": "release-0/int4/awq",
        "int4/gptq": "release-0/int4/gptq",
        "fp8/modelopt": "release-0/fp8/modelopt",
    }
    exports = {name: {"path": path, "released": True} for name, path in paths.items()}
    exports["int8/dense"] = {"path": "export-1/dense", "released": False}
    (run / "summary.json").write_text(json.dumps({"exports": exports}))
    (step,) = (step for step in workflow["jobs"]["release"]["steps"] if step.get("id") == "release")
    done = execute(step["run"], environment)
    assert done.returncode == 0, done.stderr
    assert Path(environment["GITHUB_OUTPUT"]).read_text() == f"path={run / 'release-0'}\n"


@pytest.mark.slow
def test_the_steps_of_the_gitlab_example(tmp_path: Path, environment: dict[str, str]) -> None:
    job = yaml.safe_load((EXAMPLES / "gitlab.yml").read_text())["release"]
    environment = given(job["variables"], environment)
    forget, install = job["before_script"]
    assert install == "pip install -e ."
    for step in (forget, *job["script"]):
        done = execute(step, environment)
        assert done.returncode == 0, (step, done.stdout, done.stderr)
    kept = [*job["artifacts"]["paths"], job["artifacts"]["reports"]["junit"]]
    assert all(list(tmp_path.glob(pattern)) for pattern in kept), kept
    assert counts(tmp_path / "runs/micro/junit.xml") == {"compressed_tensors": ("1", "0", "0")}
    assert (tmp_path / "runs/micro/summary.md").read_text().startswith("## ✅ micro: released\n")
    released = json.loads((tmp_path / "runs/micro/summary.json").read_text())["last_released"]
    environment["OVERRIDES"] = "gate.perplexity.max_relative_increase=0.02"  # four windows do not decide that
    assert execute(job["script"][1], environment).returncode in job["allow_failure"]["exit_codes"]
    undecided = (tmp_path / "runs/micro/summary.md").read_text()
    assert "micro: inconclusive" in undecided and "too few windows to decide" in undecided
    (suite,) = ElementTree.parse(tmp_path / "runs/micro/junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0") and "too few windows" in ElementTree.tostring(
        suite, encoding="unicode"
    ), "it is no failure, and says why it is no pass"
    environment["OVERRIDES"] = "gate.perplexity.max=0.02"
    assert execute(job["script"][1], environment).returncode == 2
    assert (tmp_path / "runs/micro/summary.md").read_text().startswith("## ❌ micro: failed\n\n")
    assert counts(tmp_path / "runs/micro/junit.xml") == {"run": ("1", "0", "1")}
    assert not list((tmp_path / "runs/micro").glob("report.*")) + list((tmp_path / "runs/micro").glob("verdict.*"))
    next((tmp_path / "runs/micro" / released).rglob("config.json")).write_text("{}")
    broken = execute(f"tare verify {tmp_path / 'runs/micro' / released}", environment)
    assert broken.returncode == 1 and "config.json has 2 bytes" in broken.stderr
