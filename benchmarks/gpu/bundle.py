"""Make and unpack what a machine with a GPU but no network lacks: wheels for its Python, and encoded text.

    make gpu-bundle [GPU_PYTHON=3.12]      make it, in build/gpu-bundle, with the packages of .venv

``all.py`` unpacks it, beside `build/gpu`, and its scripts find both. torch, Triton and numpy must be there
already. The wheels are those that training, evaluation, generation of tokens, these scripts and ``tests/gpu``
import. The bundle leaves out pyarrow, because the text is encoded, tokenizers, because no tokenizer is
learned, and numba, because no model reads an n-gram index. It also leaves out MLflow and Snakemake. This file
imports only Python's own library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "build/gpu-bundle"
FOLDER = Path(os.environ.get("GPU_FOLDER", ROOT / "build/gpu"))
"""Git ignores this folder, so it survives when the tree is copied to the machine again."""
DATASET = "pydocs"
MOST = 60e6
"""Largest size of a bundle in bytes."""

PACKAGES = [
    *("torchao", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions"),
    *("PyYAML", "click", "filelock", "psutil", "tqdm", "safetensors", "nvidia-ml-py"),
    *("rich", "markdown-it-py", "mdurl", "Pygments", "Jinja2", "MarkupSafe"),
    *("brotli", "pyppmd", "zstandard", "tiktoken"),
    *("pytest", "pytest-timeout", "pytest-xdist", "hypothesis"),
    *("execnet", "iniconfig", "packaging", "pluggy", "sortedcontainers"),
]
#: The wheels are unpacked if one of these modules is missing.
MODULES = ["torchao", "pydantic", "yaml", "click", "psutil", "tqdm", "safetensors", "rich"]
MODULES += ["tiktoken", "pytest", "pytest_timeout", "xdist", "hypothesis"]
PLACES = {"text": f"results/shards/{DATASET}", "site": "site"}
MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--python", default="3.12", metavar="X.Y", help="of the other machine")
    options.add_argument("--machine", default="x86_64", help="its processor, by uname -m")
    chosen = options.parse_args()
    wheels, text = BUNDLE / "wheels", BUNDLE / "text.tar.xz"
    shutil.rmtree(wheels, ignore_errors=True)
    download(wheels, chosen.python, chosen.machine)
    digest = pack(encode(), text)
    files = [*sorted(wheels.iterdir()), text]
    held = {path.relative_to(BUNDLE).as_posix(): path.stat().st_size for path in files}
    manifest = {"python": chosen.python, "machine": chosen.machine, "text": digest, "files": held}
    (BUNDLE / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for name, size in sorted(held.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:8.2f} MB  {name}")
    print(f"{sum(held.values()) / 1e6:8.2f} MB  {BUNDLE}, for Python {chosen.python}")
    if sum(held.values()) > MOST:
        sys.exit(f"{BUNDLE}: more than {MOST / 1e6:.0f} MB")


def download(folder: Path, python: str, machine: str) -> None:
    """Download the wheels of the versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    known = {plain(name): version for name, _, version in (line.partition("==") for line in lines) if version}
    wanted = [f"{name}=={known[plain(name)]}" for name in PACKAGES]
    platforms = [f"--platform={tag}_{machine}" for tag in MANYLINUX]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms, f"--dest={folder}", *wanted]
    subprocess.run(command, check=True)
    for wheel in folder.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            if any(re.search(r"\.data/(pure|plat)lib/", name) for name in archive.namelist()):
                sys.exit(f"{wheel.name}: some of its files only an installer puts in place; leave it out")


def plain(name: str) -> str:
    """Return the name of a package as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def encode() -> Path:
    """Make the shards of the default run's text by the workflow; return their folder."""
    config = Path(__file__).with_name("training.yaml")
    snakemake = Path(sys.executable).with_name("snakemake")
    environment = {**os.environ, "PATH": f"{snakemake.parent}:{os.environ['PATH']}"}
    command = [str(snakemake), f"datasets/{DATASET}", "--quiet", "--configfile", str(config)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    return ROOT / "build/gpu/results/shards" / DATASET


def pack(shards: Path, archive: Path) -> str:
    """Compress a dataset unless that is done; return its digest."""
    digest = json.loads((shards / "metadata.json").read_text())["digest"]
    before = read(BUNDLE / "manifest.json")
    if not archive.exists() or before.get("text") != digest:
        with tarfile.open(archive, "w:xz") as tar:
            for path in sorted(shards.rglob("*")):
                if path.suffix in (".bin", ".idx", ".json"):
                    tar.add(path, path.relative_to(shards).as_posix())
    return digest


def unpack(bundle: Path = BUNDLE) -> list[str]:
    """Unpack the text of a bundle, and its wheels if this Python lacks one of them, if there is a bundle.

    Returns:
        The folders of PYTHONPATH.
    """
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if (bundle / "manifest.json").exists():
        manifest = read(bundle / "manifest.json")
        check_whole(bundle, manifest)
        once("text", manifest["text"], lambda folder: unpack_text(bundle, folder))
        if any(find_spec(name) is None for name in MODULES):
            check_python(bundle, manifest)
            site = once("site", json.dumps(manifest), lambda folder: unpack_wheels(bundle, folder))
            paths.append(str(site))
    return [path for path in paths if path]


def once(name: str, content: str, make: Callable[[Path], None]) -> Path:
    """Return the folder that ``make`` filled with this content; call ``make`` only if that is not done."""
    mark, folder = FOLDER / f"{name}.unpacked", FOLDER / PLACES[name]
    if not mark.exists() or mark.read_text() != content:
        mark.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        make(folder)
        mark.write_text(content)
    return folder


def unpack_text(bundle: Path, folder: Path) -> None:
    with tarfile.open(bundle / "text.tar.xz") as text:
        checked = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4
        text.extractall(folder, **checked)


def unpack_wheels(bundle: Path, folder: Path) -> None:
    for path in (bundle / "wheels").iterdir():
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)


def check_whole(bundle: Path, manifest: dict[str, Any]) -> None:
    """Exit with the reason if a file is missing or has another size."""
    for name, size in manifest["files"].items():
        path = bundle / name
        if not path.exists() or path.stat().st_size != size:
            sys.exit(f"{path}: missing or cut short; bring the bundle here again")


def check_python(bundle: Path, manifest: dict[str, Any]) -> None:
    """Exit with the reason if the wheels are for another Python or processor."""
    here = ".".join(map(str, sys.version_info[:2])), platform.machine()
    held = manifest["python"], manifest["machine"]
    if held != here:
        sys.exit(
            f"{bundle}: holds wheels for Python {held[0]} on {held[1]}, this is {here[0]} on {here[1]}; "
            f"make it again where there is a network (make gpu-bundle GPU_PYTHON={here[0]} "
            f"GPU_MACHINE={here[1]}), or call this with python{held[0]}"
        )


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
