"""Push an exported folder to a hub: `push` creates the repository, private by default, and makes one commit.

Files are uploaded first and the commit names them last. So a reader of the repository gets the old model or
the new one, never a mixture. Uploaded data are not sent again: the hub finds a large file by its hash, and
``hf_xet`` each chunk of it. A push that was killed or refused continues when the same command runs again. A
push without changes makes no commit.

All files of the folder are pushed, except hidden ones. Weights of an earlier push that this model does not
have are deleted in the same commit. All other files in the repository stay. A model card that was edited in
the repository is kept, unless the card in the folder was edited too. Earlier commits keep what a commit
replaces.

Each failure is a `CheckpointError` of one line that names the repository and the remedy. The settings of
huggingface_hub apply: ``HF_ENDPOINT``, and ``HF_TOKEN`` or the token of ``hf auth login``. No token is read
in any other way, logged or stored.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    constants,
    get_token,
)
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status, validate_repo_id

from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import CARD, INDEX, NGRAM
from spider.common.errors import CheckpointError
from spider.common.formatting import redact
from spider.data.hub import PATIENCE, Patience, brief, cause_of, status_of
from spider.publish.export import export
from spider.report.card import is_edited
from spider.tokens.stored import TOKENIZER

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Files of an earlier push that are deleted if the new model does not have them.
_STALE = re.compile(rf"model[\w-]*\.safetensors|{re.escape(INDEX)}|{re.escape(TOKENIZER)}|{NGRAM}/.*")


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    url: str
    """Address of the commit."""
    private: bool
    weights: str


def push(
    source: Path,
    repo: str,
    *,
    public: bool = False,
    revision: str | None = None,
    patience: Patience = PATIENCE,
) -> Pushed:
    """Push the model of a checkpoint (or stage folder, receipt, exported folder) to a repository.

    Args:
        repo: the repository, ``owner/name``.
        public: make a new repository public, and accept an existing one that is public.
        revision: the branch to commit to, created if it does not exist (default: main).

    Raises:
        CheckpointError: a good checkpoint is missing, ``repo`` is not a name, the hub refuses or cannot be
            reached, or the repository is public without ``public``.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise CheckpointError(f"{repo}: not a repository; give its owner and its name, such as acme/small")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise CheckpointError(f"{repo}: not a valid name on the hub ({_first_line(error)})") from None
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{repo}: HF_HUB_OFFLINE is set; unset it to push")
    checkpoint = Checkpoint.at(source, whole=True)
    exported = checkpoint.exported and checkpoint.path.is_dir()
    with nullcontext() if exported else TemporaryDirectory(prefix="spider-push-") as scratch:
        folder = checkpoint.path if scratch is None else export(source, Path(scratch) / "export").path
        private = _create(repo, public, revision, patience)
        commit = _commit(folder, repo, checkpoint, revision, patience)
    return Pushed(commit.commit_url, private, checkpoint.weights)


def _create(repo: str, public: bool, revision: str | None, patience: Patience) -> bool:
    """Create the repository and the branch if they do not exist; return whether the repository is private."""
    api = HfApi()
    _request(repo, patience, lambda: api.create_repo(repo, private=not public, exist_ok=True))
    private = bool(_request(repo, patience, lambda: api.model_info(repo)).private)
    if not (public or private):
        raise CheckpointError(
            f"{repo}: is public, and a push publishes only with --public; add it, or name another repository"
        )
    if public and private:
        log.warning("%s: is private and stays private; its settings page can make it public", repo)
    if revision is not None:
        _request(repo, patience, lambda: api.create_branch(repo, branch=revision, exist_ok=True))
    return private


def _commit(
    folder: Path, repo: str, checkpoint: Checkpoint, revision: str | None, patience: Patience
) -> CommitInfo:
    """Commit all files that differ; return the commit, or the last one if no file differs."""
    api = HfApi()
    info = _request(repo, patience, lambda: api.model_info(repo, revision=revision))
    names = {file.rfilename for file in info.siblings or ()}
    paths = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    own = {name: path for name, path in paths.items() if not any(p[0] == "." for p in name.split("/"))}
    stale = [CommitOperationDelete(name) for name in sorted(names - own.keys()) if _STALE.fullmatch(name)]
    if CARD in names & own.keys() and _keeps_card(repo, info, own[CARD], patience):
        log.warning("%s: its %s was edited there and is kept; delete it there to get a new one", repo, CARD)
        del own[CARD]
    total = sum(path.stat().st_size for path in own.values())
    log.info("%s: %d files, %.1f MB; data on the hub are not sent again", repo, len(own), total / 1e6)

    def commit() -> CommitInfo:
        # huggingface_hub marks each operation as done and refuses it the next time, so make new ones.
        adding = [CommitOperationAdd(name, str(path)) for name, path in own.items()]
        message = f"Model of {checkpoint.label}, weights {checkpoint.weights}"
        return api.create_commit(repo, [*adding, *stale], commit_message=message, revision=revision)

    # huggingface_hub itself repeats a request for half a minute, and hf_xet for two minutes.
    return _request(repo, replace(patience, attempts=min(3, patience.attempts)), commit)


