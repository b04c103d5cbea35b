"""Make traces of a small DDP run on the CPU over gloo, with torch.profiler; cut_traces.py makes them smaller.

    torchrun --nproc-per-node 2 tests/data/make_gloo_traces.py OUTPUT_DIRECTORY

Rank 1 takes 20 ms longer to get its batch.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

WARM_UP, PROFILED = 3, 3


def reduce_in_range(group: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    size_bytes = bucket.buffer().numel() * bucket.buffer().element_size()
    with record_function(f"bucket {bucket.index()} {size_bytes} bytes none"):
        mean = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda future: future.value()[0])


def train_step(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with record_function(f"Batch {number}"):
        with record_function("get batch"):
            time.sleep(0.02 * dist.get_rank())
            images, labels = torch.randn(64, 256), torch.randint(10, (64,))
        with record_function("forward"):
            loss = nn.functional.cross_entropy(model(images), labels)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer step"):
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(
        nn.Sequential(*layers, nn.Linear(256, 10)), bucket_cap_mb=0.5, gradient_as_bucket_view=True
    )
    model.register_comm_hook(None, reduce_in_range)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(WARM_UP):
        train_step(number, model, optimizer)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for number in range(WARM_UP, WARM_UP + PROFILED):
            train_step(number, model, optimizer)
    profiler.export_chrome_trace(str(Path(sys.argv[1]) / f"gloo_rank{os.environ['RANK']}.json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
