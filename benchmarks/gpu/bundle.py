"""What a machine with a GPU but no network lacks: wheels for its Python, and encoded text.

    make gpu-bundle [GPU_PYTHON=3.12]      make it, in build/gpu-bundle, with the packages of .venv

``all.py`` unpacks it where it is, beside `build/gpu`, and has its scripts find both. torch, Triton and numpy
have to be there already. Wheels are those that training, evaluation and these scripts import: no pyarrow (the
text is encoded), no numba (there is no memory), no MLflow, no Snakemake. Only Python's own library is
imported here.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "build/gpu-bundle"
FOLDER = Path(os.environ.get("GPU_FOLDER", ROOT / "build/gpu"))
"""Ignored by git, so it stays where it is on a machine that the tree is copied to again."""
DATASET = "pydocs"
MOST = 60e6
"""Bytes of a bundle."""

PACKAGES = [
    *("torchao", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions"),
    *("PyYAML", "click", "filelock", "psutil", "tqdm", "safetensors", "nvidia-ml-py"),
    *("rich", "markdown-it-py", "mdurl", "Pygments", "Jinja2", "MarkupSafe"),
    *("brotli", "pyppmd", "zstandard"),
]
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
    """Bring the wheels of the versions that constraints.txt names."""
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
    return re.sub(r"[-_.]+", "-", name).lower()


def encode() -> Path:
    """The shards of the default run's text, none of it kept for a memory; made by the workflow."""
    config = Path(__file__).with_name("training.yaml")
    snakemake = Path(sys.executable).with_name("snakemake")
    environment = {**os.environ, "PATH": f"{snakemake.parent}:{os.environ['PATH']}"}
    command = [str(snakemake), f"datasets/{DATASET}", "--quiet", "--configfile", str(config)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)
    return ROOT / "build/gpu/results/shards" / DATASET


def pack(shards: Path, archive: Path) -> str:
    """Compress a dataset, unless that is done; its digest."""
    digest = json.loads((shards / "metadata.json").read_text())["digest"]
    before = read(BUNDLE / "manifest.json")
    if not archive.exists() or before.get("text") != digest:
        with tarfile.open(archive, "w:xz") as tar:
            for path in sorted(shards.rglob("*")):
                if path.suffix in (".bin", ".idx", ".json"):
                    tar.add(path, path.relative_to(shards).as_posix())
    return digest


def unpack(bundle: Path = BUNDLE) -> dict[str, str]:
    """Unpack a bundle, where there is one; variables with which scripts find what was in it.

    Leaves, in words, where it is for another Python or processor.
    """
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if not (bundle / "manifest.json").exists():
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    manifest = read(bundle / "manifest.json")
    check(bundle, manifest)
    site, mark = FOLDER / "site", FOLDER / "unpacked.json"
    if read(mark) != manifest:
        mark.unlink(missing_ok=True)
        for name in manifest["files"]:
            if name.endswith(".whl"):
                with zipfile.ZipFile(bundle / name) as wheel:
                    wheel.extractall(site)
        shards = FOLDER / "results/shards" / DATASET
        shards.mkdir(parents=True, exist_ok=True)
        with tarfile.open(bundle / "text.tar.xz") as text:
            text.extractall(shards, filter="data")
        mark.write_text(json.dumps(manifest))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*paths, str(site)]))}


def check(bundle: Path, manifest: dict[str, Any]) -> None:
    """Refuse a bundle that this Python cannot import, or that is not whole."""
    here = ".".join(map(str, sys.version_info[:2])), platform.machine()
    held = manifest["python"], manifest["machine"]
    if held != here:
        sys.exit(
            f"{bundle}: holds wheels for Python {held[0]} on {held[1]}, this is {here[0]} on {here[1]}; "
            f"make it again where there is a network (make gpu-bundle GPU_PYTHON={here[0]} "
            f"GPU_MACHINE={here[1]}), or call this with python{held[0]}"
        )
    for name, size in manifest["files"].items():
        path = bundle / name
        if not path.exists() or path.stat().st_size != size:
            sys.exit(f"{path}: missing or cut short; bring the bundle here again")


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
