"""A release goes to the hub whole, once, and only as it was let out. The hub is a fake: nothing here has a network."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from typer.testing import CliRunner

from qat import manifest, verify
from qat.cli import app

CLIENT: Any = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])  # httpx or its heir
TOKEN = "hf_" + "abcdefgh" * 4
FILES = {"config.json": "{}", "model.safetensors": "weights", "serve/vllm.sh": "#!/bin/sh\n", "README.md": "# m\n"}


def make(folder: Path, files: dict[str, str] = FILES, **said: Any) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / verify.RELEASE).unlink(missing_ok=True)
    listed = manifest.list_files(folder)
    manifest.write_json(folder / verify.RELEASE, {"status": "released", **said, "files": listed})
    return folder


def answer(code: int, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    request = CLIENT.Request("GET", f"https://user:{TOKEN}@hub/api")
    return kind(f"{code} for {request.url}\n\nRequest ID: 1", response=CLIENT.Response(code, request=request))


class Hub:
    """Repositories as branch -> name -> bytes, with the methods of HfApi that a push calls."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.commits, self.pulls = cache, list[str](), list[Any]()
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: dict[str, bool] = {}
        self.fails: Exception | None = None

    def _branch(self, name: str, revision: str) -> dict[str, bytes]:
        if self.fails:
            raise self.fails
        if name not in self.repositories:
            raise answer(404, RepositoryNotFoundError)
        return self.repositories[name][revision]

    def model_info(self, name: str, revision: str = "main") -> Any:
        branch = self._branch(name, revision)
        return SimpleNamespace(private=self.private[name], sha=manifest.digest({k: str(v) for k, v in branch.items()}))

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> None:
        self.private[name] = private
        self.repositories[name] = {"main": {".gitattributes": b""}}

    def create_branch(self, name: str, branch: str, exist_ok: bool) -> None:
        self.repositories[name].setdefault(branch, dict(self._branch(name, "main")))

    def list_repo_files(self, name: str, revision: str) -> list[str]:
        return list(self._branch(name, revision))

    def hf_hub_download(self, name: str, file: str, revision: str) -> str:
        (self.cache / file).write_bytes(self._branch(name, revision)[file])
        return str(self.cache / file)

    def get_repo_discussions(self, name: str, **kind: str) -> list[Any]:
        assert kind == {"discussion_type": "pull_request", "discussion_status": "open"}
        return self.pulls

    def create_commit(
        self, name: str, operations: list[Any], commit_message: str, revision: str, create_pr: bool, parent_commit: str
    ) -> Any:
        old = self._branch(name, revision)
        assert parent_commit == self.model_info(name, revision).sha
        new = dict(old)
        for one in operations:
            if isinstance(one, CommitOperationAdd):
                new[one.path_in_repo] = Path(str(one.path_or_fileobj)).read_bytes()
            else:
                del new[one.path_in_repo]
        if new != old and create_pr:
            self.pulls.append(SimpleNamespace(num=len(self.pulls) + 1, title=commit_message))
            return SimpleNamespace(oid="pull", pr_url="https://hub/pull/1", commit_url="")
        if new != old:
            self.repositories[name][revision] = new
            self.commits.append(commit_message)
        return SimpleNamespace(oid=self.model_info(name, revision).sha, pr_url=None, commit_url="https://hub/commit")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    (tmp_path / "cache").mkdir()
    made = Hub(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return made


def push(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["push", *map(str, arguments)])


def test_the_hub_then_holds_the_release_and_a_second_push_changes_nothing(hub: Hub, tmp_path: Path) -> None:
    release = make(tmp_path / "awq")
    done = push(release, "me/model", "--private")
    assert done.exit_code == 0 and "pushed to me/model, branch main: https://hub/commit" in done.output, done.output
    there = hub.repositories["me/model"]["main"]
    assert there == {".gitattributes": b"", **{p: (release / p).read_bytes() for p in [*FILES, "tare.json"]}}
    assert hub.private["me/model"]
    again = push(release, "me/model")
    assert again.exit_code == 0 and "has this release already" in again.output and len(hub.commits) == 1

    smaller = make(tmp_path / "gptq", {"config.json": "{}", "a.safetensors": "other"})
    assert push(smaller, "me/model").exit_code == 0
    assert set(hub.repositories["me/model"]["main"]) == {".gitattributes", "config.json", "a.safetensors", "tare.json"}
    assert push(release, "me/model", "--revision", "first").exit_code == 0
    assert set(hub.repositories["me/model"]["first"]) == {".gitattributes", *FILES, "tare.json"}
    assert "a.safetensors" in hub.repositories["me/model"]["main"]


def test_a_pull_request_is_opened_once(hub: Hub, tmp_path: Path) -> None:
    release = make(tmp_path / "awq")
    missing = push(release, "me/model", "--pr")
    assert missing.exit_code == 1 and "refuses me/model" in missing.output and not hub.repositories
    hub.create_repo("me/model", False, True)
    assert "pushed to me/model, branch main: https://hub/pull/1" in push(release, "me/model", "--pr").output
    assert "pull request 1 with this release is open already" in push(release, "me/model", "--pr").output
    assert len(hub.pulls) == 1 and set(hub.repositories["me/model"]["main"]) == {".gitattributes"}
    elsewhere = push(release, "me/model", "--pr", "--revision", "dev")
    assert elsewhere.exit_code == 1 and "leave --revision out" in elsewhere.output


def test_a_dry_run_lists_everything_without_network_and_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HfApi", "get_token"):
        monkeypatch.setattr(huggingface_hub, name, lambda: pytest.fail("the hub was asked"))
    release = make(tmp_path / "awq")
    done = push(release, "me/model", "--dry-run", "--revision", "dev")
    assert done.exit_code == 0
    total = sum(p.stat().st_size for p in release.rglob("*") if p.is_file())
    assert f"dry run: 5 files, {total:,} bytes would go to me/model, branch dev" in done.output
    assert all(name in done.output for name in [*FILES, "tare.json"])
    (release / "model.safetensors").write_text("weighty")
    assert push(release, "me/model", "--dry-run").exit_code == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: (d / "model.safetensors").write_text("weightS"), "model.safetensors has sha256"),
        (lambda d: (d / "config.json").unlink(), "config.json is missing"),
        (lambda d: (d / "notes.txt").write_text("x"), "notes.txt is not in tare.json"),
        (lambda d: (d / "tare.json").unlink(), "has no tare.json"),
        (lambda d: (d / "tare.json").write_text("{"), "tare.json is not JSON"),
        (lambda d: make(d, {}, status="refused"), "status 'refused'; only what the gate released"),
        (lambda d: make(d, {}, status=None), "status None; only what the gate released"),
    ],
)
def test_what_is_not_an_intact_release_is_refused(hub: Hub, tmp_path: Path, change: Any, why: str) -> None:
    release = make(tmp_path / "awq")
    change(release)
    done = push(release, "me/model")
    assert done.exit_code == 1 and why in done.output, done.output
    assert len(done.output.splitlines()) == 1 and not hub.repositories


