"""Package a scored stage with its history, as an RO-Crate with a Croissant description of each dataset.

The crate follows RO-Crate 1.1 (https://w3id.org/ro/crate/1.1) and Process Run Crate 0.5
(https://w3id.org/ro/wfrun/process/0.5). Each job is a ``CreateAction`` with its command, its code, its times
and its files. All of it comes from the records of the jobs (`spider.provenance.lineage`).

Records, scores, settings and samples are copied, under their paths in the results folder. Text, weights and
what has changed since are named with their digests. Paths outside of the results folder lose their folders.

Croissant 1.0 (http://mlcommons.org/croissant/1.0) describes the raw files of a dataset and their column of
text. A loader reads them from their paths in the results folder, or from the crate, if you copy them there.
"""

from __future__ import annotations

import json
import mimetypes
import shutil
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spider.config import Config
from spider.config.data import Dataset
from spider.data.metadata import Metadata, load_metadata
from spider.evaluation.records import Evaluation
from spider.files import write_text
from spider.provenance.lineage import Lineage, Made
from spider.results import Results
from spider.sealed import check_new, writing
from spider.tracking.records import ARTIFACT_LIMIT, File, Run, file_digest

#: The file that makes a folder an RO-Crate.
DESCRIPTOR = "ro-crate-metadata.json"
_PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
_CONTEXT = [
    "https://w3id.org/ro/crate/1.1/context",
    {"sha256": "https://w3id.org/ro/terms/workflow-run#sha256"},
]
#: Kinds of files that are copied. The others hold weights, or text whose license may forbid it.
_COPIED = {".json", ".jsonl", ".txt", ".yaml", ".patch"}
_PARQUET = "application/x-parquet"  # the name that mlcroissant reads
_OCTETS = "application/octet-stream"


def crate(config: Config, lineage: Lineage, run: str, stage: str, folder: Path) -> list[str]:
    """Write the crate of a stage into a new folder, and return the names of its files.

    Raises:
        ValueError: the folder is not empty, the stage has no evaluation, or no job recorded it as it is.
    """
    check_new(folder)
    results = Results(lineage.root)
    evaluation = results.stage(run, stage).evaluation
    made = lineage.of(evaluation)
    if made.job is None:
        raise ValueError(
            f"{evaluation}: no job recorded this file as it is now; it was edited, or made untracked"
        )
    with writing(folder) as beside:
        written = _Crate(lineage, beside)
        written.add_history(_made(lineage, results, run, stage))
        names = [name for name in config.learned(run, stage) if results.shards(name).is_dir()]
        for name in dict.fromkeys([*names, Evaluation.read(evaluation).data]):
            written.add_dataset(name, _croissant(name, config.dataset(name), results, config.raw(name)))
        written.write(_root(config, run, stage, Evaluation.read(evaluation), names, made.job))
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _made(lineage: Lineage, results: Results, run: str, stage: str) -> Iterator[Made]:
    """Yield the results of a stage, and all that they were made from."""
    own = results.stage(run, stage)
    seen = set()
    for path in (own.evaluation, own.receipt, own.harness, own.audit, own.sample, own.sample_text, own.trace):
        for one in [made := lineage.of(path), *lineage.ancestry(made)] if path.is_file() else []:
            if one.job is not None and one.job.identity not in seen:
                seen.add(one.job.identity)
                yield one


def _root(
    config: Config, run: str, stage: str, evaluation: Evaluation, datasets: list[str], job: Run
) -> dict[str, Any]:
    """Return the properties of the crate itself."""
    licenses = {name: config.dataset(name).license or "not stated" for name in datasets}
    trained_on = ", ".join(datasets)
    return {
        "name": f"{run}/{stage}, trained by Spider",
        "description": (
            f"A language model with {evaluation.bpb:.4f} bits per byte of the held-out text of "
            f"{evaluation.data}, trained on {trained_on}; its settings, code, measurements and the digests "
            "of all files that it was made from."
        ),
        "datePublished": _time(job.ended or job.started),
        "license": "; ".join(f"text of {name}: {license}" for name, license in licenses.items()),
    }


