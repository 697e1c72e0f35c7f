#!/usr/bin/env bash
# safetensors.torch.save in a thread stops all other threads for as long as it builds its bytes; save_file does not.
#
# Guess:     saving in a thread leaves the main thread free, since the work is a copy of memory in compiled code, and
#            `save` followed by a write does the same as `save_file`.
# Behaviour: the files are equal. But `save` holds the interpreter while it copies every tensor, twice, so a main
#            thread that ticks each millisecond stands still for hundreds of milliseconds for each GiB. Beside
#            `save_file` its longest gap is many times shorter. A training loop that launches kernels feels it.
# Seen with: safetensors 0.8.0, torch 2.13.0 (CPU), Python 3.11, 256 MiB, two shared cores:
#            equal files: True
#            longest gap of the main thread: save 528 ms, save_file 15 ms
# Exits with 1 if the files differ or `save` stops the main thread less than three times as long as `save_file`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 safetensors==0.8.0 numpy packaging
cat > gap.py <<'PYTHON'
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save, save_file

tensors = {f"t{i}": torch.randn(1 << 24) for i in range(4)}


def longest_gap(work):
    """Return the longest time in milliseconds between two ticks of this thread while another one works."""
    thread = threading.Thread(target=work)
    longest, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return 1000 * longest


by_save = [longest_gap(lambda: Path("a").write_bytes(save(tensors))) for _ in range(3)]
by_file = [longest_gap(lambda: save_file(tensors, "b")) for _ in range(3)]
equal = Path("a").read_bytes() == Path("b").read_bytes()
print(f"equal files: {equal}")
print(f"longest gap of the main thread: save {min(by_save):.0f} ms, save_file {min(by_file):.0f} ms")
sys.exit(not (equal and min(by_save) > 3 * min(by_file)))
PYTHON
env/bin/python gap.py
