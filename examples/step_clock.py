"""Times training steps without stopping the device."""

import itertools
import statistics
import time
from typing import Any

import lightning as L  # noqa: N812
import torch


class StepClock(L.Callback):
    """Time from the end of one optimizer step's batch to the end of the next: loader, forward, backward and step.

    CUDA events on a GPU, read after training; a host clock on the CPU.

    Args:
        warmup_steps: optimizer steps to leave out at the start. DDP forms its buckets in the first ones.

    """

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self._marks: list[Any] = []
        self._marked_step = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self._marked_step:
            return  # a micro-batch without optimizer step
        self._marked_step = trainer.global_step
        if trainer.strategy.root_device.type == "cuda":
            mark: Any = torch.cuda.Event(enable_timing=True)
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append(mark)

    def step_times_ms(self) -> list[float]:
        """One time per optimizer step after the warm-up, in ms."""
        marks = self._marks[self.warmup_steps :]
        if marks and isinstance(marks[0], float):
            return [1000 * (end - start) for start, end in itertools.pairwise(marks)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def spread(values: list[float]) -> tuple[float, float, float]:
    """10th percentile, median and 90th percentile."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], statistics.median(values), deciles[-1]
