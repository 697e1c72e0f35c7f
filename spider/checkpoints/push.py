"""An exported folder on a hub: `push` makes the repository, private unless told otherwise, and one commit.

Files go there first and the commit names them last, so whoever loads the model finds the old one or the new
one, whole. What has arrived is not sent again: the hub is asked by each large file's hash (with ``hf_xet`` by
each piece's), so a push that was killed, or that the hub refused, goes on where it stopped when the same
command is run again; one that has nothing to say makes no commit.

Whatever lies in the folder goes along, hidden files apart. Weights of an earlier push that this model does
not have are deleted in the same commit; anything else in the repository stays. A model card that was edited
there is kept, unless the folder's own was edited too. What a commit replaces stands in those before it.

Every failure is a `CheckpointError` of one line that names the repository and the remedy. The library's own
settings count: ``HF_ENDPOINT``, and ``HF_TOKEN`` or the token of ``hf auth login``; no token is taken in any
other way, logged or kept.
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

from spider.checkpoints.export import export
from spider.checkpoints.load import Checkpoint
from spider.checkpoints.records import CARD, INDEX, NGRAM
from spider.data.hub import PATIENCE, Patience, brief, cause_of, status_of
from spider.errors import CheckpointError
from spider.report.card import is_edited
from spider.tokens.stored import TOKENIZER
from spider.tracking import spool

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Of an earlier push, what this one may lack.
_STALE = re.compile(rf"model[\w-]*\.safetensors|{re.escape(INDEX)}|{re.escape(TOKENIZER)}|{NGRAM}/.*")


@dataclass(frozen=True)
class Pushed:
    """What came of it."""

    url: str
    """Of the commit."""
    private: bool
    weights: str


def push(
    source: Path, repo: str, *, public: bool = False, revision: str | None = None,
    patience: Patience = PATIENCE,
) -> Pushed:  # fmt: skip
    """Bring the model of a checkpoint (or stage folder, receipt, exported folder) into the repository
    ``repo``, ``owner/name``.

    Args:
        public: Make a new repository public, and agree to that of one that is.
        revision: Branch to commit to, made where it is not there (default: main).

    Raises:
        CheckpointError: nothing good is there; a name that is none; no right, no network, or a hub that
            refuses; a repository that is public, without ``public``.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise CheckpointError(f"{repo}: not a repository, it is named by its owner and its name: acme/small")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise CheckpointError(f"{repo}: not a name that the hub takes ({_first(error)})") from None
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{repo}: HF_HUB_OFFLINE is set; unset it to push")
    checkpoint = Checkpoint.at(source)
    exported = checkpoint.exported and checkpoint.path.is_dir()
    with nullcontext() if exported else TemporaryDirectory(prefix="spider-push-") as room:
        folder = checkpoint.path if room is None else export(source, Path(room) / "export").path
        private = _open(repo, public, revision, patience)
        commit = _commit(folder, repo, checkpoint, revision, patience)
    return Pushed(commit.commit_url, private, checkpoint.weights)


def _open(repo: str, public: bool, revision: str | None, patience: Patience) -> bool:
    """Make the repository where it is not there, and the branch; whether it is private."""
    api = HfApi()
    _ask(repo, patience, lambda: api.create_repo(repo, private=not public, exist_ok=True))
    private = bool(_ask(repo, patience, lambda: api.model_info(repo)).private)
    if not (public or private):
        raise CheckpointError(
            f"{repo}: is public, and nothing is published unasked; push with --public, or to another name"
        )
    if public and private:
        log.warning("%s: is private and stays so; its settings page can make it public", repo)
    if revision is not None:
        _ask(repo, patience, lambda: api.create_branch(repo, branch=revision, exist_ok=True))
    return private


def _commit(
    folder: Path, repo: str, checkpoint: Checkpoint, revision: str | None, patience: Patience
) -> CommitInfo:
    """All that differs, in one commit; the last one where nothing does."""
    api = HfApi()
    there = _ask(repo, patience, lambda: api.model_info(repo, revision=revision))
    names = {one.rfilename for one in there.siblings or ()}
    paths = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    own = {name: path for name, path in paths.items() if not any(p[0] == "." for p in name.split("/"))}
    stale = [CommitOperationDelete(name) for name in sorted(names - own.keys()) if _STALE.fullmatch(name)]
    if CARD in names & own.keys() and _theirs(repo, there, own[CARD], patience):
        log.warning(
            "%s: its %s was edited there and is kept; delete it there to have it written anew", repo, CARD
        )
        del own[CARD]
    total = sum(path.stat().st_size for path in own.values())
    log.info("%s: %d files, %.1f MB, what the hub has is not sent again", repo, len(own), total / 1e6)

    def commit() -> CommitInfo:
        # The library marks an operation that is done, and refuses it another time.
        adding = [CommitOperationAdd(name, str(path)) for name, path in own.items()]
        message = f"Model of {checkpoint.label}, weights {checkpoint.weights}"
        return api.create_commit(repo, [*adding, *stale], commit_message=message, revision=revision)

    # The library waits itself before it gives up on a request, half a minute, with hf_xet two.
    return _ask(repo, replace(patience, attempts=min(3, patience.attempts)), commit)


