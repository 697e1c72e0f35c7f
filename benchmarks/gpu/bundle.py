"""Make and unpack what a machine with a GPU but no network lacks: wheels, encoded text, compiled code.

    make gpu-bundle [GPU_PYTHON=3.12] [CUDA_PYTHON=...]      make it, in build/gpu-bundle

``all.py`` unpacks it, beside `build/gpu`, and its scripts find it. torch, Triton and numpy must be there
already. `wheels.txt` names the wheels. The bundle leaves out pyarrow, because the text is encoded,
tokenizers, because no tokenizer is learned, and numba, because no model reads an n-gram index. It also leaves
out MLflow and Snakemake. This file imports only Python's own library.

``CUDA_PYTHON`` is a Python of the other machine's version with the same torch for CUDA. It compiles the most
valuable rows on the runtime without a device (`nodevice`), which saves each most of its first step. The
compiler's keys hold the device's name, torch, Triton, the settings and the model's code. So the tree must not
change afterwards. What the compiler chose by times is left out, since times mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TREE = Path(os.environ.get("GPU_TREE", ROOT))
"""The checkout that is measured."""
BUNDLE = ROOT / "build/gpu-bundle"
FOLDER = Path(os.environ.get("GPU_FOLDER", ROOT / "build/gpu"))
"""Git ignores this folder, so it survives when the tree is copied to the machine again."""
DATASET = "pydocs"
WHEELS = Path(__file__).with_name("wheels.txt")
MOST = 60e6
"""Largest size of a bundle in bytes."""

#: The wheels are unpacked if one of these modules is missing.
MODULES = ["torchao", "pydantic", "yaml", "psutil", "safetensors", "rich", "tiktoken", "xdist", "hypothesis"]
PLACES = {"text": f"results/shards/{DATASET}", "site": "site", "compiled": "compiled/inductor"}
MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--python", default="3.12", metavar="X.Y", help="of the other machine")
    options.add_argument("--machine", default="x86_64", help="its processor, by uname -m")
    options.add_argument("--cuda-python", metavar="FILE", help="a Python with torch for CUDA, to compile")
    options.add_argument("--device", default="NVIDIA H200", help="name of the device to compile for")
    chosen = options.parse_args()
    wheels, text, compiled = (BUNDLE / name for name in ("wheels", "text.tar.xz", "compiled.tar.xz"))
    shutil.rmtree(wheels, ignore_errors=True)
    download(wheels, chosen.python, chosen.machine)
    digest = pack(encode(), text)
    manifest: dict[str, Any] = {"python": chosen.python, "machine": chosen.machine, "text": digest}
    files = [*sorted(wheels.iterdir()), text]
    if chosen.cuda_python:
        manifest["compiled"] = compile_rows(chosen.cuda_python, chosen.device, compiled)
        files.append(compiled)
    else:
        print("without compiled code, because CUDA_PYTHON names no Python with torch for CUDA")
    manifest["files"] = held = {str(path.relative_to(BUNDLE)): path.stat().st_size for path in files}
    (BUNDLE / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    for name, size in sorted(held.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:8.2f} MB  {name}")
    print(f"{sum(held.values()) / 1e6:8.2f} MB  {BUNDLE}, for Python {chosen.python}")
    if sum(held.values()) > MOST:
        sys.exit(f"{BUNDLE}: more than {MOST / 1e6:.0f} MB")


def download(folder: Path, python: str, machine: str) -> None:
    """Download the wheels of the versions in constraints.txt."""
    platforms = [f"--platform={tag}_{machine}" for tag in MANYLINUX]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms, f"--dest={folder}"]
    command += [f"--constraint={ROOT / 'constraints.txt'}", f"--requirement={WHEELS}"]
    subprocess.run(command, check=True)


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
    if not archive.exists() or read(BUNDLE / "manifest.json").get("text") != digest:
        with tarfile.open(archive, "w:xz") as tar:
            for path in sorted(shards.rglob("*")):
                if path.suffix in (".bin", ".idx", ".json"):
                    tar.add(path, path.relative_to(shards).as_posix())
    return digest


def caches(folder: Path) -> dict[str, str]:
    """Return the variables of a folder for what torch and Triton compile, unless they are set."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    return {name: os.environ.get(name, of) for name, of in variables.items()}


def compile_rows(python: str, device: str, archive: Path) -> dict[str, str]:
    """Compile the most valuable rows for a device; return what the code is for."""
    from rows import ROWS

    folder, script = FOLDER / "carried", Path(__file__).with_name("all.py")
    shutil.rmtree(folder, ignore_errors=True)
    environment = {**os.environ, **caches(folder), "NODEVICE_NAME": device}
    carried = [name for name, row in ROWS.items() if row.carried]
    command = [python, script, "--nodevice", "--again", "--rows", *carried]
    subprocess.run(command, check=True, env=environment)
    with tarfile.open(archive, "w:xz") as tar:
        for part in ("fxgraph", "aotautograd"):
            tar.add(folder / "inductor" / part, part, filter=without_choices)
    asked = [python, "-c", "from importlib.metadata import version; print(version('torch'))"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return {"device": device, "torch": told.strip()}


def without_choices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith(".best_config") else member


def unpack(bundle: Path = BUNDLE, device: str | None = None) -> list[str]:
    """Unpack what a bundle has, if there is one, and what this machine lacks of it.

    Args:
        device: name of the device, for the compiled code (None: none is unpacked).

    Returns:
        The folders of PYTHONPATH.
    """
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    manifest = read(bundle / "manifest.json")
    for name, size in manifest.get("files", {}).items():
        if not (bundle / name).exists() or (bundle / name).stat().st_size != size:
            sys.exit(f"{bundle / name}: missing or cut short; bring the bundle here again")
    if manifest:
        once("text", manifest["text"], lambda folder: shutil.unpack_archive(bundle / "text.tar.xz", folder))
    if manifest and any(find_spec(name) is None for name in MODULES):
        check_python(bundle, manifest)
        site = once("site", json.dumps(manifest), lambda folder: unpack_wheels(bundle, folder))
        paths.append(str(site))
    if device and "compiled" in manifest and fits(manifest["compiled"], device):
        once(
            "compiled",
            json.dumps(manifest),
            lambda folder: shutil.unpack_archive(bundle / "compiled.tar.xz", folder),
        )
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


def unpack_wheels(bundle: Path, folder: Path) -> None:
    for path in (bundle / "wheels").iterdir():
        shutil.unpack_archive(path, folder, "zip")


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


def fits(compiled: dict[str, str], device: str) -> bool:
    """Tell whether compiled code is of use here, and say why not."""
    here = {"device": device, "torch": version("torch") if find_spec("torch") else "none"}
    if compiled != here:
        held = f"the bundle's compiled code is for {compiled['device']} and torch {compiled['torch']}"
        what = "all is compiled here, a minute or more for each row"
        print(f"{held}, this is {device} and torch {here['torch']}: {what}", flush=True)
    return compiled == here


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
