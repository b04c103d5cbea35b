"""Exposed communication while training, without a profiler: :class:`OverlapMonitor`."""

import logging
import statistics
import weakref
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_ddpopt.clock import mark
from lightning_ddpopt.messages import say
from lightning_ddpopt.profiling.nvtx import after_ddps_end_of_backward
from lightning_ddpopt.wrapping import bucket_parameters

log = logging.getLogger(__name__)


class OverlapMonitor(Callback):
    """Logs how long each step waits for gradients: from the last one that backward computes to DDP's end of backward.

    That is the exposed tail of the communication, with the hook of the last bucket and with what DDP does at the end
    (copying buckets back to gradients). What the reductions cost by slowing backward down it does not see. On a GPU it
    takes two events a step, read when they have passed, so that nothing waits for them; on the CPU a clock.
    ``ddpopt/exposed_ms`` goes to the loggers every ``log_every_n_steps``: the median over the steps since the last
    time, of rank zero. The first steps, in which DDP has not told its buckets, are left out.

    """

    def __init__(self) -> None:
        self.exposed_ms: list[float] = []
        """Exposed tail of each backward pass that reduced gradients in this fit, of this rank, in ms."""
        self._pending: list[tuple[Any, Any]] = []
        self._logged = 0
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self._handle: RemovableHandle | None = None
        self._last_gradient: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._forget()
        self.exposed_ms, self._pending, self._logged = [], [], 0
        if not isinstance(trainer.strategy.model, DistributedDataParallel):
            say(log, "OverlapMonitor: nothing is wrapped in DDP, so that there is no communication to see.")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        ddp = trainer.strategy.model
        if not isinstance(ddp, DistributedDataParallel) or not ddp.require_backward_grad_sync or loss.grad_fn is None:
            return
        device = loss.device  # the functions below must not keep the loss, and its graph
        if self._wrapper is None or self._wrapper() is not ddp:  # the first time, or wrapped anew
            self._forget()
            buckets = bucket_parameters(ddp)
            if not buckets:
                return
            self._wrapper = weakref.ref(ddp)
            last = torch.autograd.graph.get_gradient_edge(buckets[-1][-1]).node
            self._handle = last.register_prehook(lambda *_: self._mark_last_gradient(device))
        self._last_gradient = None

        def start(gradients: Any) -> None:
            handle.remove()
            after_ddps_end_of_backward(lambda: self._end(device))

        handle = loss.grad_fn.register_prehook(start)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._read(wait=False)
        news, every = self.exposed_ms[self._logged :], trainer.log_every_n_steps  # type: ignore[attr-defined]
        if news and trainer.is_global_zero and every and trainer.global_step % every == 0:
            self._logged = len(self.exposed_ms)
            for logger in trainer.loggers:
                logger.log_metrics({"ddpopt/exposed_ms": statistics.median(news)}, step=trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._read(wait=True)
        self._forget()
        if isinstance(trainer.strategy.model, DistributedDataParallel) and not self.exposed_ms:
            say(log, "OverlapMonitor: nothing measured, since DDP has formed no buckets in gradient-ready order: it"
                     " does so in its first four steps, with unused parameters never.", logging.WARNING)  # fmt: skip
        if self.exposed_ms:
            say(log, f"exposed communication: {statistics.median(self.exposed_ms):.2f} ms a step (median of"
                     f" {len(self.exposed_ms)} steps, rank zero)")  # fmt: skip

    def on_exception(self, *args: Any) -> None:
        self._forget()

    def _mark_last_gradient(self, device: torch.device) -> None:
        self._last_gradient = mark(device)

    def _end(self, device: torch.device) -> None:
        if self._last_gradient is not None:
            self._pending.append((self._last_gradient, mark(device)))
            self._last_gradient = None

    def _read(self, wait: bool) -> None:
        while self._pending:
            start, end = self._pending[0]
            if isinstance(start, float):
                self.exposed_ms.append(1000 * (end - start))
            elif wait or end.query():
                end.synchronize()
                self.exposed_ms.append(start.elapsed_time(end))
            else:
                return
            self._pending.pop(0)

    def _forget(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._wrapper = self._last_gradient = None
