#!/bin/sh
# One training run on two hosts. Run it on both at about the same time, with the same arguments but the first:
#
#     examples/torchrun_two_hosts.sh 0 10.0.0.1 29500 examples/train.py     # on the host that has the address 10.0.0.1
#     examples/torchrun_two_hosts.sh 1 10.0.0.1 29500 examples/train.py     # on the other one
#
# The address is one by which the other host reaches the first; no firewall may close the ports above 1024 between them.
#
#     RANKS      ranks on each host, one for each of its GPUs; 1 by default
#     NODES      hosts; 2
#     RESTARTS   how often all ranks start again after one failed; 0 (docs/failures.md: what a script needs for that)
set -eu

if [ $# -lt 4 ]; then
    echo "usage: $0 NODE_RANK MASTER_ADDRESS PORT SCRIPT [ARGUMENT...]" >&2
    exit 2
fi
node_rank=$1 master=$2 port=$3
shift 3

# gs.init() finds the interface that leads to the master and says which one it took. Only where that is not the fast
# one, name it yourself, for gloo and for NCCL:
#
#     export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# A fixed number of hosts, so the static rendezvous serves: no host has to know its own name as the others say it.
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NODES:-2}" --node-rank "$node_rank" --nproc-per-node "${RANKS:-1}" \
    --master-addr "$master" --master-port "$port" --max-restarts "${RESTARTS:-0}" \
    "$@"
