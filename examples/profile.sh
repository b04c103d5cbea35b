#!/usr/bin/env bash
# Profile, change one argument, profile again, compare: one bucket against buckets of 100 MiB.
#
#   examples/profile.sh          # with nsys, on all GPUs
#   examples/profile.sh torch    # with torch.profiler: no nsys needed; without GPUs a tiny ViT on two ranks
#
# Leaves the reports and one page, before and after, in profiles/.
set -euo pipefail
cd "$(dirname "$0")/.."

profiler=${1:-nsys}
ranks=$(python -c "import torch; print(torch.cuda.device_count() or 2)")
if python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    workload=(model=vit_l_32 data=synthetic trainer.limit_val_batches=0)
    caps=(2000 100)
else
    workload=(trainer=cpu data=digits)
    caps=(2000 0.25)
fi

for cap in "${caps[@]}"; do
    ddpopt nsys --profiler "$profiler" --nproc "$ranks" --output "profiles/cap_$cap" -- \
        examples/train.py experiment=bucket_view "strategy.bucket_cap_mb=$cap" measure=article \
        "trainer.devices=$ranks" "hydra.run.dir=profiles/run_$cap" "${workload[@]}"
done

case $profiler in nsys) ending=nsys-rep ;; *) ending=json.gz ;; esac
baseline=()
for report in "profiles/cap_${caps[0]}"_rank_*."$ending"; do baseline+=(--baseline "$report"); done
ddpopt analyze "profiles/cap_${caps[1]}"_rank_*."$ending" "${baseline[@]}" --html profiles/before_after.html
echo "the page: profiles/before_after.html"
