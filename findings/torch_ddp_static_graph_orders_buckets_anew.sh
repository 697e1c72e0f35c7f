#!/usr/bin/env bash
# In torch 2.13 DDP with `static_graph=True` still changes the order of its gradients after the first two steps of a start.
#
# Guess:     with `static_graph=True` the buckets of gradients stay as they are from the first step on, as they do with
#            `find_unused_parameters=True`. So a training that stops and resumes ends in the same bits as one that does not.
# Behaviour: DDP builds its buckets anew, by the order in which gradients became ready: after the first step without an option,
#            after the second one with `static_graph`. Only `find_unused_parameters=True` keeps them. With three or more
#            processes an all-reduce of other buckets may add in another order. So the first steps after a resume differ in the
#            last bits from the same steps without a stop.
# Seen with: torch 2.13.0 (CPU), Python 3.11; the numbers of the layers in each bucket, in three steps:
#            plain   012345 | 425 013 | 425 013
#            unused  345 012 | 345 012 | 345 012
#            static  012345 | 012345 | 425 013
# Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat > buckets.py <<'PROGRAM'
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))

    def forward(self, x):
        for number in (3, 1, 0, 5, 2, 4):
            x = self.layers[number](x)
        return x


OPTIONS = {"plain": {}, "unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}
for name, options in OPTIONS.items():
    model = Layers()
    number = {id(layer.weight): str(i) for i, layer in enumerate(model.layers)}
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.04, **options)
    seen = []

    def note(_, bucket):
        seen[-1].append("".join(number[id(p)] for p in bucket.parameters()))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, note)
    for _ in range(3):
        seen.append([])
        wrapped(torch.ones(2, 64)).sum().backward()
    print(f"{name:7}", " | ".join(" ".join(step) for step in seen))
PROGRAM
env/bin/python buckets.py 2> log.txt | tee seen.txt || { cat log.txt; exit 1; }
diff seen.txt - <<'SEEN'
plain   012345 | 425 013 | 425 013
unused  345 012 | 345 012 | 345 012
static  012345 | 012345 | 425 013
SEEN
