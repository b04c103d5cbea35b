#!/usr/bin/env bash
# The ladder on one machine with N GPUs. In an environment with `pip install ".[examples]"`:
#
#   examples/launch/one_machine.sh                          # 2, 4, 8 GPUs where there are as many; every transport
#   examples/launch/one_machine.sh --short                  # one run of each rung
#   examples/launch/one_machine.sh --rungs single,ddp,bf16  # some rungs; five repeats each
#   DEVICES=8 examples/launch/one_machine.sh --transports shm workload=bf16_adamw
#
# A run takes about 15 s on an H200: the whole ladder on one GPU count and three transports is 450 runs, 2 hours.
#
# What to expect, from the article (one bucket of 2000 MB, 8 GPUs); we have not run on these machines:
#   g6e.48xlarge, 8 L40S on PCIe without peer-to-peer: NCCL takes SHM. Stock DDP is over 6 times slower than one GPU
#     (701 ms a step, 587 of them the all-reduce); the bf16 hook gives 65 % more throughput, PowerSGD 5 times as much.
#     `transport=p2p` fails there, as it should: use --transports shm,net.
#   p4d.24xlarge, 8 A100 on NVLink: NCCL takes P2P. Stock DDP is 8 % slower than one GPU, the bf16 hook slower still;
#     buckets that overlap with backward win back about half of it. `--transports shm,net` shows the other regimes.
# On both, static_graph alone changes nothing, and bucket_view gives about 1 % and a gradient copy less of memory.
set -euo pipefail
cd "$(dirname "$0")/../.."

gpus=$(python -c "import torch; print(torch.cuda.device_count())")
devices=${DEVICES:-$(for n in 2 4 8; do ((n <= gpus)) && printf '%s,' "$n"; done || true)}
python examples/ladder.py --devices "${devices%,}" "$@"
