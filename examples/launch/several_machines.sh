#!/usr/bin/env bash
# The ladder, or one rung, on several machines, through torchrun's rendezvous. Start the same command on every one of
# them, at about the same time (they wait for each other for 10 minutes); the records are on the one with rank 0.
#
#   NODES=2 HEAD=node0:29500 examples/launch/several_machines.sh --short
#   NODES=2 HEAD=node0:29500 examples/launch/several_machines.sh --rungs ddp,bf16,powersgd
#
# HEAD is the host name of one of the machines as the others reach it, and the first of the ports that are used: each
# sweep takes 64, so open 29500 and everything above. All machines need the same number of GPUs and the same code.
#
# One rung alone, without the ladder (again on every machine):
#   python examples/train.py -m experiment=bf16 model=vit_l_32 data=synthetic trainer.num_nodes=2 \
#       hydra.launcher.rdzv_endpoint=node0:29500 hydra.sweep.dir=multirun/bf16
#
# Sweeps must be the same on all: use Hydra's basic sweeper, or one with a seed; a machine whose job is another fails and
# says so. If NCCL's transport in the table is NET/Socket although there is EFA or InfiniBand, its network
# plugin is not loaded. What to expect: over 200 Gbit/s, a hook (bf16, PowerSGD) gains more than on one machine.
set -euo pipefail
cd "$(dirname "$0")/../.."

: "${NODES:?number of machines}" "${HEAD:?HOST:PORT of one of the machines}"
python examples/ladder.py --num-nodes "$NODES" --rendezvous "$HEAD" "$@"
