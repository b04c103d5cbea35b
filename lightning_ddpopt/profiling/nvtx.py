"""Named ranges in traces, for Nsight Systems through NVTX or for torch.profiler; `capture` chooses the steps.

The names and colours are those of the article: `Batch i` holds `get batch`, `forward`, `backward`, `optimizer step`.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import nvtx  # type: ignore[import-untyped]
import torch
from lightning.pytorch.profilers import Profiler
from nvtx._lib.lib import DomainHandle  # type: ignore[import-untyped]
from torch import Tensor

from lightning_ddpopt.messages import say_here

log = logging.getLogger(__name__)

DOMAIN = "ddpopt"
COLOURS = {  # 0xRRGGBB
    "Batch": 0x0000FF,
    "get batch": 0xFF0000,
    "forward": 0x008000,
    "backward": 0x800080,
    "optimizer step": 0xFFFF00,
    "bucket": 0xFFA500,
    "validation": 0x808080,
    "capture": 0xFFFFFF,
}


class Ranges(Protocol):
    """A stack of ranges for each thread."""

    def push(self, name: str, colour: int) -> None: ...

    def pop(self) -> None: ...


class NvtxRanges:
    """Ranges that Nsight Systems records, in the NVTX domain `ddpopt`. Without a tool attached they do nothing."""

    def __init__(self) -> None:
        self._domain = _domain(DOMAIN)

    def push(self, name: str, colour: int) -> None:
        self._domain.push_range(self._domain.get_event_attributes(message=name, color=colour))

    def pop(self) -> None:
        self._domain.pop_range()


def _domain(name: str) -> Any:
    """The NVTX domain, also where nvtx (0.2.17) takes it for disabled.

    nvtx asks the tool whether the domain is enabled, and if not it gives one that does nothing, for as long as the
    process lives. nsys 2023.4 answers no, and records the domain's ranges all the same.

    """
    domain = nvtx.get_domain(name)
    if isinstance(domain, nvtx.Domain) or not nvtx.enabled():
        return domain
    forced = object.__new__(nvtx.Domain)
    forced.handle = DomainHandle(name)
    forced.__init__(name)
    return forced


class KinetoRanges:
    """Ranges that torch.profiler records."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def push(self, name: str, colour: int) -> None:
        record = torch.profiler.record_function(name)
        record.__enter__()
        self._stack().append(record)

    def pop(self) -> None:
        self._stack().pop().__exit__(None, None, None)

    def _stack(self) -> list[Any]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        return self._threads.stack  # type: ignore[no-any-return]


def warn_if_switched_off(who: str) -> bool:
    """Say so once where the user has switched NVTX off."""
    if nvtx.enabled():
        return False
    say_here(log, f"{who}: NVTX_DISABLE is set, so that no range is recorded.", logging.WARNING)
    return True


class StepRanges:
    """The ranges of training steps, driven by the hooks of a callback, in the order of its methods.

    Args:
        ranges: where they go.

    """

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._open: list[str] = []  # on the thread that trains
        self._open_in_backward = 0  # on autograd's

    def begin(self, step: int) -> None:
        """Open the range of one optimizer step; its first batch is about to be fetched."""
        self._push(f"Batch {step}", COLOURS["Batch"])
        self._push("get batch")

    def forward(self) -> None:
        self._end_phase()
        self._push("forward")

    def before_backward(self, loss: Tensor) -> None:
        """Open the range `backward` when it starts, on the thread that runs it.

        Autograd launches the kernels of a GPU from a thread of its own, so that a range on the calling thread would
        cover none of them. A prehook on the loss's node runs on that thread, and so does what is queued for backward's
        end; queued again from there, it comes after DDP's own end of backward, which waits for the reductions.

        """
        self._end_phase()
        if loss.grad_fn is None:
            return

        def start(gradients: Any) -> None:
            handle.remove()  # a graph that is kept may run backward again
            self.push_in_backward("backward", COLOURS["backward"])
            after_ddps_end_of_backward(self.pop_in_backward)

        handle = loss.grad_fn.register_prehook(start)

    def push_in_backward(self, name: str, colour: int) -> None:
        self._ranges.push(name, colour)
        self._open_in_backward += 1

    def pop_in_backward(self) -> None:
        self._open_in_backward -= 1
        self._ranges.pop()

    def before_optimizer_step(self) -> None:
        self._end_phase()
        self._push("optimizer step")

    def after_optimizer_step(self) -> None:
        self._end_phase()

    def micro_batch_end(self) -> None:
        """The step goes on with another micro-batch."""
        self._end_phase()
        self._push("get batch")

    def validation(self) -> None:
        self.end()
        self._push("validation")

    def end(self) -> None:
        """Close all that is open on this thread, the step's range too."""
        while self._open:
            self._open.pop()
            self._ranges.pop()

    def abandon(self, device: torch.device) -> None:
        """After an exception: close all that is open, in backward on the thread that opened it."""
        self.end()
        if self._open_in_backward:
            run_on_autograd_thread(device, self._close_backward)

    def _close_backward(self) -> None:
        while self._open_in_backward:
            self.pop_in_backward()

    def _push(self, name: str, colour: int | None = None) -> None:
        self._ranges.push(name, COLOURS[name] if colour is None else colour)
        self._open.append(name)

    def _end_phase(self) -> None:
        if len(self._open) > 1:
            self._open.pop()
            self._ranges.pop()


def after_ddps_end_of_backward(function: Callable[[], None], before: Callable[[], None] | None = None) -> None:
    """Call ``function`` at the end of the running backward, on its thread, after DDP has waited for the reductions.

    Args:
        function: called last.
        before: called when the last gradient is computed, before DDP waits. DDP queues its end of backward while
            backward runs, later than this call and earlier than what is queued at the end.

    """
    engine = torch.autograd.Variable._execution_engine

    def at_the_end() -> None:
        if before is not None:
            before()
        engine.queue_callback(function)

    engine.queue_callback(at_the_end)


def run_on_autograd_thread(device: torch.device, function: Callable[[], None]) -> None:
    """Run ``function`` on the thread that runs backward for ``device``: a GPU's own, for the CPU this one."""
    probe = torch.zeros((), device=device, requires_grad=True)
    with torch.enable_grad():
        loss = probe * 1
    assert loss.grad_fn is not None
    loss.grad_fn.register_prehook(lambda gradients: function())
    loss.backward()


class NVTXProfiler(Profiler):
    """A Lightning profiler that makes a range of every action of Lightning's, for ``Trainer(profiler=...)``.

    For those who want to see all that Lightning does. For the steps alone see
    :class:`~lightning_ddpopt.profiling.capture.NsysCallback`.

    """

    def __init__(self) -> None:
        super().__init__()
        warn_if_switched_off("NVTXProfiler")
        self._ranges = NvtxRanges()
        self._open: list[str] = []

    def start(self, action_name: str) -> None:
        self._ranges.push(action_name, COLOURS["validation"])
        self._open.append(action_name)

    def stop(self, action_name: str) -> None:
        """Close the action, and those within it that were not closed (an exception left them)."""
        while action_name in self._open:
            self._ranges.pop()
            if self._open.pop() == action_name:
                return

    def summary(self) -> str:
        return ""