def _theirs(repo: str, there: ModelInfo, card: Path, patience: Patience) -> bool:
    """Whether the card in the repository is a person's and the folder's is not."""
    if is_edited(card.read_text(encoding="utf-8")):
        return False

    def read() -> str:
        url = f"{constants.ENDPOINT}/{repo}/resolve/{there.sha}/{CARD}"
        answer = get_session().get(url, headers=build_hf_headers(), timeout=60.0, follow_redirects=True)
        hf_raise_for_status(answer)
        return answer.content.decode("utf-8", "replace")

    return is_edited(_ask(repo, patience, read))


def _ask(repo: str, patience: Patience, attempt: Callable[[], T]) -> T:
    """What the hub answers, however often its line breaks."""

    def unwrapped() -> T:
        try:
            return attempt()
        except RuntimeError as error:  # of an upload, around the hub's answer
            if isinstance(cause := cause_of(error), HTTPError):
                raise cause from None
            raise CheckpointError(_said(repo, f"cannot be sent ({_first(error)}); {_AGAIN}")) from None
        except ConnectionError as error:  # of hf_xet, which tells an answer in its text alone
            if 400 <= _status(error) < 500:
                raise _refused(error, repo) from None
            raise
        except ValueError as error:  # of the card's front matter, which the library has checked first
            if "README.md" not in str(error):
                raise
            wrong = "; ".join(line.strip("- ") for line in str(error).splitlines()[1:])
            raise CheckpointError(
                _said(
                    repo, f"the hub refuses the front matter of {CARD} ({wrong}); correct it and push again"
                )
            ) from None

    return patience.call(repo, unwrapped, _refused)


# ------------------------------------------------------------------------------------------------ errors

_AGAIN = "run the same command again, what has arrived is not sent again"


def _status(error: Exception) -> int:
    """Of the hub's answer; 0: there was none."""
    found = re.search(r"HTTP status \w+ error \((\d{3})", str(error))
    return int(found[1]) if found else status_of(error)


def _refused(error: Exception, repo: str) -> CheckpointError:
    """One line on an error of the library: the repository, what is wrong, the remedy."""
    status, said = _status(error), getattr(error, "server_message", None)
    told = f"{status}: {said}" if said else str(status)
    tokens = f"{constants.ENDPOINT}/settings/tokens"
    if status == 401 and not get_token():
        wrong = f"the hub wants to know who you are (401); `hf auth login`, or set HF_TOKEN ({tokens})"
    elif status == 401:
        wrong = f"the hub refuses your token ({told}); make one at {tokens}: `hf auth login`, or HF_TOKEN"
    elif status == 403:
        wrong = f"you may not write there ({told}); take a token that may, of {tokens}"
    elif isinstance(error, RevisionNotFoundError):
        wrong = "no such branch; leave --revision out, or name one that can be made"
    elif isinstance(error, RepositoryNotFoundError):
        wrong = (
            f"no such repository, or one that your token does not see ({told}); check the name, and {tokens}"
        )
    elif status == 404 and isinstance(error, ConnectionError):
        wrong = "this hub takes no large files as `hf_xet` sends them; set HF_HUB_DISABLE_XET=1, push again"
    elif status in (409, 412):
        wrong = f"something else is changing it ({told}); wait for that, then {_AGAIN}"
    elif status:
        wrong = f"the hub answers {told}; {_AGAIN}"
    else:
        wrong = f"cannot reach {constants.ENDPOINT} ({brief(error)}); check the network, the proxy and "
        wrong += f"HF_ENDPOINT, then {_AGAIN}"
    return CheckpointError(_said(repo, wrong))


def _said(repo: str, wrong: str) -> str:
    return str(spool.redact(" ".join(f"{repo}: {wrong}".split())))


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
