"""Which steps a profiler records: :class:`NsysCallback`. The ranges in them are `nvtx`'s, the command line `nsys`'s."""

import contextlib
import logging
import os
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Literal

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_ddpopt.messages import say, say_here
from lightning_ddpopt.profiling.nsys import OUTPUT_VARIABLE, PROFILER_VARIABLE
from lightning_ddpopt.profiling.nvtx import (
    COLOURS,
    KinetoRanges,
    NvtxRanges,
    Ranges,
    StepRanges,
    warn_if_switched_off,
)
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

    Every fit has one window. Outside of it nothing is recorded, and nothing is registered. All ranks must have the
    callback, also those that are not recorded: they wait for each other as the window opens.

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
            not isinstance(ranks, Collection)
            or isinstance(ranks, str)
            or not all(isinstance(rank, int) and rank >= 0 for rank in ranks)
        ):
            raise ValueError(f"NsysCallback(ranks={ranks!r}): must be 'all' or a list of global ranks.")
        chosen = profiler or os.environ.get(PROFILER_VARIABLE, "nsys")
        if chosen not in ("nsys", "torch"):
            raise ValueError(f"NsysCallback(profiler={chosen!r}): must be 'nsys' or 'torch'.")
        self.warmup_steps, self.profile_steps, self.ranks = warmup_steps, profile_steps, ranks
        self.profiler, self.gives_way = chosen, gives_way
        self.output = output or os.environ.get(OUTPUT_VARIABLE, "ddpopt")
        self._window: _Window | None = None
        self._windows = 0
        self._steps = 0
        self._global_step = 0
        self._is_over = True  # for this fit; the same on all ranks

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps, self._global_step, self._is_over = 0, trainer.global_step, False
        others = [c for c in trainer.callbacks if isinstance(c, NsysCallback) and c is not self]  # type: ignore[attr-defined]
        if self.gives_way and others:
            self._is_over = True
        elif any(not other.gives_way for other in others):
            raise ValueError("the Trainer has two NsysCallbacks, and a profiler has one window: remove one of them.")
        if self.profiler == "torch" and isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            say(log, "NsysCallback: the Trainer has a PyTorchProfiler, and torch.profiler runs once in a process:"
                     " nothing more is recorded. Remove one of the two.", logging.WARNING)  # fmt: skip
            self._is_over = True
        if self.ranks != "all" and all(rank >= trainer.world_size for rank in self.ranks):
            say(log, f"NsysCallback: ranks={list(self.ranks)!r} are none of this run's {trainer.world_size}: nothing is"
                     " recorded.", logging.WARNING)  # fmt: skip

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.warmup_steps == 0 and not self._is_over:
            self._open(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if self._window is not None:
            self._window.steps.forward()

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if self._window is not None:
            self._window.steps.before_backward(loss)

    def on_before_optimizer_step(self, *args: Any) -> None:
        if self._window is not None:
            self._window.steps.before_optimizer_step()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self._is_over:
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
        elif self._steps == self.warmup_steps + self.profile_steps:
            self._close()
        elif self._window is not None:
            self._window.add_buckets(trainer.strategy)
            self._window.steps.begin(self._global_step)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._window is not None:
            self._window.steps.validation()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._window is not None:
            self._window.steps.end()
            self._window.steps.begin(self._global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._is_over:
            return
        if self._is_chosen(trainer):
            recorded = 0 if self._window is None else self._steps - self.warmup_steps
            say_here(log, f"NsysCallback: training ended after {self._steps} optimizer steps, and only {recorded} of"
                          f" the {self.profile_steps} steps after the first {self.warmup_steps} are recorded. Lower"
                          " warmup_steps, or train for longer.", logging.WARNING)  # fmt: skip
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._is_over = True
        if self._window is not None:
            window, self._window = self._window, None
            window.abandon()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def _is_chosen(self, trainer: L.Trainer) -> bool:
        return self.ranks == "all" or trainer.global_rank in self.ranks

    def _open(self, trainer: L.Trainer) -> None:
        """Called on all ranks; those that are not recorded wait for the others' profilers too."""
        if self._is_chosen(trainer):
            self._windows += 1
            again = "" if self._windows == 1 else f"_{self._windows}"
            output = f"{self.output}{again}_rank_{trainer.global_rank}.json.gz"
            self._window = _Window(self.profiler, trainer.strategy.root_device, output)
            self._window.add_optimizers(trainer.optimizers)
            self._window.add_buckets(trainer.strategy)
        trainer.strategy.barrier()  # profilers start at different speeds, and the first step would wait for the last
        if self._window is not None:
            self._window.steps.begin(self._global_step)

    def _close(self) -> None:
        self._is_over = True
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
        self._uses_ddp = False
        self._ranges: Ranges = NvtxRanges() if profiler == "nsys" else KinetoRanges()
        self.steps = StepRanges(self._ranges)
        self._uses_cuda = device.type == "cuda"
        self._synchronize()
        if profiler == "torch":
            self._kineto = torch.profiler.profile()  # of all that is there: CPU and CUDA
            self._kineto.start()
        else:
            _warn_of_what_is_missing(self._uses_cuda)
            if self._uses_cuda:
                torch.cuda.profiler.start()
        self._ranges.push(CAPTURE_RANGE, COLOURS["capture"])

    def add_optimizers(self, optimizers: Sequence[Any]) -> None:
        """`optimizer step` ends with the step, not with the batch, after which other callbacks may take long."""
        # With several, which take turns in a manual step, another forward follows.
        after = self.steps.forward if len(optimizers) > 1 else self.steps.after_optimizer_step
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._handles.append(optimizer.register_step_post_hook(lambda *_: after()))

    def add_buckets(self, strategy: Any) -> None:
        """A range for each bucket, around the gradient that completes it, after which DDP starts its reduction.

        Does nothing while DDP has not told its buckets, which it does in the first four steps after a wrap.

        """
        self._uses_ddp = isinstance(strategy.model, DistributedDataParallel)
        if self._has_buckets or not self._uses_ddp:
            return
        hook = str(strategy.plan.hook) if hasattr(strategy, "plan") else "none"
        for index, parameters in enumerate(bucket_parameters(strategy.model)):
            size = sum(p.numel() * p.element_size() for p in parameters)
            bucket = _BucketRange(self.steps, f"bucket {index} {size} bytes {hook}", strategy.model)
            node = torch.autograd.graph.get_gradient_edge(parameters[-1]).node
            # DDP's own hook on the node runs between these two: it was registered at the wrap.
            self._has_buckets = True
            self._handles += [node.register_prehook(bucket.open), node.register_hook(bucket.close)]

    def close(self) -> None:
        if self._uses_ddp and not self._has_buckets:
            say_here(log, "NsysCallback: no ranges of buckets, since DDP has formed none in gradient-ready order: it"
                          " does so in its first four steps, and with find_unused_parameters never.")  # fmt: skip
        self.steps.end()
        self._synchronize()
        self._stop()

    def abandon(self) -> None:
        """After an exception, which may have left the device unusable: without synchronising it."""
        with contextlib.suppress(RuntimeError):
            self.steps.abandon(self._device)
        self._stop()

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._ranges.pop()
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

    def __init__(self, steps: StepRanges, name: str, ddp: DistributedDataParallel) -> None:
        self._steps, self._name, self._ddp = steps, name, weakref.ref(ddp)

    def open(self, gradients: Any) -> None:
        if self._is_reduced():
            self._steps.push_in_backward(self._name, COLOURS["bucket"])

    def close(self, *gradients: Any) -> None:
        if self._is_reduced():
            self._steps.pop_in_backward()

    def _is_reduced(self) -> bool:
        ddp = self._ddp()
        return ddp is not None and bool(ddp.require_backward_grad_sync)


def _warn_of_what_is_missing(uses_cuda: bool) -> None:
    if not warn_if_switched_off("NsysCallback") and not uses_cuda:
        say_here(log, "NsysCallback: without CUDA nsys records the ranges, by --capture-range=nvtx"
                      " --nvtx-capture=capture@ddpopt, and no kernels; profiler='torch' shows what the CPU does.",
                 logging.WARNING)  # fmt: skip
