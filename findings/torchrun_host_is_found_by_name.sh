#!/usr/bin/env bash
# torchrun asks the machine's name, and not its network, whether the rendezvous endpoint is its own address.
#
# Guess:     of the nodes that get `--rdzv-endpoint 10.77.0.1:29400`, the one with the address 10.77.0.1 opens the port.
# Behaviour: a node opens it if its host name resolves to that address. Debian and Ubuntu map the name to 127.0.1.1 in
#            /etc/hosts. There no node opens the port, and each of them, the one with the address too, ends with an
#            error of the connection. `--rdzv-conf is_host=1` on the first node is the cure.
# Seen with: torch 2.13.0 on Python 3.11, in a network namespace that has the address 10.77.0.1:
#            by the name: RendezvousConnectionError
#            is_host=1: the worker ran
# Needs root and iproute2, and takes some minutes. Exits with 1 if this has changed.
set -eu
folder=$(mktemp -d)
name="finding-$$"
trap 'ip netns del "$name" 2> /dev/null || true; rm -rf "$folder" "/etc/netns/$name"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy

mkdir -p "/etc/netns/$name"
printf '127.0.0.1 localhost\n127.0.1.1 node\n' > "/etc/netns/$name/hosts"   # what Debian's installer writes
ip netns add "$name"
ip -n "$name" link set lo up
ip -n "$name" addr add 10.77.0.1/32 dev lo

echo 'print("the worker ran")' > worker.py
start() {
    ip netns exec "$name" unshare --uts sh -c 'hostname node; exec "$@"' sh \
        env/bin/python -m torch.distributed.run --nnodes 1 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id 1 \
        --rdzv-endpoint 10.77.0.1:29400 --rdzv-conf "$1" worker.py 2>&1 |
        grep -o 'RendezvousConnectionError\|the worker ran' | tail -n 1
}
env/bin/python -c 'import torch; print(torch.__version__)'
by_name=$(start timeout=5)
as_host=$(start timeout=5,is_host=1)
echo "by the name: $by_name"
echo "is_host=1: $as_host"
[ "$by_name" = RendezvousConnectionError ] && [ "$as_host" = "the worker ran" ]