class _Crate:
    """The entities of a crate, and its folder."""

    def __init__(self, lineage: Lineage, folder: Path) -> None:
        self.lineage, self.folder = lineage, folder
        self.entities: dict[str, dict[str, Any]] = {}

    def add_history(self, made: Iterable[Made]) -> None:
        """Add an action for each job, the oldest first."""
        jobs = [one.job for one in made if one.job is not None]
        for job in sorted(jobs, key=lambda job: job.started):
            self._add(
                f"#job-{job.identity}",
                "CreateAction",
                name=job.name,
                description=f"spider {job.command}" if job.command else job.name,
                startTime=_time(job.started),
                endTime=_time(job.ended or job.started),
                actionStatus={"@id": "http://schema.org/CompletedActionStatus"},
                instrument=self._code(job),
                agent=self._add("#person", "Person", name=job.tags.get("spider.user", "unknown")),
                object=[*map(self._file, job.inputs), *self._beside(job)],
                result=[self._file(file) for file in job.outputs],
            )

    def add_dataset(self, name: str, croissant: dict[str, Any]) -> None:
        """Add the Croissant description of a dataset."""
        path = f"croissant-{name}.json"
        write_text(self.folder / path, _json(croissant))
        self._copied(path, name=f"Croissant description of {name}")

    def write(self, root: dict[str, Any]) -> None:
        """Write the descriptor."""
        files = [{"@id": key} for key, one in self.entities.items() if one["@type"] == "File"]
        actions = [{"@id": key} for key, one in self.entities.items() if one["@type"] == "CreateAction"]
        text = root.pop("license")
        license = self._add(
            "#license", "CreativeWork", name="Licenses of the training text", description=text
        )
        profile = self._add(_PROFILE, "CreativeWork", name="Process Run Crate", version="0.5")
        self._add(
            "./",
            "Dataset",
            **root,
            author={"@id": "#person"},
            license=license,
            conformsTo=profile,
            hasPart=files,
            mentions=actions,
        )
        self._add(
            DESCRIPTOR,
            "CreativeWork",
            about={"@id": "./"},
            conformsTo={"@id": "https://w3id.org/ro/crate/1.1"},
        )
        plain = {"@context": _CONTEXT, "@graph": [*self.entities.values()]}
        write_text(self.folder / DESCRIPTOR, _json(plain))

    def _add(self, key: str, kind: str, **properties: Any) -> dict[str, str]:
        """Add an entity, and return a reference to it. A list of one value becomes the value."""
        single = {
            name: one[0] if isinstance(one, list) and len(one) == 1 else one
            for name, one in properties.items()
        }
        self.entities[key] = {"@id": key, "@type": kind, **single}
        return {"@id": key}

    def _code(self, job: Run) -> dict[str, str]:
        """Add the code that a job ran."""
        rule = job.tags.get("spider.rule", job.name)
        name = self.lineage.code_name(job) or "unknown"
        record = self.lineage.code(job)
        version = record.get("version", job.tags.get("spider.version", "unknown"))
        return self._add(
            f"#code-{quote(rule)}-{name}",
            "SoftwareApplication",
            name=f"Spider, {rule}",
            softwareVersion=f"{version} ({record.get('commit') or 'commit unknown'})",
            softwareRequirements=[f"{package}=={one}" for package, one in self.lineage.packages(job).items()],
        )

    def _beside(self, job: Run) -> Iterator[dict[str, str]]:
        """Add the configuration of a job and its uncommitted code, where they are here."""
        paths = {
            f"configs/{job.tags.get('spider.snapshot')}.yaml": "configuration",
            f"tracking/code/{self.lineage.code(job).get('patch')}.patch": "uncommitted changes of the code",
        }
        for path, name in paths.items():
            if (self.lineage.root / path).is_file():
                yield self._copied(path, name=name)

    def _file(self, file: File) -> dict[str, str]:
        """Add a file that a job read or wrote."""
        path = self.lineage.root / file.path
        copied = not Path(file.path).is_absolute() and path.suffix in _COPIED and path.is_file()
        if copied and path.stat().st_size <= ARTIFACT_LIMIT and file_digest(path) == file.digest:
            return self._copied(file.path, name=file.path)
        name = Path(file.path).name if Path(file.path).is_absolute() else file.path
        identifier = file.digest or "unknown"
        return self._add(
            f"#{quote(identifier)}-{quote(name)}", "CreativeWork", name=name, identifier=identifier
        )

    def _copied(self, path: str, *, name: str) -> dict[str, str]:
        """Add a file of the crate, which is copied from the results folder unless it is there."""
        copy, key = self.folder / path, quote(path)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.lineage.root / path, copy)
        digest = file_digest(copy) or ""
        return self._add(
            key,
            "File",
            name=name,
            contentSize=str(copy.stat().st_size),
            encodingFormat=_format(copy),
            sha256=digest.removeprefix("sha256:"),
        )


