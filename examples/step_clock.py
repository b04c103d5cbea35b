"""Times training steps without stopping the device inside them."""

import time
from typing import Any

import lightning as L  # noqa: N812
import torch

from lightning_ddpopt.clock import mark, milliseconds


class StepClock(L.Callback):
    """The time of each step, and the throughput of all timed steps.

    A step is timed from before its first forward to after its optimizer step: by CUDA events, read after training, on
    the CPU by a host clock. Throughput is the article's: steps over the wall time between two device synchronisations,
    the loader and the Trainer's loop included.

    Args:
        warmup_steps: optimizer steps left out at the start, at least 1. DDP forms its buckets in the first ones.
        steps: optimizer steps to time after them.
        micro_batches: how many make up each optimizer step.

    """

    def __init__(self, warmup_steps: int, steps: int, micro_batches: int = 1) -> None:
        if warmup_steps < 1 or steps < 2:
            raise ValueError(f"measure.warmup_steps={warmup_steps} must be at least 1 and measure.steps={steps} at"
                             " least 2.")  # fmt: skip
        self.warmup_steps, self.steps, self.micro_batches = warmup_steps, steps, micro_batches
        self._steps_done = self._micro_batches_done = 0
        self._start: Any = None
        self._intervals: list[tuple[Any, Any]] = []
        self._wall_s: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self._start is None:
            self._start = mark(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._micro_batches_done += 1
        if trainer.global_step == self._steps_done:
            return  # a micro-batch without optimizer step
        self._steps_done = trainer.global_step
        if self.warmup_steps < self._steps_done <= self.warmup_steps + self.steps:
            self._intervals.append((self._start, mark(trainer.strategy.root_device)))
            if self._micro_batches_done != self.micro_batches:
                raise ValueError(f"optimizer step {self._steps_done} had {self._micro_batches_done} micro-batches,"
                                 f" not {self.micro_batches}: choose a batch size and accumulation that split the"
                                 " epoch into whole steps.")  # fmt: skip
        self._start, self._micro_batches_done = None, 0
        if self._steps_done in (self.warmup_steps, self.warmup_steps + self.steps):
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            self._wall_s.append(time.perf_counter())

    def steps_ms(self) -> list[float]:
        """The time of each timed step in ms.

        Raises:
            ValueError: training ended before the last of them.

        """
        if len(self._intervals) < self.steps:
            raise ValueError(f"training ended after {self._steps_done} steps, before the last of"
                             f" measure.warmup_steps={self.warmup_steps} and measure.steps={self.steps}:"
                             " raise trainer.max_steps.")  # fmt: skip
        return [round(milliseconds(start, end), 4) for start, end in self._intervals]

    def steps_per_s(self) -> float:
        """Timed steps over the wall time they took."""
        start, end = self._wall_s
        return self.steps / (end - start)
