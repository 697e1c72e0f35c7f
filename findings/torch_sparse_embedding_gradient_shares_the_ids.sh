#!/usr/bin/env bash
# With torch 2.13 the sparse gradient of an embedding changes when the ids that were looked up are overwritten.
#
# Guess:     after `backward` a gradient is a tensor of its own, and buffers of the batch may be used again. Autograd raises an
#            error where a tensor that a backward pass still needs was changed in place.
# Behaviour: with `sparse=True` the indices of `.grad` are the memory of the ids. A loop that fills one buffer with the next
#            batch before the optimizer's step, as with gradients that are accumulated or clipped later, moves the gradient to
#            the rows of the next batch. There is no error. The dense gradient does not change.
# Seen with: torch 2.13.0 (CPU), Python 3.11, a table of 8 rows, ids 1 and 2 that are overwritten by 5 and 6 after `backward`:
#            dense:  rows with a gradient 1 2
#            sparse: rows with a gradient 5 6, and the indices are at the address of the ids
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > overwrite.py <<'PYTHON'
import sys

import torch
from torch.nn.functional import embedding


def rows_with_a_gradient(sparse: bool) -> tuple[list[int], bool]:
    """Overwrite the ids after the backward pass; return the rows of the gradient, and whether it shares the ids' memory."""
    table = torch.ones(8, 2, requires_grad=True)
    ids = torch.tensor([1, 2])
    (embedding(ids, table, sparse=sparse) * torch.tensor([[1.0], [2.0]])).sum().backward()
    shared = sparse and table.grad._indices().data_ptr() == ids.data_ptr()
    ids.copy_(torch.tensor([5, 6]))
    dense = table.grad.to_dense() if sparse else table.grad
    return dense.sum(1).nonzero().flatten().tolist(), shared


found = {kind: rows_with_a_gradient(kind == "sparse") for kind in ("dense", "sparse")}
for kind, (rows, shared) in found.items():
    where = ", and the indices are at the address of the ids" if shared else ""
    print(f"{kind + ':':7} rows with a gradient {' '.join(map(str, rows))}{where}")
sys.exit(found != {"dense": ([1, 2], False), "sparse": ([5, 6], True)})
PYTHON
env/bin/python overwrite.py
