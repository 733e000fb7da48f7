"""`tare push`: a released directory to a model repository of the Hugging Face hub. Loads no torch.

Only what the gate let out goes there, and only as its tare.json has it: every byte is hashed before anything is sent.
The repository then holds exactly the release, so that `tare verify` of a download agrees.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qat import report, summary, verify

TITLE = "Tare release {name} ({sha})"


@dataclass(frozen=True)
class Target:
    """Where a release goes. private: for a repository that is made. revision: a branch, made when it is not there."""

    repository: str
    private: bool = False
    revision: str | None = None
    pull_request: bool = False


def main(folder: Path, target: Target, dry_run: bool) -> None:
    """Push a released directory, or say what would be pushed.

    Raises ValueError for a folder that is no intact release, for a repository that cannot be used, and when the hub
    refuses or cannot be reached. With dry_run: no network and no token.
    """
    _check(target)
    files = released_files(folder)
    rows = [(name, (folder / name).stat().st_size) for name in files]
    branch, what = target.revision or "main", f"{len(rows)} files, {sum(size for _, size in rows):,} bytes"
    if dry_run:
        report.table(f"{folder}: as in {verify.RELEASE}, released", ("file", "bytes"), [(n, f"{s:,}") for n, s in rows])
        how = "a pull request to " if target.pull_request else ""
        private = ", private if it is made" if target.private else ""
        report.say(f"dry run: {what} would go to {how}{target.repository}, branch {branch}{private}; nothing was sent")
        return
    report.say(f"{folder}: {what}, as in {verify.RELEASE}")
    report.say(_send(folder, files, target))


def released_files(folder: Path) -> list[str]:
    """The files of a release, tare.json last. Raises ValueError when it is none, or not as the gate let it out."""
    file = folder / verify.RELEASE
    if not file.is_file():
        raise ValueError(f"{folder} is no released directory: it has no {verify.RELEASE}{_instead(folder)}")
    if different := list(verify.differences(file)):
        raise ValueError(
            f"{folder} is not as it was released: {'; '.join(different[:3])}"
            + (f"; and {len(different) - 3} more" if len(different) > 3 else "")
            + "; run the recipe again with fresh=release, or fetch the release again"
        )
    said = json.loads(file.read_text(encoding="utf-8"))
    if said.get("status") != "released":
        raise ValueError(
            f"{file} has status {said.get('status')!r}; only what the gate released is pushed: run the recipe again"
        )
    return [*sorted(said["files"]), verify.RELEASE]


def _instead(folder: Path) -> str:
    """What could have been meant: the releases of a run, or those below the folder."""
    if not folder.is_dir():
        return "; there is no such folder"
    found = sorted(path.parent for path in (*folder.glob(f"*/{verify.RELEASE}"), *folder.glob(f"*/*/{verify.RELEASE}")))
    if (folder / summary.FILE).is_file():
        found = sorted(path.parent for path in folder.glob(f"release-*/**/{verify.RELEASE}"))
    return f"; give one of: {', '.join(map(str, found))}" if found else "; give a folder that `tare run` released"


def _check(target: Target) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(target.repository)
    except HFValidationError as error:
        raise ValueError(f"{target.repository!r} is no name of a repository, OWNER/NAME: {error}") from error
    if target.repository.count("/") != 1:
        raise ValueError(f"{target.repository!r} has no owner; give OWNER/NAME")
    if target.pull_request and target.revision not in (None, "main"):
        raise ValueError(f"--pr goes to main on the hub, not to {target.revision}; leave --revision out")


def _send(folder: Path, files: list[str], target: Target) -> str:
    """Commit the files; gives the sentence of what came of it."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # of the HTTP client, which is another one from version to version of huggingface_hub: no answer came
    no_answer: Any = HfHubHTTPError.__bases__[0]
    if not get_token():
        raise ValueError("no token for the hub: set HF_TOKEN, or log in with `hf auth login`; --dry-run needs none")
    report.quiet_transfers()
    try:
        return _commit(HfApi(), folder, files, target)
    except OfflineModeIsEnabled as error:
        raise ValueError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or use --dry-run") from error
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else None
        if code in (401, 403, 404):
            raise ValueError(
                f"the hub refuses {target.repository} to this token (HTTP {code}): the repository is not there or not "
                f"yours, or the token may only read; {_one_line(error)}"
            ) from error
        raise ValueError(
            f"the hub answers HTTP {code}: {_one_line(error)}; nothing is half pushed: try again"
        ) from error
    except (no_answer, ConnectionError, TimeoutError) as error:
        raise ValueError(
            f"the hub cannot be reached: {type(error).__name__} {_one_line(error)}; nothing is half pushed: try again"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _commit(api: Any, folder: Path, files: list[str], target: Target) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.errors import RepositoryNotFoundError

    repository, branch = target.repository, target.revision or "main"
    try:
        info = api.model_info(repository)
        if target.private and not info.private:
            raise ValueError(f"{repository} is there and public; --private makes private what is not there yet")
    except RepositoryNotFoundError:
        if target.pull_request:
            raise
        api.create_repo(repository, private=target.private, exist_ok=True)
    if branch != "main":
        api.create_branch(repository, branch=branch, exist_ok=True)
    title = TITLE.format(name=folder.resolve().name, sha=verify.manifest.hash_file(folder / verify.RELEASE)[:16])
    if target.pull_request:
        for one in api.get_repo_discussions(repository, discussion_type="pull_request", discussion_status="open"):
            if one.title == title:
                return f"{repository}: pull request {one.num} with this release is open already"
    before, stale = api.model_info(repository, revision=branch).sha, _stale(api, repository, branch, files)
    operations: list[Any] = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files]
    operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
    done = api.create_commit(
        repository, operations, commit_message=title, revision=branch, create_pr=target.pull_request,
        parent_commit=before,
    )  # fmt: skip
    if done.oid == before:
        return f"{repository}, branch {branch}: has this release already"
    return f"pushed to {repository}, branch {branch}: {done.pr_url or done.commit_url}"


def _stale(api: Any, repository: str, branch: str, files: list[str]) -> list[str]:
    """Files of an earlier release on the hub that this one does not have.

    Raises ValueError for files that no release put there: an engine might load them in place of ours.
    """
    there = {name for name in api.list_repo_files(repository, revision=branch) if not _is_hidden(name)}
    left, known = there - set(files), set[str]()
    if left and verify.RELEASE in there:
        path = api.hf_hub_download(repository, verify.RELEASE, revision=branch)
        known = set(verify.listed(Path(path)))
    if foreign := sorted(left - known):
        listed = ", ".join(foreign[:5]) + (" ..." if len(foreign) > 5 else "")
        raise ValueError(
            f"{repository}, branch {branch}, holds {listed}, which no release of Tare put there and an engine might "
            "load; delete them there, or push to another repository or --revision"
        )
    return sorted(left)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
