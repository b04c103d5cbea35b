"""What an analysis shows to be wrong, each with its evidence in figures and the argument that mends it.

A rule is a function from an :class:`~lightning_ddpopt.profiling.figures.Analysis` to a finding or None. It stays
silent where a trace cannot tell.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

from lightning_ddpopt.profiling.figures import Analysis, rate

SCHEMA = 1

NOTICEABLE_PERCENT = 5.0
"""What costs less of a step is not worth a finding, but for copies, which cost nothing to mend."""
DATA_WAIT_PERCENT = 10.0
IDLE_PERCENT = 25.0
BLOCKED_PERCENT = 0.5
ALL_EXPOSED = 0.8
"""Part of communication that must be exposed before nothing counts as hidden."""
STRAGGLES = 0.8
"""In how many of the steps one rank must come last before it is a straggler."""
MIN_STEPS, CHANCE = 5, 0.1
"""And of how many steps; and how likely it may be that any of equal ranks is last as often, each step being a draw."""
CAPACITIES_MB = (10, 25, 50, 100)
"""Bucket capacities that are worth a try."""
_COPIED = 0.5
SMALL_BYTES, MANY = 2**20, 30
"""All-reduces below this size are bound by latency; this many of them in one backward are too many."""


@dataclass(frozen=True)
class Finding:
    """Something to mend.

    Args:
        rule: its name.
        evidence: the figures that show it.
        remedy: the argument of :class:`~lightning_ddpopt.DDPOptStrategy`, of the Trainer or of the loader to change.

    """

    rule: str
    evidence: str
    remedy: str


def findings(analysis: Analysis) -> list[Finding]:
    """All that holds of the analysis, in the order of ``RULES``."""
    return [finding for rule in RULES if (finding := rule(analysis)) is not None]


def as_dict(analysis: Analysis) -> dict[str, Any]:
    """The analysis with its findings, as plain values for JSON."""
    return {"schema": SCHEMA} | analysis.to_dict() | {"findings": [asdict(finding) for finding in findings(analysis)]}


def ddp_on_one_device(analysis: Analysis) -> Finding | None:
    """DDP around one device only copies gradients."""
    mean = analysis.mean
    if not analysis.is_ddp or mean.collectives or analysis.world_size not in (None, 1) or len(analysis.ranks) > 1:
        return None
    copied = ""
    if mean.gradient_copies:
        copied = f" It copies {mean.gradient_copies:.0f} gradients, {_mb(mean.gradient_copy_bytes)}, in each step."
    return Finding(
        "ddp_on_one_device",
        f"The module is wrapped in DistributedDataParallel, and no collective runs in {mean.step_ms:.1f} ms of a"
        f" step: there is one rank.{copied}",
        'Trainer(devices=1, strategy="auto"), or DDPOptStrategy(), which does not wrap at world size 1.',
    )


def one_bucket(analysis: Analysis) -> Finding | None:
    """One reduction for all gradients cannot overlap with backward."""
    mean = analysis.mean
    exposed_ms = _exposed_ms(analysis)
    if (
        not 0 < mean.reductions <= mean.exchanges
        or mean.exposed_ms < ALL_EXPOSED * mean.communication_ms
        or mean.percent(exposed_ms) < NOTICEABLE_PERCENT
    ):
        return None
    transfer = "" if mean.exposed_wire_ms is None else f" of which {exposed_ms:.1f} ms are transfer,"
    return Finding(
        "one_bucket",
        f"All gradients are reduced in one collective, which can start only when the last of them is ready:"
        f" {mean.exposed_ms:.1f} of {mean.communication_ms:.1f} ms of communication are exposed,{transfer}"
        f" {_of_step(analysis, exposed_ms)}.",
        _capacities(_below(analysis)),
    )


def small_buckets(analysis: Analysis) -> Finding | None:
    """Many reductions that are bound by latency."""
    mean = analysis.mean
    exposed_ms = _exposed_ms(analysis)
    collectives = analysis.ranks[0].collectives
    has_buckets = any(c.bucket is not None for c in collectives)  # SyncBatchNorm's all-reduces are in none
    reduced = [
        c
        for c in collectives
        if c.name == "AllReduce" and c.payload_bytes is not None and (c.bucket is not None or not has_buckets)
    ]
    small = [c for c in reduced if c.payload_bytes is not None and c.payload_bytes < SMALL_BYTES]
    if len(small) < MANY or 2 * len(small) < len(reduced) or mean.percent(exposed_ms) < NOTICEABLE_PERCENT:
        return None
    return Finding(
        "small_buckets",
        f"{len(small)} of {len(reduced)} all-reduces carry less than 1 MiB, where latency counts and not bandwidth;"
        f" {exposed_ms:.1f} ms of communication are exposed, {_of_step(analysis, exposed_ms)}.",
        _capacities(CAPACITIES_MB[1:]),
    )


def slow_transport(analysis: Analysis) -> Finding | None:
    """Transfer takes longer than what it could hide under."""
    mean = analysis.mean
    if (
        not _has_all_ranks(analysis)
        or mean.wire_ms is None
        or mean.exposed_wire_ms is None
        or not mean.backward_compute_ms
        or mean.wire_ms <= mean.backward_compute_ms
        or mean.percent(mean.exposed_wire_ms) < NOTICEABLE_PERCENT
    ):
        return None
    hooks = {collective.hook for rank in analysis.ranks for collective in rank.collectives}
    less = "larger batches, or Trainer(accumulate_grad_batches=N), so that gradients are exchanged less often"
    if "powersgd" in hooks:
        remedy = f"{less[0].upper()}{less[1:]}."
    elif hooks & {"bf16", "fp16"}:
        remedy = f'DDPOptStrategy(comm_hook="powersgd"), which is lossy; or {less}.'
    else:
        remedy = f'DDPOptStrategy(comm_hook="bf16") or comm_hook="powersgd", which are lossy; or {less}.'
    return Finding(
        "slow_transport",
        f"Transfer alone takes {mean.wire_ms:.1f} ms of a step, and backward has only {mean.backward_compute_ms:.1f} ms"
        f" of compute to hide it under{_rate(analysis)}: no bucket size can hide it. Exposed transfer:"
        f" {mean.exposed_wire_ms:.1f} ms, {_of_step(analysis, mean.exposed_wire_ms)}.",
        remedy,
    )


def exposed_communication(analysis: Analysis) -> Finding | None:
    """Transfer that would fit under backward, and lies open."""
    mean = analysis.mean
    if (
        not _has_all_ranks(analysis)
        or mean.wire_ms is None
        or mean.exposed_wire_ms is None
        or mean.reductions <= mean.exchanges
        or mean.wire_ms > mean.backward_compute_ms
        or mean.percent(mean.exposed_wire_ms) < NOTICEABLE_PERCENT
    ):
        return None
    return Finding(
        "exposed_communication",
        f"{mean.exposed_wire_ms:.1f} of {mean.wire_ms:.1f} ms of transfer are exposed,"
        f" {_of_step(analysis, mean.exposed_wire_ms)}, though backward has {mean.backward_compute_ms:.1f} ms of"
        " compute.",
        f"{_capacities(CAPACITIES_MB)} If the graph never changes, DDPOptStrategy(static_graph=True).",
    )


def communication_of_some_ranks(analysis: Analysis) -> Finding | None:
    """Much communication, of which the ranks at hand cannot tell whether it is transfer."""
    mean = analysis.mean
    if (
        _has_all_ranks(analysis)
        or mean.communication_ms <= mean.backward_compute_ms
        or mean.percent(mean.exposed_ms) < NOTICEABLE_PERCENT
    ):
        return None
    return Finding(
        "communication_of_some_ranks",
        f"Collectives run for {mean.communication_ms:.1f} ms of a step, longer than backward's"
        f" {mean.backward_compute_ms:.1f} ms of compute; {mean.exposed_ms:.1f} ms are exposed,"
        f" {_of_step(analysis, mean.exposed_ms)}. Without the traces of all ranks transfer cannot be told from"
        " waiting for a late rank.",
        "Give `ddpopt analyze` the traces of all ranks.",
    )


def straggler(analysis: Analysis) -> Finding | None:
    """One rank comes last, and the others wait for it.

    Steps count and not collectives: who is late for the first of a step's collectives is so for the others too.

    """
    late = next((rank for rank in analysis.ranks if rank.rank == analysis.straggler), None)
    others = [rank for rank in analysis.ranks if rank is not late]
    steps = analysis.compared_steps
    if (
        late is None
        or late.late_ms is None
        or late.last_steps is None
        or steps < MIN_STEPS
        or late.last_steps < STRAGGLES * steps
        or _chance(late.last_steps, steps, len(analysis.ranks)) > CHANCE
    ):
        return None
    waits = [rank.mean.exposed_ms - (rank.mean.exposed_wire_ms or 0.0) for rank in others]
    wait_ms = sum(waits) / len(waits)
    if late.mean.percent(wait_ms) < NOTICEABLE_PERCENT:
        return None
    of_others = [rank.mean.data_wait_ms for rank in others if rank.mean.data_wait_ms is not None]
    data_ms = 0.0
    if late.mean.data_wait_ms is not None and of_others:
        data_ms = late.mean.data_wait_ms - sum(of_others) / len(of_others)
    if 2 * data_ms >= wait_ms:
        remedy = f"Its data came {data_ms:.1f} ms later than the others': DataLoader(num_workers=…), or its storage."
    else:
        remedy = (
            f"Rank {late.rank}'s own work: equal batches on all ranks, what only that rank does (logging, callbacks),"
            " its CPU cores and clocks. DDPOptStrategy's arguments do not change it."
        )
    return Finding(
        "straggler",
        f"Rank {late.rank} comes last to the collectives in {late.last_steps} of {steps} steps, {late.late_ms:.1f} ms"
        f" after the first rank in the mean; the others wait {wait_ms:.1f} ms of a step for it, not under compute,"
        f" {_of_step(analysis, wait_ms)}.",
        remedy,
    )


def _chance(times: int, steps: int, ranks: int) -> float:
    """How likely it is at most that of equal ranks any is last in at least so many of the steps."""
    each = 1 / ranks
    return ranks * sum(comb(steps, k) * each**k * (1 - each) ** (steps - k) for k in range(times, steps + 1))


def gradient_copies(analysis: Analysis) -> Finding | None:
    """Reduced gradients are copied out of their buckets."""
    mean = analysis.mean
    if not mean.gradient_copies or not mean.reductions or mean.gradient_copy_bytes is None:
        return None
    reduced = [one.bucket_bytes or one.payload_bytes or 0 for one in analysis.ranks[0].collectives]
    if mean.gradient_copy_bytes < _COPIED * sum(reduced):  # some tensors of a hook's, not the gradients
        return None
    return Finding(
        "gradient_copies",
        f"{mean.gradient_copies:.0f} device-to-device copies a step of {_mb(mean.gradient_copy_bytes)} between the"
        f" reductions and the optimizer, {mean.gradient_copy_ms:.2f} ms: reduced gradients are copied out of their"
        " buckets, and held twice.",
        "DDPOptStrategy(gradient_as_bucket_view=True).",
    )


def exchange_in_every_micro_batch(analysis: Analysis) -> Finding | None:
    """With gradient accumulation, gradients are exchanged more often than the optimizer steps."""
    mean = analysis.mean
    if mean.early_exchanges < 1:
        return None
    return Finding(
        "exchange_in_every_micro_batch",
        f"{mean.exchanges:.0f} of the {mean.backwards:.0f} backward passes of a step exchange gradients,"
        f" {mean.early_exchanges:.0f} of them without a step of the optimizer before the next exchange; the last before"
        f" the optimizer alone needs to. Communication: {mean.communication_ms:.1f} ms of a step.",
        "Trainer(accumulate_grad_batches=N) does so; in manual optimisation, trainer.strategy.block_backward_sync().",
    )


def data_wait(analysis: Analysis) -> Finding | None:
    """The device waits for its batch."""
    slowest = max(analysis.ranks, key=lambda rank: rank.mean.percent(rank.mean.data_wait_ms or 0))
    mean = slowest.mean
    if mean.data_wait_ms is None or mean.percent(mean.data_wait_ms) < DATA_WAIT_PERCENT:
        return None
    return Finding(
        "data_wait",
        f"Rank {slowest.rank} waits {mean.data_wait_ms:.1f} ms of a step for its batch, or callbacks after the last"
        f" one, {mean.percent(mean.data_wait_ms):.0f} % of the step.",
        "DataLoader(num_workers=…, pin_memory=True, persistent_workers=True, prefetch_factor=…).",
    )


def blocking_copies(analysis: Analysis) -> Finding | None:
    """The host waits for copies to the device."""
    mean = analysis.mean
    if not mean.blocking_copies or mean.blocked_ms is None or mean.percent(mean.blocked_ms) < BLOCKED_PERCENT:
        return None
    return Finding(
        "blocking_copies",
        f"{mean.blocking_copies:.0f} copies a step from host to device make the host wait, {mean.blocked_ms:.2f} ms;"
        " in that time it launches nothing.",
        "DataLoader(pin_memory=True), and .to(device, non_blocking=True) in copies of your own.",
    )


def idle_device(analysis: Analysis) -> Finding | None:
    """The host does not keep the device busy."""
    mean = analysis.mean
    if mean.idle_ms is None or mean.percent(mean.idle_ms - (mean.data_wait_ms or 0)) < IDLE_PERCENT:
        return None
    return Finding(
        "idle_device",
        f"The device has nothing to do for {mean.idle_ms:.1f} ms of a step, {_of_step(analysis, mean.idle_ms)}, the"
        " wait for data not being the cause: the host launches too slowly. A profiler adds to that: compare the step"
        " time without it.",
        "A larger batch a rank, or torch.compile(model).",
    )


Rule = Callable[[Analysis], Finding | None]
RULES: tuple[Rule, ...] = (
    ddp_on_one_device,
    one_bucket,
    small_buckets,
    slow_transport,
    exposed_communication,
    communication_of_some_ranks,
    straggler,
    gradient_copies,
    exchange_in_every_micro_batch,
    data_wait,
    blocking_copies,
    idle_device,
)


def _has_all_ranks(analysis: Analysis) -> bool:
    """Whether waiting could be told from transfer: a rank that was not given may be the late one."""
    return len(analysis.ranks) >= (analysis.world_size or 2)


def _exposed_ms(analysis: Analysis) -> float:
    """Exposed transfer where it is known, else exposed communication, waiting included."""
    mean = analysis.mean
    return mean.exposed_ms if mean.exposed_wire_ms is None else mean.exposed_wire_ms


def _of_step(analysis: Analysis, ms: float) -> str:
    return f"{analysis.mean.percent(ms):.0f} % of the step"


def _rate(analysis: Analysis) -> str:
    rates = [(c.payload_bytes or 0, c.busbw_gb_per_s) for c in analysis.ranks[0].collectives if c.busbw_gb_per_s]
    return f", at a bus bandwidth of {rate(max(rates)[1])} GB/s" if rates else ""


def _below(analysis: Analysis) -> tuple[int, ...]:
    """Capacities that make several buckets of all gradients; all of them where their size is not known."""
    sizes = [c.bucket_bytes or c.payload_bytes or 0 for c in analysis.ranks[0].collectives]
    size_mb = max(sizes, default=0) / 2**20
    return tuple(c for c in CAPACITIES_MB if 2 * c <= size_mb) or (
        (max(1, int(size_mb / 4)),) if size_mb else CAPACITIES_MB
    )


def _capacities(each: tuple[int, ...]) -> str:
    first, *others = each
    also = f"; try {', '.join(map(str, others))} too, and take the quickest" if others else ""
    return f"DDPOptStrategy(bucket_cap_mb={first}){also}."


def _mb(size_bytes: float | None) -> str:
    return f"{(size_bytes or 0) / 2**20:.1f} MiB"
