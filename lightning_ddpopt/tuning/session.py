"""Carries out the tuner's commands on real training steps, on all ranks alike. Knows no Lightning.

Rank 0 of the process group runs the tuner. At the end of each block all ranks gather what they measured, or what went
wrong; rank 0 asks the tuner for the next command and broadcasts it. So the ranks cannot disagree, and a failure on one
of them ends tuning on all.
"""

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt.clock import mark, milliseconds
from lightning_ddpopt.plan import Plan
from lightning_ddpopt.tuning.link import measure_link
from lightning_ddpopt.tuning.recorder import BackwardRecorder
from lightning_ddpopt.tuning.timeline import Gradient, Timeline
from lightning_ddpopt.tuning.tuner import Block, Command, Procedure, RunBlock
from lightning_ddpopt.tuning.verdict import Verdict, capacity_of

log = logging.getLogger(__name__)

MOST_BATCHES = 256
"""A step of more micro-batches is none: the optimizer is stepped past Lightning, unseen."""


@dataclass
class _Step:
    """Marks of one optimizer step on this rank; several micro-batches make one step."""

    starts: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    backward_start: Any = None
    backward_end: Any = None
    backwards: int = 0
    has_stepped: bool = False
    ready: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Measured:
    """What one rank tells about a block; plain values, to be pickled."""

    steps_ms: list[float]
    overhead_s: float
    headroom_bytes: float
    payload_bytes: int | None
    phases_ms: list[tuple[float, float, float, float]]  # forward, backward, exposed, rest of each timed step
    ready_ms: dict[int, float]  # index of the parameter -> median over the timed steps
    gradients: list[tuple[str, int, str]]  # name, bytes, type by index of the parameter
    reduces_in_ready_order: bool = True


@dataclass(frozen=True)
class _Failure:
    message: str


