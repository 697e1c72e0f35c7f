"""A checkout that is installed as `make` does it is imported from every folder, its own parent included."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from spider.common import VERSION

ROOT = Path(__file__).parents[2]
#: What pip has the build backend do for `pip install --editable .`: make a wheel that only points here.
BUILD = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folder above a checkout that is named `spider`, and the Python that it is installed for."""
    above = tmp_path_factory.mktemp("above")
    checkout = above / "spider"
    for package in ("spider", "kernels", "snakemake_logger_plugin_spider"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, checkout / package, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, checkout / name)
    wheels = above / "wheels"
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, wheels], cwd=checkout, check=True, capture_output=True)
    venv.create(above / "venv", with_pip=False)
    scheme = {"base": str(above / "venv"), "platbase": str(above / "venv")}
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib", "venv", scheme))
    return above, above / "venv" / "bin" / "python"


@pytest.mark.parametrize("inside", [".", "spider", "spider/kernels", "wheels"])
def test_the_package_is_found_whatever_the_folder(installed, inside):
    above, python = installed
    program = "import kernels, spider; print(spider.__version__, spider.__file__)"
    done = subprocess.run([python, "-c", program], cwd=above / inside, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == str(above / "spider" / "spider" / "__init__.py")


def test_the_distribution_the_changelog_and_the_citation_have_this_version(installed):
    above, _ = installed
    (wheel,) = (above / "wheels").iterdir()
    assert wheel.name.startswith(f"spider_lm-{VERSION}-")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
    assert f"\n## {VERSION} " in (ROOT / "CHANGELOG.md").read_text()