def test_the_releases_of_a_run_are_named_when_the_run_is_given(hub: Hub, tmp_path: Path) -> None:
    release = make(tmp_path / "run/release-abc/int4/awq")
    (tmp_path / "run/summary.json").write_text(json.dumps({"stages": []}))
    for folder in (tmp_path / "run", tmp_path / "run/release-abc"):
        assert f"give one of: {release}" in push(folder, "me/model").output
    assert "there is no such folder" in push(tmp_path / "nothing", "me/model").output


def test_files_that_no_release_put_there_are_left_and_named(hub: Hub, tmp_path: Path) -> None:
    hub.create_repo("me/model", False, True)
    before = hub.repositories["me/model"]["main"] | {"pytorch_model.bin": b"old"}
    hub.repositories["me/model"]["main"] = dict(before)
    done = push(make(tmp_path / "awq"), "me/model")
    assert done.exit_code == 1 and "holds pytorch_model.bin, which no release of Tare put there" in done.output
    assert hub.repositories["me/model"]["main"] == before
    public = push(tmp_path / "awq", "me/model", "--private")
    assert public.exit_code == 1 and "is there and public" in public.output


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (answer(401, RepositoryNotFoundError), "refuses me/model to this token (HTTP 401)"),
        (answer(403), "the token may only read"),
        (answer(503), "answers HTTP 503"),
        (CLIENT.ConnectError("[Errno -2] Name or service not known"), "cannot be reached: ConnectError"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_the_hub_says_is_one_line_without_the_token(hub: Hub, tmp_path: Path, error: Exception, why: str) -> None:
    release = make(tmp_path / "awq")
    hub.create_repo("me/model", False, True)
    hub.fails = error
    done = push(release, "me/model")
    assert done.exit_code == 1 and why in done.output, done.output
    assert TOKEN not in done.output and len(done.output.splitlines()) <= 2  # the first names what was verified


def test_without_a_token_nothing_is_asked(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    done = push(make(tmp_path / "awq"), "me/model")
    assert done.exit_code == 1 and "set HF_TOKEN" in done.output and not hub.repositories
    for name in ("model", "me/model/x", "me/mo del"):
        assert "OWNER/NAME" in push(tmp_path / "awq", name, "--dry-run").output
