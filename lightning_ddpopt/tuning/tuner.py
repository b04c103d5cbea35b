"""Decides how to tune: which plans to run on the next training steps, and which of them to keep.

Knows neither Lightning nor torch. :meth:`Tuner.run` is a generator: it yields what to measure next and is sent what was
measured, so that the whole procedure reads from top to bottom. One rank runs it; ``session`` carries it out on all.
"""

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from lightning_ddpopt.plan import HookSpec, Plan
from lightning_ddpopt.tuning.link import Link
from lightning_ddpopt.tuning.options import TuningOptions
from lightning_ddpopt.tuning.proposals import propose
from lightning_ddpopt.tuning.simulator import Interference, buckets_of, fit_interference, simulate
from lightning_ddpopt.tuning.timeline import Timeline
from lightning_ddpopt.tuning.verdict import Trial, Verdict, capacity_of

MIB = 2**20
WARMUP_STEPS = 3
"""Steps at the start that are never timed."""
MEASURED_STEPS = 4
"""Timed steps of each block of a trial."""
SMALLEST_BYTES = 256 * 1024
"""Gradients below it are not tuned: every layout is bound by the latency of one or two reductions."""
LINK_SECONDS, LINK_FRACTION, LINK_LEAST_SECONDS = 2.0, 0.05, 0.1
"""Measuring the link may take this long: 2 s, 5 % of what the steps of tuning take, but at least 0.1 s."""
SIGMAS, LEAST_GAIN = 2.5, 0.005
"""A plan beats the default if its median is lower by 2.5 standard errors of the difference, and by 0.5 %.

The best of several is compared: of runs in which all plans are equal, one in twenty still finds a winner."""
OUT_GAIN = 0.01
"""A plan is tried no longer if the best one beats it so, and by 1 %."""
SURE_SIGMAS = 5.0
"""Trials end before their time if the best one beats the default by so much."""


@dataclass(frozen=True)
class RunBlock:
    """Train by ``plan``: ``discard`` steps, then ``measure`` timed ones.

    Args:
        plan: the plan to wrap by.
        discard: steps after the wrap that are not timed, since DDP rebuilds its buckets in them.
        measure: timed steps.
        records_backward: whether to record when each gradient is ready, which costs a mark per parameter.

    """

    plan: Plan
    discard: int
    measure: int
    records_backward: bool = False


@dataclass(frozen=True)
class MeasureLink:
    """Measure the all-reduce for payloads up to ``largest_bytes``, in ``budget_s`` seconds."""

    largest_bytes: int
    budget_s: float


@dataclass(frozen=True)
class Block:
    """What the steps of a :class:`RunBlock` took, agreed by all ranks.

    Args:
        steps_ms: each timed step on the rank that waited least.
        discarded_ms: likewise the steps before.
        overhead_s: wall time between steps: exchange among ranks and the re-wrap.
        headroom_bytes: device memory that no step has used yet, the least of all ranks; infinite on CPU.
        payload_bytes: bytes that each rank put into reductions in a step; None without a hook.
        timeline: with ``records_backward``, when gradients were ready, on the slowest rank for each.
        exposed_ms: with ``records_backward``, time from the last gradient to the end of backward, on the rank that
            waited least.

    """

    steps_ms: tuple[float, ...]
    discarded_ms: tuple[float, ...] = ()
    overhead_s: float = 0.0
    headroom_bytes: float = math.inf
    payload_bytes: int | None = None
    timeline: Timeline | None = None
    exposed_ms: float = 0.0


Command: TypeAlias = RunBlock | MeasureLink
Procedure: TypeAlias = Generator[Command, Any, Verdict]


@dataclass(frozen=True)
class TuningCase:
    """What is to be tuned.

    Args:
        default: the user's settings with torch's default capacity.
        total_bytes: bytes of all gradients.
        stock: plain stock settings, if they differ from ``default`` and train the same.
        hooks: lossy hooks that may be chosen too.
        tunes_capacity: whether capacities may be changed; else only hooks.
        wait_steps: steps to wait before anything, in which a hook does not compress yet; they cost nothing.
        options: the user's.
        cached: an earlier verdict of the same case, to be verified instead of searched for.

    """

    default: Plan
    total_bytes: int
    stock: Plan | None = None
    hooks: tuple[HookSpec, ...] = ()
    tunes_capacity: bool = True
    wait_steps: int = 0
    options: TuningOptions = field(default_factory=TuningOptions)
    cached: Verdict | None = None


