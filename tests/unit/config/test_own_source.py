"""A source is one file that the configuration names; the code of another is not imported."""

import pytest

from spider.config import ConfigError, Dataset, imports, load_config

TOY = "tests.sources.toy"


@pytest.fixture(autouse=True)
def nothing_allowed(monkeypatch):
    monkeypatch.setattr(imports, "_allowed", set())


def configuration(**source):
    run = {"data": "own", "model": "tiny", "stages": [{"name": "a", "max_steps": 2}]}
    return {"datasets": {"own": {"source": source}}, "runs": {"r": run}}


def test_a_configuration_names_a_source_by_its_import_path():
    plain = configuration(kind=TOY, file="own.txt", min_words=3)
    with pytest.raises(ConfigError, match=r"own\.source\.kind: the source 'tests\.sources\.toy' is not"):
        load_config(plain, allow_imports=False)
    config = load_config(plain)
    dataset = config.datasets["own"]
    assert config.parts("own") == {"000": "own.txt"}
    assert dataset.changed()["source"] == {"kind": TOY, "file": "own.txt", "min_words": 3}
    assert dataset.source.identity("own.txt", dataset) == dataset.changed()["source"] | {"item": "own.txt"}
    again = Dataset.model_validate(dataset.model_dump(mode="json"))
    assert again == dataset and type(again.source).__name__ == "Paragraphs"