def _keeps_card(repo: str, info: ModelInfo, card: Path, patience: Patience) -> bool:
    """Return whether a person edited the card in the repository but not the card in the folder."""
    if is_edited(card.read_text(encoding="utf-8")):
        return False

    def read() -> str:
        url = f"{constants.ENDPOINT}/{repo}/resolve/{info.sha}/{CARD}"
        response = get_session().get(url, headers=build_hf_headers(), timeout=60.0, follow_redirects=True)
        hf_raise_for_status(response)
        return response.content.decode("utf-8", "replace")

    return is_edited(_request(repo, patience, read))


def _request(repo: str, patience: Patience, attempt: Callable[[], T]) -> T:
    """Return the result of a request to the hub; repeat it if the connection breaks."""

    def unwrapped() -> T:
        try:
            return attempt()
        except RuntimeError as error:  # huggingface_hub wraps the error of an upload
            cause = cause_of(error)
            if isinstance(cause, HTTPError):
                raise cause from None
            raise _error(repo, f"cannot be sent ({_first_line(error)}); {_AGAIN}") from None
        except ConnectionError as error:  # hf_xet names the status only in the text of its error
            if 400 <= _status(error) < 500:
                raise _refused(error, repo) from None
            raise
        except ValueError as error:  # huggingface_hub checks the front matter of the card first
            if "README.md" not in str(error):
                raise
            wrong = "; ".join(line.strip("- ") for line in str(error).splitlines()[1:])
            raise _error(
                repo, f"the hub refuses the front matter of {CARD} ({wrong}); correct it and push again"
            ) from None

    return patience.call(repo, unwrapped, _refused)


# ------------------------------------------------------------------------------------------------ errors

_AGAIN = "run the same command again; uploaded data are not sent again"


def _status(error: Exception) -> int:
    """Return the HTTP status of the hub's response, or 0 without a response."""
    found = re.search(r"HTTP status \w+ error \((\d{3})", str(error))
    return int(found[1]) if found else status_of(error)


def _refused(error: Exception, repo: str) -> CheckpointError:
    """Return an error of one line for an error of huggingface_hub."""
    status = _status(error)
    reason = getattr(error, "server_message", None)
    response = f"{status}: {reason}" if reason else str(status)
    tokens = f"{constants.ENDPOINT}/settings/tokens"
    if status == 401 and not get_token():
        wrong = f"the hub requires a token (401); run `hf auth login`, or set HF_TOKEN ({tokens})"
    elif status == 401:
        wrong = f"the hub refuses your token ({response}); make one at {tokens}: `hf auth login`, or HF_TOKEN"
    elif status == 403:
        wrong = f"you may not write there ({response}); use a token that may, from {tokens}"
    elif isinstance(error, RevisionNotFoundError):
        wrong = "no such branch; leave --revision out, or name a branch that can be created"
    elif isinstance(error, RepositoryNotFoundError):
        wrong = (
            f"no such repository, or your token may not read it ({response}); check the name, and {tokens}"
        )
    elif status == 404 and isinstance(error, ConnectionError):
        wrong = "this hub does not accept the uploads of `hf_xet`; set HF_HUB_DISABLE_XET=1 and push again"
    elif status in (409, 412):
        wrong = f"another process is changing it ({response}); wait for that, then {_AGAIN}"
    elif status:
        wrong = f"the hub answers {response}; {_AGAIN}"
    else:
        wrong = (
            f"cannot reach {constants.ENDPOINT} ({brief(error)}); check the network, the proxy and "
            f"HF_ENDPOINT, then {_AGAIN}"
        )
    return _error(repo, wrong)


def _error(repo: str, wrong: str) -> CheckpointError:
    """Return an error of one line without secrets."""
    return CheckpointError(str(redact(" ".join(f"{repo}: {wrong}".split()))))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