class Tuner:
    """The procedure for one :class:`TuningCase`."""

    def __init__(self, case: TuningCase) -> None:
        self.case = case
        self.timeline: Timeline | None = None
        self.link: Link | None = None
        self.interference = Interference()
        self._payload_factor = 1.0
        self._steps = 0
        self._steps_s = self._overhead_s = 0.0
        self._wrapped: Plan | None = None
        self._samples: dict[Plan, list[float]] = {}
        self._predicted: dict[Plan, float] = {}
        self._headroom_bytes = math.inf

    def run(self) -> Procedure:
        """Yields commands and returns the verdict."""
        case = self.case
        if case.total_bytes < SMALLEST_BYTES:
            return self._keep_default(f"gradients of {case.total_bytes / 1024:.3g} KiB are too few to tune")
        if case.cached is not None:
            verified = yield from self.verify(case.cached)
            if verified is not None:
                return verified
        first = yield from self._block(case.default, MEASURED_STEPS, records_backward=True)
        step_ms = statistics.median(first.steps_ms)
        if first.timeline is None:
            return self._keep_default("no backward pass could be measured")
        if first.payload_bytes is not None:
            self._payload_factor = first.payload_bytes / case.total_bytes
        if case.options.observe:
            return (yield from self._observe(first))
        if self._headroom_bytes < 1.2 * case.total_bytes:
            return self._keep_default("a re-wrap needs memory for the gradients once more, which is not free")
        allowed = min(case.options.max_steps, int(1000 * case.options.max_seconds / step_ms))
        if allowed < self._steps + 7 + 2 * (self._discard(case.default) + MEASURED_STEPS):
            return self._keep_default(
                f"a step takes {step_ms / 1000:.2g} s: tuning={{'max_steps': {case.options.max_steps}, 'max_seconds':"
                f" {case.options.max_seconds:g}}} leaves no room for trials; allow more, or give bucket_cap_mb"
            )
        yield from self._make_model(first)
        kept = case.default
        if case.tunes_capacity:
            kept = yield from self._trials(self._candidates(), until=allowed)
        reason = self._reason(kept)
        if case.hooks:
            kept = yield from self._trials(self._hook_candidates(kept), until=allowed + case.options.max_steps // 2)
            reason = self._reason(kept)
        return self._verdict(kept, reason)

    def verify(self, earlier: Verdict) -> Generator[Command, Any, Verdict | None]:
        """Some 16 steps that compare an earlier verdict's plan with the default; None where it does not hold.

        Where the default was kept, it is compared with the best of the others.

        """
        others = [trial for trial in earlier.trials if trial.plan != self.case.default]
        best = min(others, key=lambda trial: trial.median_ms, default=None)
        other = earlier.plan if earlier.plan != self.case.default else best.plan if best else None
        if other is None:
            return None
        for plan in (other, self.case.default):
            block = yield from self._block(plan, MEASURED_STEPS)
            self._samples[plan] = list(block.steps_ms)
        rival = self.case.default if earlier.plan == other else other
        if self._beats(rival, earlier.plan):
            self._samples.clear()
            return None
        steps_of = {trial.plan: self._samples.get(trial.plan, trial.steps_ms) for trial in earlier.trials}
        trials = tuple(replace(trial, steps_ms=tuple(steps_of[trial.plan])) for trial in earlier.trials)
        now = self._verdict(earlier.plan, f"an earlier verdict was verified: {earlier.plan}")
        return replace(
            now,
            trials=trials,
            timeline=earlier.timeline,
            link=earlier.link,
            interference=earlier.interference,
            payload_factor=earlier.payload_factor,
            is_verified=True,
        )

    # ---------------------------------------------------------------------------------------- measuring

    def _block(self, plan: Plan, measure: int, *, records_backward: bool = False) -> Generator[Command, Any, Block]:
        discard = 0 if plan == self._wrapped else self._discard(plan)
        waits = 0
        if self._wrapped is None:
            discard, waits = max(discard, WARMUP_STEPS), self.case.wait_steps
        block: Block = yield RunBlock(plan, waits + discard, measure, records_backward)
        self._wrapped = plan
        self._steps += discard + measure
        self._overhead_s += block.overhead_s
        self._steps_s += (sum(block.steps_ms) + sum(block.discarded_ms[waits:])) / 1000
        self._headroom_bytes = min(self._headroom_bytes, block.headroom_bytes)
        return block

    @staticmethod
    def _discard(plan: Plan) -> int:
        """DDP rebuilds its buckets in the second iteration after a wrap, with a static graph in the third."""
        return 3 if plan.static_graph else 2

    def _make_model(self, first: Block) -> Generator[Command, Any, None]:
        """Timeline without communication under way, link, and how they disturb each other."""
        assert first.timeline is not None
        whole = replace(self.case.default, bucket_cap_mb=math.ceil(self.case.total_bytes / MIB) + 1.0)
        default_buckets = buckets_of(first.timeline.gradients, self.case.default.bucket_cap_mb)
        clean = first
        if len(default_buckets) > 1:
            clean = yield from self._block(whole, 3, records_backward=True)
        assert clean.timeline is not None
        # With one bucket no reduction runs before the last gradient is ready: these times are backward's own.
        self.timeline = replace(clean.timeline, forward_ms=first.timeline.forward_ms, rest_ms=first.timeline.rest_ms)
        largest = self._largest_payload
        self.link = yield MeasureLink(largest, self._link_budget_s(first))
        if self.link.payload_bytes[-1] < largest and clean.exposed_ms > self.link.cost_ms[-1]:
            self.link = self.link.with_point(largest, clean.exposed_ms)
        self.interference = fit_interference(
            self.timeline,
            default_buckets,
            self.link,
            measured_backward_ms=first.timeline.backward_ms,
            measured_exposed_ms=first.exposed_ms,
            payload_factor=self._payload_factor,
        )

    @property
    def _largest_payload(self) -> int:
        return max(1, int(self.case.total_bytes * self._payload_factor))

    def _link_budget_s(self, first: Block) -> float:
        steps_s = self.case.options.max_steps * statistics.median(first.steps_ms) / 1000
        return max(LINK_LEAST_SECONDS, min(LINK_SECONDS, LINK_FRACTION * steps_s))

    def _observe(self, first: Block) -> Procedure:
        """Nothing is re-wrapped, so that backward's slow-down by reductions cannot be told from its own time."""
        assert first.timeline is not None
        self.timeline = first.timeline
        self.link = yield MeasureLink(self._largest_payload, self._link_budget_s(first))
        best = propose(self.timeline, self.link, self.interference, self._payload_factor, most=1)
        now = self._predict(self.case.default)
        verdict = self._verdict(self.case.default, "observed only")
        if not best or best[0].predicted_ms >= now:
            return replace(verdict, predicted_gain_ms=0.0, reason="observed only: no other capacity promises a gain")
        gain_ms, step_ms = now - best[0].predicted_ms, statistics.median(first.steps_ms)
        plan = replace(self.case.default, bucket_cap_mb=best[0].bucket_cap_mb)
        return replace(
            verdict,
            predicted_gain_ms=gain_ms,
            reason=f"observed only: {plan} promises {gain_ms:.2f} ms of the {step_ms:.2f} ms of a step",
        )

    # ---------------------------------------------------------------------------------------- candidates

    def _predict(self, plan: Plan, payload_factor: float | None = None) -> float:
        assert self.timeline is not None
        assert self.link is not None
        buckets = buckets_of(self.timeline.gradients, plan.bucket_cap_mb)
        factor = self._payload_factor if payload_factor is None else payload_factor
        return simulate(self.timeline, buckets, self.link, self.interference, factor).step_ms

    def _candidates(self) -> list[Plan]:
        """The default, stock, and what the model proposes."""
        assert self.timeline is not None
        assert self.link is not None
        default, stock = self.case.default, self.case.stock
        plans = [default]
        # Without bucket view there is one more gradient copy, and a re-wrap into it needs another one for a moment.
        if stock is not None and stock != default and self._headroom_bytes > 2.2 * self.case.total_bytes:
            plans.append(stock)
        given = self.case.options.candidates
        most = len(given) if given else 3
        proposals = propose(
            self.timeline, self.link, self.interference, self._payload_factor, most=most, capacities=given
        )
        plans += [replace(default, bucket_cap_mb=proposal.bucket_cap_mb) for proposal in proposals]
        self._predicted = {plan: self._predict(plan) for plan in plans}
        return plans

    def _hook_candidates(self, kept: Plan) -> list[Plan]:
        """The exact plan kept so far, and each hook at the capacity that suits its payload."""
        assert self.timeline is not None
        assert self.link is not None
        plans = [kept]
        whole = math.ceil(self.case.total_bytes / MIB) + 1.0
        for hook in self.case.hooks:
            plan = replace(self.case.default, hook=hook)
            if hook.name == "powersgd":  # whose matrices cost a launch each, so that one bucket suits it
                if self.case.tunes_capacity:
                    plan = replace(plan, bucket_cap_mb=whole)
            else:
                if self.case.tunes_capacity:
                    proposals = propose(self.timeline, self.link, self.interference, 0.5, most=1)
                    plan = replace(plan, bucket_cap_mb=proposals[0].bucket_cap_mb if proposals else None)
                self._predicted[plan] = self._predict(plan, 0.5)
            plans.append(plan)
        return plans

    # ---------------------------------------------------------------------------------------- trials

    def _trials(self, plans: list[Plan], until: int) -> Generator[Command, Any, Plan]:
        """Run the plans in turn on real steps, up and down the list, until one is clearly best or the budget is spent.

        The first of ``plans`` is what the others must beat.

        """
        reference, rounds = plans[0], 0
        alive = list(plans)
        while len(alive) > 2 and not self._has_room_for(alive, until):
            alive.pop()  # what promises least
        while len(alive) > 1 and self._has_room_for(alive, until):
            for plan in alive if rounds % 2 == 0 else alive[::-1]:
                block = yield from self._block(plan, MEASURED_STEPS)
                self._samples.setdefault(plan, []).extend(block.steps_ms)
            rounds += 1
            alive = [plan for plan in alive if plan == reference or not self._is_out(plan, alive)]
            if rounds >= 2 and len(alive) == 2 and self._beats(alive[1], reference, sigmas=SURE_SIGMAS):
                break
            if len(alive) > 2 and not self._has_room_for(alive, until):
                alive = [reference, min(alive[1:], key=lambda plan: statistics.median(self._samples[plan]))]
        tried = [plan for plan in plans if plan in self._samples]
        best = min(tried, key=lambda plan: statistics.median(self._samples[plan]), default=reference)
        return best if best != reference and self._beats(best, reference) else reference

    def _has_room_for(self, alive: Sequence[Plan], until: int) -> bool:
        steps = sum(self._discard(plan) + MEASURED_STEPS for plan in alive)
        if self._wrapped in alive:
            steps -= self._discard(alive[0])
        spent_s = self._steps_s + self._overhead_s
        pace_s = spent_s / max(1, self._steps)
        return self._steps + steps <= until and spent_s + steps * pace_s <= self.case.options.max_seconds

    def _is_out(self, plan: Plan, alive: Sequence[Plan]) -> bool:
        best = min(alive, key=lambda other: statistics.median(self._samples[other]))
        return self._beats(best, plan, least_gain=OUT_GAIN)

    def _beats(self, plan: Plan, other: Plan, *, sigmas: float = SIGMAS, least_gain: float = LEAST_GAIN) -> bool:
        """Whether ``plan`` is faster than ``other`` beyond noise."""
        mine, theirs = Trial(plan, (), tuple(self._samples[plan])), Trial(other, (), tuple(self._samples[other]))
        gain_ms = theirs.median_ms - mine.median_ms
        noise_ms = sigmas * math.hypot(mine.error_ms, theirs.error_ms)
        return gain_ms > max(noise_ms, least_gain * theirs.median_ms)

    # ---------------------------------------------------------------------------------------- the end

    def _reason(self, kept: Plan) -> str:
        if kept == self.case.default:
            tried = len(self._samples) - 1
            return f"no other plan beats {capacity_of(kept)} beyond noise" if tried > 0 else "nothing else to try"
        if kept == self.case.stock:
            return "stock settings are the fastest"
        return f"{kept} is the fastest"

    def _keep_default(self, reason: str) -> Verdict:
        return self._verdict(self.case.default, f"{capacity_of(self.case.default)} is kept: {reason}")

    def _verdict(self, kept: Plan, reason: str) -> Verdict:
        seconds = self._steps_s + self._overhead_s
        cost_s = seconds
        if self.case.default in self._samples:
            cost_s -= self._steps * statistics.median(self._samples[self.case.default]) / 1000
        elif self._steps:
            cost_s = self._overhead_s
        return Verdict(
            plan=kept,
            default=self.case.default,
            reason=reason,
            trials=tuple(
                Trial(plan, self._bucket_bytes(plan), tuple(steps), self._predicted.get(plan))
                for plan, steps in self._samples.items()
            ),
            steps=self._steps,
            seconds=seconds,
            cost_s=max(0.0, cost_s),
            timeline=self.timeline,
            link=self.link,
            interference=self.interference if self.link else None,
            payload_factor=self._payload_factor,
        )

    def _bucket_bytes(self, plan: Plan) -> tuple[int, ...]:
        if self.timeline is None:
            return ()
        gradients = self.timeline.gradients
        buckets = buckets_of(gradients, plan.bucket_cap_mb)
        return tuple(sum(gradients[index].payload_bytes for index in bucket) for bucket in buckets)