def _format(path: Path) -> str:
    """Return the media type of a file."""
    own = {".yaml": "application/yaml", ".patch": "text/x-diff", ".jsonl": "application/jsonl"}
    return own.get(path.suffix) or mimetypes.guess_type(path.name)[0] or _OCTETS


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _json(plain: Any) -> str:
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------------------------------------- Croissant

#: Terms of Croissant that have the same name in its vocabulary.
_TERMS = (
    "citeAs column equivalentProperty extract field fileObject fileProperty fileSet format includes "
    "isLiveDataset jsonPath key md5 parentField path recordSet references regex repeated replace separator "
    "source subField transform"
)
#: The context that the format asks for.
_CROISSANT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "samplingRate": "cr:samplingRate",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _TERMS.split()},
}


def _croissant(name: str, dataset: Dataset, results: Results, raw: str) -> dict[str, Any]:
    """Return the description of a dataset: its raw files, or the shards of published tokens."""
    metadata = load_metadata(results.shards(name))
    files = list(_raw_files(metadata, results, raw) if not metadata.imported else _shards(metadata, name))
    described: dict[str, Any] = {
        "@context": _CROISSANT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name,
        "description": f"{dataset.source.description}; digest of the encoded dataset: {metadata.digest}",
        "license": dataset.license or "not stated",
        "distribution": files,
    }
    if dataset.source.repository:
        described["url"] = f"https://huggingface.co/datasets/{dataset.source.repository}"
    columns = [column for column in (metadata.text_column, metadata.id_column) if column]
    if not metadata.imported:
        described["recordSet"] = [_records(file["@id"], columns) for file in files]
    return described


def _raw_files(metadata: Metadata, results: Results, raw: str) -> Iterator[dict[str, str]]:
    """Yield the raw files of a dataset, as the downloads recorded them."""
    for file in metadata.source.get("files", []):
        path = results.raw(raw, file["part"]).relative_to(results.root).as_posix()
        yield _file_object(path, file["bytes"], file["sha256"], _PARQUET, file["name"])


def _shards(metadata: Metadata, name: str) -> Iterator[dict[str, str]]:
    for split in metadata.splits.values():
        for shard in split.shards:
            yield _file_object(
                f"shards/{name}/{shard.file}", 2 * shard.tokens, shard.sha256, _OCTETS, "ids, uint16"
            )


def _file_object(path: str, size: int, sha256: str, kind: str, description: str) -> dict[str, str]:
    return {
        "@type": "cr:FileObject",
        "@id": path,
        "name": path,
        "description": description,
        "contentUrl": path,
        "contentSize": f"{size} B",
        "encodingFormat": kind,
        "sha256": sha256,
    }


def _records(file: str, columns: list[str]) -> dict[str, Any]:
    """Return the records of a raw file: a row is a document."""
    key = f"documents/{Path(file).stem}"
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"{key}/{column}",
            "name": column,
            "dataType": "sc:Text",
            "source": {"fileObject": {"@id": file}, "extract": {"column": column}},
        }
        for column in columns
    ]
    return {"@type": "cr:RecordSet", "@id": key, "name": key, "field": fields}
