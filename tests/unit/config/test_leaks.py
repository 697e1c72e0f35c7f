"""A run that learns from the text it is scored on is refused, and both datasets are named."""

import itertools

import numpy as np
import pytest

from spider.config import ConfigError, Dataset, load_config
from spider.data.documents import hash_keys, salted, split_masks
from tests.unit.small_datasets import document_key

TOY = {"family": "tests.families.toy", "width": 8}
HUB = {"kind": "hub", "repo": "a/b", "revision": "r", "files": ["one.parquet", "two.parquet"]}
PATTERN = "[^/]+"


def configuration(datasets, *, model=TOY, stages=None, tokenizers=None, data="docs"):
    """Return a configuration whose run trains on `data` and is evaluated on `held`."""
    stages = stages or [{"name": "main", "max_steps": 1}]
    run = {"data": data, "model": model, "stages": stages, "evaluation": {"data": "held"}}
    return {"datasets": datasets, "tokenizers": tokenizers or {}, "runs": {"r": run}}


def refusal(plain):
    """Return the message of a refusal, or an empty text for a valid configuration."""
    try:
        load_config(plain)
    except ConfigError as error:
        return str(error)
    return ""


def hub(**settings):
    return {"source": HUB, **settings}


@pytest.mark.parametrize(
    ("held", "docs", "words"),
    [
        ({"validation": 0.1}, {"validation": 0.05}, ("validation: 0.1", "0.05")),
        ({"split_by": {"column": "url"}}, {"split_by": {"column": "url", "pattern": PATTERN}}, ("split_by",)),
        ({"id_column": "uuid"}, {}, ("id_column",)),
    ],
)
def test_documents_that_another_dataset_trains_on_are_refused_and_both_are_named(held, docs, words):
    message = refusal(configuration({"held": hub(**held), "docs": hub(**docs)}))
    assert message.startswith("runs.r.evaluation.data: ") and len(message.splitlines()) == 1
    assert all(word in message for word in ("'held'", "'docs'", "stage main", "one.parquet", *words))


def test_datasets_of_later_stages_and_of_the_defaults_are_compared():
    datasets = {"held": hub(validation=0.1), "docs": hub(validation=0.1), "more": hub(validation=0.01)}
    stages = [{"name": "main", "max_steps": 1}, {"name": "late", "max_steps": 1, "data": "more"}]
    message = refusal(configuration(datasets, stages=stages))
    assert "'more'" in message and "stage late" in message and "'docs'" not in message
    plain = configuration(datasets)
    plain["runs"]["r"]["defaults"] = {"data": "more"}
    assert "stage main" in refusal(plain)


def test_the_ngram_split_of_another_dataset_may_be_held_out():
    """An index counts the hashes from `validation` to `validation + ngram`, and no stage trains on them."""
    datasets = {"held": hub(validation=0.3), "docs": hub(validation=0.1, ngram=0.4)}
    assert refusal(configuration(datasets)) == ""
    message = refusal(configuration(datasets, model={"preset": "tiny", "ngram": {}}))
    assert "n-gram index" in message and "'docs'" in message and "validation: 0.3" in message


def test_the_text_of_the_tokenizer_is_compared():
    later = {**HUB, "files": ["two.parquet"]}
    datasets = {
        "held": {"source": later, "validation": 0.1},
        "docs": {"source": {**HUB, "files": ["three.parquet"]}, "tokenizer": "bpe"},
        "all": hub(validation=0.01),
    }
    plain = configuration(datasets, tokenizers={"bpe": {"data": "all"}})
    message = refusal(plain)
    assert "tokenizer bpe" in message and "'all'" in message and "two.parquet" in message


def test_local_files_are_compared_by_their_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").touch()

    def local(*files, **settings):
        return {"source": {"kind": "local", "files": list(files)}, **settings}

    docs = local(str(tmp_path / "*.jsonl"), validation=0.01)
    assert "a.jsonl" in refusal(configuration({"held": local("a.jsonl", validation=0.5), "docs": docs}))
    assert refusal(configuration({"held": local("c.jsonl", validation=0.5), "docs": docs})) == ""
    assert refusal(configuration({"held": local("a.jsonl", validation=0.01), "docs": docs})) == ""
    # A folder names documents by their paths in it, so another folder splits them differently.
    (tmp_path / "library/texts").mkdir(parents=True)
    (tmp_path / "library/texts/a.txt").touch()
    library = local(str(tmp_path / "library"), validation=0.1)
    within = {"held": local("library/texts", validation=0.1), "docs": library}
    assert "texts" in refusal(configuration(within))
    # A pattern without a match is refused later, with a message of its own.
    assert refusal(configuration({"held": local("none*.jsonl"), "docs": docs})) == ""


def test_a_stream_is_evaluated_on_what_it_holds_out():
    stream = {"source": {**HUB, "kind": "stream"}, "validation": 0.1}
    assert refusal(configuration({"held": hub(validation=0.1), "docs": stream})) == ""
    assert "'docs'" in refusal(configuration({"held": hub(validation=0.2), "docs": stream}))


def test_a_refusal_agrees_with_the_split_of_documents():
    """For all pairs of settings: valid pairs share no document, refused pairs share some."""
    rows = [{"id": f"d{i}", "uuid": f"u{i * 7}", "site": f"s{i % 90}"} for i in range(4000)]
    settings = [
        {"validation": validation, "ngram": ngram, **keys}
        for validation, ngram in ((0.1, 0.0), (0.2, 0.0), (0.05, 0.3))
        for keys in (
            {},
            {"id_column": "uuid"},
            {"split_by": {"column": "site"}},
            {"split_by": {"column": "site", "salt": 3}},
        )
    ]

    def masks(plain):
        dataset = Dataset.model_validate(hub(**plain))
        column = dataset.split_by.column if dataset.split_by else dataset.id_column
        salt = dataset.split_by.salt if dataset.split_by else 0
        hashes = hash_keys([salted(document_key(row[column], b""), salt) for row in rows])
        return split_masks(hashes, dataset.validation, dataset.ngram)

    for held, docs in itertools.product(settings, settings):
        shared = np.any(masks(held)["validation"] & masks(docs)["train"])
        assert bool(refusal(configuration({"held": hub(**held), "docs": hub(**docs)}))) == bool(shared), (
            held,
            docs,
        )
