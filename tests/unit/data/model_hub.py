"""The hub of `hub_server` with repositories of models, for pushing models with huggingface_hub.

It serves these requests, and reads of a repository:

    POST /api/repos/create                      POST /api/models/{repo}/branch/{rev}
    POST /api/validate-yaml                     POST /api/models/{repo}/commit/{rev}
    POST /api/models/{repo}/preupload/{rev}     POST /{repo}.git/info/lfs/objects/batch
    PUT /lfs/{oid}

It counts the bytes of large files. It lacks Xet storage, so clients must set HF_HUB_DISABLE_XET.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from tests.unit.data.hub_server import Handler, Hub, git_blob, serving

TOKEN = "hf_" + "a" * 30
LARGE = (".safetensors", ".bin")
LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "cc-by-sa-4.0", "cc0-1.0", "odc-by", "other", "unknown")


@dataclass
class Repository:
    private: bool
    branches: dict[str, list[dict[str, bytes]]] = field(default_factory=lambda: {"main": [{}]})
    """Files after every commit of each branch; the first commit is empty."""
    readable: bool = True
    """Whether the token may read it."""

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.branches[branch][-1]

    def commit(self, branch: str) -> str:
        """Return the hash of the newest commit."""
        return hashlib.sha1(f"{branch} {len(self.branches[branch])}".encode()).hexdigest()


@dataclass
class ModelHub(Hub):
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their SHA-256, in a repository or not yet."""
    uploaded: list[int] = field(default_factory=list)
    """Bytes of each large file that arrived completely."""
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""
    fails: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Errors (status and message) for the next requests of paths with a text; 0 drops the connection."""
    cut_uploads: int = 0
    """Number of next large files whose upload breaks in the middle."""
    lost_commits: int = 0
    """Number of next commits without a response."""
    validated: list[str] = field(default_factory=list)


def serving_models(**faults: Any) -> AbstractContextManager[ModelHub]:
    return serving({}, hub=ModelHub, handler=_ModelHandler, token=TOKEN, **faults)


def problems_of_card(content: str) -> list[str]:
    """Return the hub's complaints about a card's front matter."""
    if not (head := re.match(r"---\n(.*?)\n---\n", content, re.S)):
        return []
    try:
        plain = yaml.safe_load(head[1])
    except yaml.YAMLError as error:
        return [f"is no YAML: {error}"]
    return list(_problems(plain))


def _problems(plain: dict[str, Any]) -> Iterator[str]:
    if plain.get("license", "mit") not in LICENSES:
        yield f'"license" must be one of [{", ".join(LICENSES)}]'
    if not re.fullmatch(r"[a-z0-9.-]+", plain.get("license_name", "x")):
        yield '"license_name" must be lower case letters, digits, - and .'
    for language in plain.get("language", []):
        if not re.fullmatch(r"[a-z]{2,3}|code|multilingual", language):
            yield f'"language" must be ISO 639 codes, got {language}'
    for name in plain.get("datasets", []):
        if not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", name):
            yield f'"datasets" must be ids of datasets, got {name}'
    for key in ("tags", "datasets"):
        if not all(isinstance(one, str) for one in plain.get(key, [])):
            yield f'"{key}" must be texts'
    if plain.get("pipeline_tag", "text-generation") != "text-generation":
        yield '"pipeline_tag" must be one of [text-generation, ...]'
    for i, model in enumerate(plain.get("model-index", [])):
        if not isinstance(model.get("name"), str):
            yield f'"model-index[{i}].name" is required'
        for j, result in enumerate(model["results"]):
            where = f"model-index[{i}].results[{j}]"
            for block, keys in {"task": ["type"], "dataset": ["type", "name"]}.items():
                yield from (f'"{where}.{block}.{k}" is required' for k in keys if not result[block].get(k))
            for metric in result["metrics"]:
                if not isinstance(metric.get("type"), str) or not isinstance(
                    metric.get("value"), int | float
                ):
                    yield f'"{where}.metrics" need a type and a value'


class _ModelHandler(Handler):
    hub: ModelHub

    def do_PUT(self) -> None:
        path = unquote(urlsplit(self.path).path)
        size = int(self.headers["Content-Length"])
        if self.hub.take("cut_uploads"):
            self.rfile.read(size // 2)
            return self._drop()
        content = self.rfile.read(size)
        if self._fails(path):
            return
        oid = path.removeprefix("/lfs/")
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.stored[oid] = content
        self.hub.uploaded.append(size)
        self._json({})

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        said = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self._fails(path):
            return
        if path == "/api/validate-yaml":
            self.hub.validated.append(content := json.loads(said)["content"])
            problems = problems_of_card(content)
            told = {"errors": [{"message": one} for one in problems], "warnings": []}
            return self._json(told, 400 if problems else 200)
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            return self._create(json.loads(said))
        if re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch(json.loads(said))
        if not (found := re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+?)(?:/([\w-]+)(?:/(.+))?)?", path)):
            return self._refuse(404, {})
        name, kind, rest = found.groups()
        if (repo := self.hub.repositories.get(name)) is None or not repo.readable:
            return self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        if kind == "branch":
            repo.branches.setdefault(rest, [dict(repo.files())])
            return self._json({})
        revision, _, inner = (rest or "main").partition("/")
        branch = next((one for one in repo.branches if revision in (one, repo.commit(one))), None)
        if branch is None:
            return self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
        if kind == "preupload":
            return self._modes(repo.files(branch), json.loads(said)["files"])
        if kind == "commit":
            return self._commit(repo, branch, [json.loads(line) for line in said.splitlines()], name)
        if kind == "resolve":
            return self._send(repo.files(branch)[inner])
        if kind == "xet-write-token":
            return self._refuse(404, {})
        siblings = [{"rfilename": one} for one in repo.files(branch)]
        told = {"id": name, "sha": repo.commit(branch), "private": repo.private}
        self._json({**told, "siblings": siblings, "tags": []})

    def _fails(self, path: str) -> bool:
        """Respond with a fault if one is due, and return whether it was."""
        self.hub.asked.append(f"{self.command} {path}")
        for part, answers in self.hub.fails.items():
            if part in path and answers:
                status, said = answers.pop(0)
                self._json({"error": said}, status) if status else self._drop()
                return True
        return False

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        url = f"{self.hub.endpoint}/{name}"
        if asked["organization"] != "acme":
            return self._json({"error": f"You don't have the rights to create a model under {name}"}, 403)
        if name in self.hub.repositories:
            return self._json({"error": "You already created this model repo", "url": url}, 409)
        self.hub.repositories[name] = Repository(private=asked["visibility"] == "private")
        self._json({"url": url})

    def _modes(self, there: dict[str, bytes], asked: list[dict[str, Any]]) -> None:
        told = []
        for one in asked:
            name = one["path"]
            large = name.endswith(LARGE)
            mode = {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if name in there:
                content = there[name]
                mode["oid"] = hashlib.sha256(content).hexdigest() if large else git_blob(content)
            told.append(mode)
        self._json({"files": told})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            if one["oid"] not in self.hub.stored:
                one["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{one['oid']}"}}
            objects.append(one)
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repo: Repository, branch: str, lines: list[dict[str, Any]], name: str) -> None:
        files = dict(repo.files(branch))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repo.branches[branch].append(files)
        commit = repo.commit(branch)
        if self.hub.take("lost_commits"):
            return self._drop()
        self._json({"commitUrl": f"{self.hub.endpoint}/{name}/commit/{commit}", "commitOid": commit})

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