class TuningSession:
    """One tuning, from a step boundary to its verdict.

    The caller tells it what happens in training, in this order for every micro-batch: :meth:`batch_started` (before
    forward, but after any re-wrap), :meth:`backward_started`, :meth:`backward_ended`, :meth:`optimizer_stepped`.
    Between optimizer steps, where :meth:`is_due` says so, it calls :meth:`advance`, on all ranks at once.

    Args:
        procedure: makes the tuner's procedure; called on rank 0 of ``group`` only.
        keep: the plan to fall back to where something fails.
        group: the group that DDP reduces over.
        device: this rank's.

    """

    def __init__(self, procedure: Callable[[], Procedure], keep: Plan, group: dist.ProcessGroup, device: torch.device):
        self._make_procedure, self._keep, self._group, self._device = procedure, keep, group, device
        self._leader = dist.get_global_rank(group, 0)
        self._procedure: Procedure | None = None
        self._command: Command | None = None
        self._steps: list[_Step] = []
        self._recorder: BackwardRecorder | None = None
        self._failure: str | None = None
        self._overhead_s = 0.0
        self._payload_bytes: int | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan that the current block trains by."""
        return self._command.plan if isinstance(self._command, RunBlock) else None

    @property
    def discards(self) -> int:
        """Steps at the start of the current block that are not timed."""
        return self._command.discard if isinstance(self._command, RunBlock) else 0

    # ---------------------------------------------------------------------------------------- what happens in training

    def batch_started(self, ddp: DistributedDataParallel) -> None:
        """A forward is about to begin under ``ddp``."""
        try:
            if not self._steps or self._steps[-1].has_stepped:
                self._steps.append(_Step())
            step = self._steps[-1]
            if len(step.starts) > len(step.ends):
                step.starts.pop()  # that batch was skipped
            step.starts.append(mark(self._device))
            if len(step.starts) == MOST_BATCHES:
                raise ValueError(
                    f"no optimizer step of Lightning's in {MOST_BATCHES} micro-batches; give bucket_cap_mb"
                )
            command = self._command
            if isinstance(command, RunBlock) and command.records_backward and len(self._steps) > command.discard:
                if self._recorder is None or self._recorder.ddp() is not ddp:
                    self._forget_recorder()
                    self._recorder = BackwardRecorder(ddp, self._device)
                self._recorder.marks = step.ready
        except Exception as error:
            self.fail(error)

    def backward_started(self) -> None:
        """A backward pass is about to begin."""
        if self._steps:
            self._steps[-1].backward_start = mark(self._device)

    def backward_ended(self, *, synchronised: bool, payload_bytes: int | None = None) -> None:
        """A backward pass is over, with what it had to wait for."""
        if not self._steps:
            return
        step = self._steps[-1]
        step.backward_end = mark(self._device)
        step.ends[len(step.starts) - 1 :] = [step.backward_end]
        if synchronised:
            step.backwards += 1
            self._payload_bytes = payload_bytes

    def optimizer_stepped(self) -> None:
        """An optimizer has stepped."""
        if not self._steps:
            return
        step = self._steps[-1]
        step.has_stepped = True
        step.ends[len(step.starts) - 1 :] = [mark(self._device)]
        if step.backwards > 1:
            self.fail(ValueError("a step has several backward passes that synchronise: give bucket_cap_mb yourself"))

    def fail(self, error: BaseException) -> None:
        """Remember what went wrong here; all ranks hear of it when the block is over."""
        if self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"
            log.debug("tuning failed", exc_info=error)

    def close(self) -> None:
        """Leave nothing on the module."""
        self._forget_recorder()
        self._steps = []
        if self._procedure is not None:
            self._procedure.close()

    # ---------------------------------------------------------------------------------------- between steps

    @property
    def is_due(self) -> bool:
        """Whether the block's steps are done; true at the start too. Alike on all ranks."""
        if not isinstance(self._command, RunBlock):
            return True
        if self._steps and len(self._steps[-1].starts) >= MOST_BATCHES:
            return True  # it has failed, on all ranks alike
        done = len(self._steps) - (0 if not self._steps or self._steps[-1].has_stepped else 1)
        return done >= self._command.discard + self._command.measure

    def advance(self, ddp: DistributedDataParallel) -> Verdict | None:
        """Gather, decide, broadcast; carries out what needs no steps. Collective.

        Returns:
            the verdict, where tuning is over; else None, and :attr:`plan` is what the next steps are to train by.

        """
        started = time.perf_counter()
        result: Any = None
        if isinstance(self._command, RunBlock):
            result = self._measured(ddp)
        self._forget_recorder()
        self._steps = []
        while True:
            command = self._next_command(result)
            if isinstance(command, Verdict):
                self.close()
                return command
            self._command = command
            if isinstance(command, RunBlock):
                break
            try:
                result = measure_link(self._group, self._device, command.largest_bytes, command.budget_s)
            except MemoryError as error:  # on all ranks alike
                self.fail(error)
        self._overhead_s = time.perf_counter() - started
        return None

    def rewrapped(self, seconds: float) -> None:
        """The module was wrapped anew, which took ``seconds``."""
        self._overhead_s += seconds

    def all_ranks_succeeded(self, succeeded: bool) -> bool:
        """Whether ``succeeded`` is true on all ranks. Collective."""
        flag = torch.tensor([int(succeeded)], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def _next_command(self, result: Any) -> Command | Verdict:
        """What all ranks do next: rank 0 decides."""
        mine = result if self._failure is None else _Failure(self._failure)
        gathered: list[Any] = [None] * self._group.size()
        dist.all_gather_object(gathered, mine, group=self._group)
        decision: list[Any] = [None]
        if self._group.rank() == 0:
            decision = [self._decide(gathered)]
        dist.broadcast_object_list(decision, src=self._leader, group=self._group)
        command: Command | Verdict = decision[0]
        return command

    def _decide(self, gathered: list[Any]) -> Command | Verdict:
        failures = [(rank, one.message) for rank, one in enumerate(gathered) if isinstance(one, _Failure)]
        if failures:
            return self._gave_up(f"rank {failures[0][0]}: {failures[0][1]}")
        try:
            if self._procedure is None:
                self._procedure = self._make_procedure()
                return next(self._procedure)
            first = gathered[0]
            return self._procedure.send(agreed(gathered, self._command) if isinstance(first, _Measured) else first)
        except StopIteration as end:
            verdict: Verdict = end.value
            return verdict
        except Exception as error:
            log.debug("tuning failed", exc_info=error)
            return self._gave_up(f"{type(error).__name__}: {error}")

    def _gave_up(self, why: str) -> Verdict:
        return Verdict(self._keep, self._keep, reason=f"{capacity_of(self._keep)} is kept, tuning was given up: {why}")

    def _measured(self, ddp: DistributedDataParallel) -> _Measured | None:
        """This rank's part of the block."""
        try:
            assert isinstance(self._command, RunBlock)
            steps = self._steps[: self._command.discard + self._command.measure]
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            timed = steps[self._command.discard :] if self._command.records_backward else []
            phases = [_phases(step) for step in timed if step.ready]
            recorder = self._recorder
            return _Measured(
                steps_ms=[_duration(step) for step in steps],
                overhead_s=self._overhead_s,
                headroom_bytes=headroom_bytes(self._device),
                payload_bytes=self._payload_bytes,
                phases_ms=phases,
                ready_ms=_ready(timed),
                gradients=[] if recorder is None else recorder.gradients,
                reduces_in_ready_order=bool(ddp.static_graph or not ddp.find_unused_parameters),
            )
        except Exception as error:
            self.fail(error)
            return None

    def _forget_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def headroom_bytes(device: torch.device) -> float:
    """Device memory that was free at the moment when this process used most; infinite on CPU."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return float(free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device))


def _duration(step: _Step) -> float:
    """Time of all micro-batches, from before forward to after backward or optimizer; not of the loader between."""
    return sum(milliseconds(start, end) for start, end in zip(step.starts, step.ends, strict=True))


def _phases(step: _Step) -> tuple[float, float, float, float]:
    """Everything before the last backward; that up to the last gradient; from there to its end; what follows."""
    earlier = sum(milliseconds(*pair) for pair in zip(step.starts[:-1], step.ends[:-1], strict=True))
    forward = earlier + milliseconds(step.starts[-1], step.backward_start)
    backward = max(milliseconds(step.backward_start, ready) for ready in step.ready.values())
    exposed = max(0.0, milliseconds(step.backward_start, step.backward_end) - backward)
    return forward, backward, exposed, milliseconds(step.backward_end, step.ends[-1])


def _ready(steps: list[_Step]) -> dict[int, float]:
    times: dict[int, list[float]] = {}
    for step in steps:
        for index, ready in step.ready.items():
            times.setdefault(index, []).append(milliseconds(step.backward_start, ready))
    return {index: statistics.median(values) for index, values in times.items()}


def agreed(measured: list[_Measured], command: Command | None) -> Block:
    """One block from what the ranks measured.

    Ranks wait for each other inside the reductions, so that the time of a step, and of what is exposed in it, is that
    of the rank that waited least. A bucket's reduction begins when the last rank has its gradients: a gradient is ready
    when it is on the slowest rank.

    """
    assert isinstance(command, RunBlock)
    steps = [min(times) for times in zip(*(rank.steps_ms for rank in measured), strict=True)]
    timeline, exposed = None, 0.0
    if command.records_backward and all(rank.phases_ms and rank.ready_ms for rank in measured):
        timeline, exposed = _timeline(measured)
    return Block(
        steps_ms=tuple(steps[command.discard :]),
        discarded_ms=tuple(steps[: command.discard]),
        overhead_s=max(rank.overhead_s for rank in measured),
        headroom_bytes=min(rank.headroom_bytes for rank in measured),
        payload_bytes=measured[0].payload_bytes,
        timeline=timeline,
        exposed_ms=exposed,
    )


def _timeline(measured: list[_Measured]) -> tuple[Timeline, float]:
    first = measured[0]
    count = len(first.gradients)
    # What never gets ready is unused, and DDP takes it for ready when backward begins.
    ready = [max(rank.ready_ms.get(index, 0.0) for rank in measured) for index in range(count)]
    order = list(range(count))[::-1]
    if first.reduces_in_ready_order:  # rank 0's, as DDP takes it
        order.sort(key=lambda index: first.ready_ms.get(index, 0.0))
    gradients = tuple(Gradient(*first.gradients[i][:2], ready[i], first.gradients[i][2]) for i in order)
    forward, backward, _, rest = (
        max(statistics.median(phases[which] for phases in rank.phases_ms) for rank in measured) for which in range(4)
    )
    exposed = statistics.median(
        min(rank.phases_ms[step][2] for rank in measured)
        for step in range(min(len(rank.phases_ms) for rank in measured))
    )
    return Timeline(gradients, forward, max(backward, max(ready)), rest), exposed
