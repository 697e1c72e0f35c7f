"""Check that the pages are true: links, files, commands and examples."""

import ast
import re
from importlib import import_module
from pathlib import Path

import click
import pytest
import torch
import yaml

from spider.cli import cli
from spider.cli.train import _read_settings
from spider.common.extras import config_keys
from spider.config import Config, ModelConfig, Run, Stage, families, load_config, presets, with_settings
from spider.config.model import family_block, model_block
from spider.config.reference import reference
from spider.model import build_model
from spider.model.gpt.config import Config as GPTConfig
from spider.training.memory import meta_model
from tests.shown_commands import examples, shown, words

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: The log is history; all other pages describe the tree as it is.
CURRENT = [page for page in PAGES if page.name != "LOG.md"]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as a hub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_a_file_and_a_heading(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if target.startswith("http"):
            continue
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_the_index_lists_every_page():
    index = (ROOT / "docs/README.md").read_text()
    pages = {path.name for path in PAGES[2:]} - {"README.md"}
    assert {page for page in pages if f"({page})" not in index} == set()


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_files_that_are_named_exist(page):
    folders = "spider|kernels|tests|rules|benchmarks|presets|profiles|docs"
    mentioned = re.findall(rf"`((?:{folders})/[\w/.-]+)`", page.read_text())
    mentioned += re.findall(r"\bpython3? ([\w/.-]+\.py)\b", page.read_text())
    assert [path for path in mentioned if not (ROOT / path).exists()] == []


def test_files_that_code_and_presets_name_exist():
    folders = ("spider", "kernels", "benchmarks", "presets", "rules", "extras")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    missing = [
        (named(path), mentioned)
        for path in files
        if path.suffix in (".py", ".smk", ".yaml")
        for mentioned in re.findall(
            r"(?<![\w/.])((?:benchmarks|docs|presets|extras)/[\w/.-]+\.(?:py|md|yaml))\b", path.read_text()
        )
        if not (ROOT / mentioned).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", CURRENT, ids=named)
def test_targets_of_make_that_are_named_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert [
        target for target in re.findall(r"`make ([\w-]+)", page.read_text()) if target not in targets
    ] == []


@pytest.mark.parametrize("script", sorted((ROOT / "findings").glob("*.sh")), ids=named)
def test_a_finding_states_what_was_guessed_and_seen_and_installs_pinned_packages_without_spider(script):
    text = script.read_text()
    head = re.findall(r"^# ([A-Z][a-z]+(?: with)?):? ", text, re.M)
    assert {"Guess", "Behaviour", "Seen with"} <= set(head) and "Exits with 1 if" in text
    assert "folder=$(mktemp -d)" in text and re.search(r"env/bin/pip install .*==", text)
    assert not re.search(r"\bspider\b", text, re.I) and script.stat().st_mode & 0o111


@pytest.mark.parametrize("page", CURRENT[2:], ids=named)
def test_a_page_begins_with_an_example(page):
    """The other tests check commands, YAML and Python of such examples."""
    if page.name != "glossary.md":
        beginning = page.read_text().split("\n## ")[0]
        assert re.search(r"^```(bash|yaml|python)$", beginning, re.M)


def sentences(page: Path) -> list[str]:
    """Return the sentences, cells and lines of code of a page."""
    return [" ".join(one.split()) for one in re.split(r"\n\n|\||(?<=[.;:])\s|\n(?=- )", page.read_text())]


#: A page that has its own words for what a GPU has run, and what is open. They change with each measurement.
ON_A_GPU = "gpu.md"


@pytest.mark.parametrize("page", [page for page in CURRENT if page.name != ON_A_GPU], ids=named)
def test_what_a_gpu_has_run_is_said_on_one_page_and_others_lead_there(page):
    claim = (
        r"\b(has|have|was|were|never|not|none|no)\b.* (run|ran|tested|trained|tried|proven|passed|measured)\b"
    )
    claims = [one for one in sentences(page) if re.search(r"\bGPUs?\b|\b[HBA][12]00\b", one)]
    elsewhere = [one for one in claims if re.search(claim, one) and f"{ON_A_GPU}#measured" not in one]
    assert elsewhere == []


def size_of(preset: str, **block: object) -> int:
    """Return the number of parameters of a preset of a model."""
    (family,) = (name for name in families() if preset in presets(name))
    with torch.device("meta"):
        return build_model(
            family_block(model_block({"family": family, "preset": preset, **block}))
        ).num_parameters()


SIZES = {
    "model.md": {"spider-1b": {}, "tiny": {}, "slim": {}},
    "gpt.md": {f"gpt-d{depth}": {"vocab_size": 32_768} for depth in (12, 20, 24)},
    "golf.md": {
        f"golf-{name}": {"vocab_size": V} for name, V in (("16mb", 8192), ("seed", 8192), ("tiny", 2048))
    },
}


@pytest.mark.parametrize(
    "page, preset", [(page, preset) for page, sizes in SIZES.items() for preset in sizes]
)
def test_pages_have_the_parameters_of_the_presets_of_models(page, preset):
    size = size_of(preset, **SIZES[page][preset])
    forms = (
        f"{size:,}",
        f"{size / 1e6:.1f}M",
        rf"{size / 1e6:.0f}\s+million",
        rf"{size / 1e6:.1f}\s+million",
    )
    told = rf"`{preset}`(?:[^`.]|\.\d|`make run`)*?\b(?:{'|'.join(forms)})"
    assert re.search(told, (ROOT / "docs" / page).read_text()), f"{size:,}"


def test_pages_name_the_largest_model_that_was_trained_and_the_largest_preset_of_a_run():
    def largest(*paths: Path) -> str:
        configs = map(load_config, paths)
        first = [one.stage(name, run.stages[0].name) for one in configs for name, run in one.runs.items()]
        return f"{max(meta_model(spec).num_parameters() for spec in first) / 1e6:.0f} million"

    trained, preset = largest(ROOT / "config.yaml"), largest(*(ROOT / "presets").glob("*.yaml"))
    for page in (ROOT / "README.md", ROOT / "docs/why.md"):
        assert f"The largest model trained so far has {trained} parameters" in page.read_text()
    assert f"Presets of runs go up to {preset}." in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", [*CURRENT, ROOT / "CHANGELOG.md"], ids=named)
def test_presets_that_are_named_exist(page):
    known = {path.stem for path in (ROOT / "presets").glob("*.yaml")}
    files = re.findall(r"\bpresets/([\w-]+)\.yaml", page.read_text())
    models = {name for family in families() for name in presets(family)}
    about = [one for one in sentences(page) if re.search(r"\b[Pp]resets?\b", re.sub("`[^`]*`", "", one))]
    names = [name for one in about for name in re.findall(r"`([a-z]\w*(?:-\w+)+)`", one)]
    assert set(files) - known == set(names) - known - models == set()


def completed(block: dict) -> dict:
    """Lay an example on the default configuration: top-level keys, keys of its run, or keys of its stages."""
    plain = yaml.safe_load((ROOT / "config.yaml").read_text())
    run = plain["runs"]["spider-ngram"]
    if set(block) <= {*Config.model_fields, *config_keys()}:
        for name in ("datasets", "tokenizers"):
            plain[name] = plain.get(name, {}) | block.get(name, {})
        return plain | {key: value for key, value in block.items() if key not in ("datasets", "tokenizers")}
    if set(block) <= {*Run.model_fields, "grid"}:
        run |= block
    else:
        assert set(block) <= set(Stage.model_fields), set(block)
        run["defaults"] |= block
    return plain


PROFILE_KEYS = {"executor"}


#: Examples of configurations.
CONFIGURATIONS = {
    name: text for name, text in examples("yaml").items() if not PROFILE_KEYS & set(yaml.safe_load(text))
}


@pytest.mark.parametrize("block", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_yaml_examples_are_valid_configurations(block, monkeypatch):
    monkeypatch.chdir(ROOT)
    load_config(completed(yaml.safe_load(block)))


@pytest.mark.parametrize("block", examples("python").values(), ids=examples("python"))
def test_python_examples_compile_and_import_what_exists(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "spider":
            module = import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_gpt_page_lists_every_switch():
    """Sizes of a model and two constants are not switches; everything else is in the table."""
    page = (ROOT / "docs/gpt.md").read_text()
    sizes = {"hidden", "layers", "heads", "ffn_ratio", "vocab_size", "rope_base"}
    switches = set(GPTConfig.model_fields) - set(ModelConfig.model_fields) - sizes
    assert [switch for switch in sorted(switches) if f"`{switch}`" not in page] == []


def test_the_golf_page_names_each_variable_of_the_original_script_and_only_keys_that_exist():
    page = (ROOT / "docs/golf.md").read_text()
    rows = re.findall(r"^\| (`[A-Z].*?) \| (.*) \|$", page, re.M)
    variables = [name for row, _ in rows for name in re.findall(r"`([A-Z0-9_]+)`", row)]
    assert len(variables) == len(set(variables)) == 44
    printed = reference()
    named = {word for _, key in rows for word in re.findall(r"`([a-z_.]+)`", key)}
    keys = {part for name in named for part in name.split(".") if part}
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", printed)] == []


def parsed(command: click.Command, arguments: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that a line names, and its arguments; refuse unknown commands, options and words."""
    context = None
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=command.name, parent=context)
        _, rest, _ = command.make_parser(context).parse_args(list(arguments))
        if not rest:
            return command, arguments
        found = command.get_command(context, rest[0])
        assert found, rest[0]
        command, arguments = found, rest[1:]
    _, extra, _ = command.make_parser(click.Context(command)).parse_args(list(arguments))
    assert not extra, extra
    return command, arguments


@pytest.mark.parametrize("line", shown("spider").values(), ids=shown("spider"))
def test_commands_that_are_shown_can_be_given(line):
    variables = re.findall(r"^(?:([A-Z_]+)=(\S+) )(?:([A-Z_]+)=(\S+) )?", line)
    given = words(line)[words(line).index("spider") + 1 :]
    command, arguments = parsed(cli, given)
    if command.name != "train" or "--resume" in arguments or "--help" in arguments:
        return
    # Plan a training: apply its settings, and share its steps among its processes.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(*[iter(variables[0] if variables else ())] * 2, strict=True):
            patch.setenv(name, value)
        context = command.make_context("train", list(arguments))
        name, settings, _ = _read_settings(context)
    path = ROOT / "config.yaml"
    if given[0] == "--config":  # the copy of a preset in its results folder
        path = ROOT / "presets" / f"{Path(given[1]).parent.name}.yaml"
    config = load_config(path)
    run, stage = config.choose(*(name.split("/") if name else ()))
    changed, _ = with_settings(config, run, stage, settings)
    assert changed.stage(run, stage).micro_batch(context.params["processes"]) >= 1


def test_the_resources_shown_for_a_cluster_fit_the_preset_shown_for_it():
    page = (ROOT / "docs/cluster.md").read_text()
    (block,) = re.findall(r"^```yaml\n(resources:.*?)```", page, re.M | re.S)
    plain = yaml.safe_load((ROOT / "presets/spider-1b.yaml").read_text())
    plain["runs"]["spider-1b"] |= yaml.safe_load(block)
    config = load_config(plain)
    assert config.stage("spider-1b", "main").processes == 16
