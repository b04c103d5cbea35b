"""Which steps a profiler records: :class:`NsysCallback`. The ranges in them are `nvtx`'s, the command line `nsys`'s."""

import logging
import os
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Literal

import lightning as L  # noqa: N812
import nvtx  # type: ignore[import-untyped]
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_ddpopt.messages import say_here
from lightning_ddpopt.profiling.nsys import OUTPUT_VARIABLE, PROFILER_VARIABLE
from lightning_ddpopt.profiling.nvtx import COLOURS, KinetoRanges, NvtxRanges, Ranges, StepRanges
from lightning_ddpopt.wrapping import bucket_parameters

log = logging.getLogger(__name__)

CAPTURE_RANGE = "capture"
"""The NVTX range around the window, for `nsys --capture-range=nvtx --nvtx-capture=capture@ddpopt`."""


class NsysCallback(Callback):
    """Lets a profiler record a few optimizer steps, with ranges that name their parts.

    For Nsight Systems it calls cudaProfilerStart and Stop, with the device synchronised, and emits NVTX ranges in the
    domain `ddpopt`: `Batch i` with `get batch`, `forward`, `backward`, `optimizer step` and, in backward, one range for
    each bucket that is reduced, `bucket INDEX BYTES bytes HOOK`. `backward` lies on autograd's thread, so that it
    covers its kernels. Validation has a range of its own. Start the program with ``ddpopt nsys``, or by hand with
    ``nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop --trace=cuda,nvtx``; without CUDA with
    ``--capture-range=nvtx --nvtx-capture=capture@ddpopt --trace=nvtx``.

    Every fit has one window. Outside of it nothing is recorded, and nothing is registered.

    Args:
        warmup_steps: optimizer steps of the fit before the window. DDP forms its buckets in the first ones.
        profile_steps: optimizer steps in the window.
        ranks: ``"all"``, or the global ranks that are recorded.
        profiler: ``"nsys"``, or ``"torch"`` for torch.profiler, which writes ``{output}_rank_{rank}.json.gz`` and needs
            no nsys. None: what the variable DDPOPT_PROFILER says, else ``"nsys"``.
        output: path and beginning of the files' names for ``"torch"``. None: what the variable DDPOPT_PROFILE_OUTPUT
            says, else ``"ddpopt"``.
        gives_way: do nothing if the Trainer has another NsysCallback.

    Raises:
        ValueError: a count below 0 or without steps to profile, an unknown profiler, or ranks that are none.

    """

    def __init__(
        self,
        warmup_steps: int = 10,
        profile_steps: int = 3,
        ranks: Literal["all"] | Collection[int] = "all",
        profiler: Literal["nsys", "torch"] | None = None,
        output: str | None = None,
        gives_way: bool = False,
    ) -> None:
        if warmup_steps < 0 or profile_steps < 1:
            raise ValueError(f"NsysCallback(warmup_steps={warmup_steps}, profile_steps={profile_steps}): warmup_steps"
                             " must be at least 0, profile_steps at least 1.")  # fmt: skip
        if ranks != "all" and (
            isinstance(ranks, str) or not all(isinstance(rank, int) and rank >= 0 for rank in ranks)
        ):
            raise ValueError(f"NsysCallback(ranks={ranks!r}): must be 'all' or a list of global ranks.")
        chosen = profiler or os.environ.get(PROFILER_VARIABLE, "nsys")
        if chosen not in ("nsys", "torch"):
            raise ValueError(f"NsysCallback(profiler={chosen!r}): must be 'nsys' or 'torch'.")
        self.warmup_steps, self.profile_steps, self.ranks = warmup_steps, profile_steps, ranks
        self.profiler, self.gives_way = chosen, gives_way
        self.output = output or os.environ.get(OUTPUT_VARIABLE, "ddpopt")
        self._window: _Window | None = None
        self._steps = 0
        self._global_step = 0
        self._is_done = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps, self._global_step = 0, trainer.global_step
        others = [c for c in trainer.callbacks if isinstance(c, NsysCallback) and c is not self]  # type: ignore[attr-defined]
        is_chosen = self.ranks == "all" or trainer.global_rank in self.ranks
        self._is_done = not is_chosen or (self.gives_way and bool(others))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.warmup_steps == 0 and not self._is_done:
            self._open(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self._window is not None:
            self._window.steps.batch_is_here()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._window is not None:
            self._window.steps.before_backward(loss)

    def on_before_optimizer_step(self, *args: Any) -> None:
        if self._window is not None:
            self._window.steps.before_optimizer_step()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self._is_done:
            return
        if trainer.global_step == self._global_step:
            if self._window is not None:
                self._window.steps.micro_batch_end()
            return
        self._global_step = trainer.global_step
        self._steps += 1
        if self._window is not None:
            self._window.steps.end()
        if self._steps == self.warmup_steps:
            self._open(trainer)
        elif self._window is not None and self._steps == self.warmup_steps + self.profile_steps:
            self._close(trainer)
        elif self._window is not None:
            self._window.add_buckets(trainer.strategy)
            self._window.steps.begin(self._global_step)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._window is not None:
            self._window.steps.end()
            self._window.ranges.push("validation", COLOURS["validation"])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._window is not None:
            self._window.ranges.pop()
            self._window.steps.begin(self._global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._is_done:
            return
        recorded = 0 if self._window is None else self._steps - self.warmup_steps
        say_here(log, f"NsysCallback: training ended after {self._steps} optimizer steps, and only {recorded} of the"
                      f" {self.profile_steps} steps after the first {self.warmup_steps} are recorded. Lower"
                      " warmup_steps, or train for longer.", logging.WARNING)  # fmt: skip
        self._close(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._window is not None:
            self._window.steps.abandon(trainer.strategy.root_device)
        self._close(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close(trainer)

    def _open(self, trainer: L.Trainer) -> None:
        output = f"{self.output}_rank_{trainer.global_rank}.json.gz"
        self._window = _Window(self.profiler, trainer.strategy.root_device, output)
        self._window.add_optimizers(trainer.optimizers)
        self._window.add_buckets(trainer.strategy)
        self._window.steps.begin(self._global_step)

    def _close(self, trainer: L.Trainer) -> None:
        self._is_done = True
        if self._window is not None:
            window, self._window = self._window, None
            window.close()


class _Window:
    """One recording: from the start of the profiler to its end."""

    def __init__(self, profiler: str, device: torch.device, output: str) -> None:
        self._device, self._output = device, output
        self._handles: list[RemovableHandle] = []
        self._has_buckets = False
        self._kineto: torch.profiler.profile | None = None
        self.ranges: Ranges = NvtxRanges() if profiler == "nsys" else KinetoRanges()
        self.steps = StepRanges(self.ranges)
        self._uses_cuda = device.type == "cuda"
        self._synchronize()
        if profiler == "torch":
            self._kineto = torch.profiler.profile()  # of all that is there: CPU and CUDA
            self._kineto.start()
        else:
            _warn_of_what_is_missing(self._uses_cuda)
            if self._uses_cuda:
                torch.cuda.profiler.start()
        self.ranges.push(CAPTURE_RANGE, COLOURS["capture"])

    def add_optimizers(self, optimizers: Sequence[Any]) -> None:
        """`optimizer step` ends with the step, not with the batch, after which other callbacks may take long."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                handle = optimizer.register_step_post_hook(lambda *_: self.steps.after_optimizer_step())
                self._handles.append(handle)

    def add_buckets(self, strategy: Any) -> None:
        """A range for each bucket, around the gradient that completes it, after which DDP starts its reduction.

        Does nothing while DDP has not told its buckets, which it does in the first four steps after a wrap.

        """
        if self._has_buckets or not isinstance(strategy.model, DistributedDataParallel):
            return
        hook = str(strategy.plan.hook) if hasattr(strategy, "plan") else "none"
        for index, parameters in enumerate(bucket_parameters(strategy.model)):
            size = sum(p.numel() * p.element_size() for p in parameters)
            bucket = _BucketRange(self.ranges, f"bucket {index} {size} bytes {hook}", strategy.model)
            node = torch.autograd.graph.get_gradient_edge(parameters[-1]).node
            # DDP's own hook on the node runs between these two: it was registered at the wrap.
            self._has_buckets = True
            self._handles += [node.register_prehook(bucket.open), node.register_hook(bucket.close)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.steps.end()
        self._synchronize()
        self.ranges.pop()
        if self._kineto is not None:
            self._kineto.stop()
            os.makedirs(os.path.dirname(self._output) or ".", exist_ok=True)
            self._kineto.export_chrome_trace(self._output)
        elif self._uses_cuda:
            torch.cuda.profiler.stop()

    def _synchronize(self) -> None:
        if self._uses_cuda:
            torch.cuda.synchronize(self._device)


class _BucketRange:
    """The range of one bucket, in those backward passes that reduce it."""

    def __init__(self, ranges: Ranges, name: str, ddp: DistributedDataParallel) -> None:
        self._ranges, self._name, self._ddp = ranges, name, weakref.ref(ddp)

    def open(self, gradients: Any) -> None:
        if self._is_reduced():
            self._ranges.push(self._name, COLOURS["bucket"])

    def close(self, *gradients: Any) -> None:
        if self._is_reduced():
            self._ranges.pop()

    def _is_reduced(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and bool(ddp.require_backward_grad_sync)


def _warn_of_what_is_missing(uses_cuda: bool) -> None:
    if not nvtx.enabled():
        say_here(log, "NsysCallback: NVTX_DISABLE is set, so that no range is recorded.", logging.WARNING)
    elif not uses_cuda:
        say_here(log, "NsysCallback: without CUDA nsys records the ranges, by --capture-range=nvtx"
                      " --nvtx-capture=capture@ddpopt, and no kernels; profiler='torch' shows what the CPU does.",
                 logging.WARNING)  # fmt: skip
