#!/usr/bin/env bash
# With pydantic 2.14 `use_attribute_docstrings` makes the definition of each class several times slower, also where nobody
# asks for a description.
#
# Guess:     the option costs something when a JSON schema is made, because only there the descriptions are read. Classes
#            whose building is deferred (`defer_build=True`) cost nearly nothing at import, with the option as without it.
# Behaviour: at the definition of a class its source is found, cut into tokens and parsed once more. An import of forty
#            settings classes takes about twice the processor time, with `defer_build` three times. Commands that
#            start often, such as the jobs of a workflow, pay this each time.
# Seen with: pydantic 2.14.3, Python 3.11; processor seconds of an import of forty classes, as a multiple of the first:
#            plain 1.0    docstrings 2.4    deferred 0.7    deferred, docstrings 2.0
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check pydantic==2.14.3
cat > measure.py <<'PYTHON'
import importlib
import sys
import time
from pathlib import Path
from statistics import median

WAYS = {
    "plain": "",
    "docstrings": "use_attribute_docstrings=True",
    "deferred": "defer_build=True",
    "deferred, docstrings": "defer_build=True, use_attribute_docstrings=True",
}
FIELDS = "".join(f"    key_{k}: int = {k}\n    '''What key {k} means.'''\n" for k in range(12))


def module(number: int, options: str) -> str:
    """Write a module of forty classes, and return its name."""
    name = f"settings_{number}"
    text = f"from pydantic import BaseModel, ConfigDict\nclass Base(BaseModel):\n    model_config = ConfigDict({options})\n"
    Path(f"{name}.py").write_text(text + "".join(f"class Block{k}(Base):\n{FIELDS}" for k in range(40)))
    return name


def seconds(name: str) -> float:
    start = time.process_time()
    importlib.import_module(name)
    return time.process_time() - start


sys.path.insert(0, ".")
import pydantic

pydantic.create_model("Warm", key=(int, 0))
rounds = [{way: seconds(module(4 * turn + k, WAYS[way])) for k, way in enumerate(WAYS)} for turn in range(7)]
ratio = {way: median(one[way] / one["plain"] for one in rounds) for way in WAYS}
print(pydantic.VERSION, "   ".join(f"{way} {found:.1f}" for way, found in ratio.items()))
costs = ratio["docstrings"] > 1.25 and ratio["deferred, docstrings"] > 2 * ratio["deferred"]
sys.exit(not costs)
PYTHON
env/bin/python measure.py
