"""The procedure of tuning in a made-up world, in which every plan has its true step time."""

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_ddpopt.plan import HookSpec, Plan
from lightning_ddpopt.tuning.link import Link
from lightning_ddpopt.tuning.options import TuningOptions
from lightning_ddpopt.tuning.session import _Measured, agreed
from lightning_ddpopt.tuning.simulator import Interference, buckets_of, simulate
from lightning_ddpopt.tuning.timeline import Gradient, Timeline
from lightning_ddpopt.tuning.tuner import Block, MeasureLink, RunBlock, Tuner, TuningCase
from lightning_ddpopt.tuning.verdict import Trial, Verdict, median_error

MIB = 2**20
LINE = Timeline(tuple(Gradient(str(i), 2 * MIB, 2.0 * (i + 1)) for i in range(40)), 30.0, 80.0, 5.0)
LINK = Link.of([(65536, 0.2), (MIB, 1.0), (80 * MIB, 80.0)])
TRUTH = Interference(0.1, 0.2)


class World:
    """Answers the tuner's commands; ``change_ms`` distorts what the simulator says of a plan."""

    def __init__(
        self, noise: float = 0.002, change_ms: Callable[[Plan, float], float] = lambda plan, ms: ms, **block: Any
    ) -> None:
        self.random = random.Random(5)
        self.noise, self.change_ms, self.block = noise, change_ms, block
        self.commands: list[RunBlock | MeasureLink] = []
        self.link = LINK

    def step_ms(self, plan: Plan) -> float:
        buckets = buckets_of(LINE.gradients, plan.bucket_cap_mb)
        factor = 0.5 if plan.hook.name == "bf16" else 0.05 if plan.hook.name == "powersgd" else 1.0
        return self.change_ms(plan, simulate(LINE, buckets, self.link, TRUTH, factor).step_ms)

    def answer(self, command: RunBlock | MeasureLink) -> Block | Link:
        self.commands.append(command)
        if isinstance(command, MeasureLink):
            return self.link
        simulation = simulate(LINE, buckets_of(LINE.gradients, command.plan.bucket_cap_mb), self.link, TRUTH)
        stretch = simulation.backward_ms / LINE.backward_ms
        gradients = tuple(replace(g, ready_ms=g.ready_ms * stretch) for g in LINE.gradients)
        true_ms = self.step_ms(command.plan)
        steps = tuple(true_ms * (1 + self.noise * self.random.gauss(0, 1)) for _ in range(command.measure))
        backward_ms = max(simulation.backward_ms, *(g.ready_ms for g in gradients))
        timeline = replace(LINE, gradients=gradients, backward_ms=backward_ms)
        return Block(
            steps,
            (2 * true_ms,) * command.discard,
            overhead_s=0.02,
            timeline=timeline if command.records_backward else None,
            exposed_ms=simulation.exposed_ms,
            **self.block,
        )

    def tune(self, case: TuningCase) -> Verdict:
        procedure = Tuner(case).run()
        answer: Any = None
        while True:
            try:
                answer = self.answer(procedure.send(answer))
            except StopIteration as end:
                verdict: Verdict = end.value
                return verdict

    @property
    def plans(self) -> list[Plan]:
        return [command.plan for command in self.commands if isinstance(command, RunBlock)]


CASE = TuningCase(Plan(), LINE.total_bytes, stock=Plan.stock())


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_of_plans_that_are_equal_another_one_wins_in_one_run_of_twenty(noise: float) -> None:
    """That is what noise of the best of several gives with 2.5 standard errors."""
    switches = 0
    for seed in range(300):
        world = World(noise, lambda plan, ms: 200.0)
        world.random = random.Random(seed)
        switches += world.tune(CASE).plan != CASE.default
    assert 0.02 < switches / 300 < 0.08


def test_the_fastest_plan_is_found_within_the_budget() -> None:
    world = World()
    verdict = world.tune(CASE)
    assert verdict.trials[0].plan == Plan()
    assert {Plan(), Plan.stock()} < {trial.plan for trial in verdict.trials}
    assert verdict.steps <= 64
    assert verdict.steps == sum(c.discard + c.measure for c in world.commands if isinstance(c, RunBlock))
    best = min(world.step_ms(trial.plan) for trial in verdict.trials)
    assert world.step_ms(verdict.plan) == pytest.approx(best, rel=0.003)
    assert world.step_ms(verdict.plan) < 0.95 * world.step_ms(Plan())
    assert verdict.gain_ms == pytest.approx(world.step_ms(Plan()) - world.step_ms(verdict.plan), rel=0.1)
    kept = verdict.trial_of(verdict.plan)
    assert kept is not None
    assert kept.predicted_ms == pytest.approx(world.step_ms(verdict.plan), rel=0.01), "the model knew"
    assert verdict.interference is not None
    assert verdict.interference.communication_slowdown == pytest.approx(TRUTH.communication_slowdown, abs=0.05)
    assert f"instead of {verdict.trials[0].median_ms:.2f}" in str(verdict)


def test_blocks_are_interleaved_and_rebuild_steps_left_out() -> None:
    world = World(noise=0.02)
    world.tune(CASE)
    trials = [command for command in world.commands if isinstance(command, RunBlock)][2:]
    first_round = [command.plan for command in trials[:5]]
    assert len(set(first_round)) == 5, "each plan once before any of them again"
    assert all(command.discard >= 2 for command in trials[:5])
    static = World()
    static.tune(replace(CASE, default=Plan(static_graph=True)))
    changed = [
        later
        for earlier, later in zip(static.commands, static.commands[1:], strict=False)
        if isinstance(later, RunBlock) and isinstance(earlier, RunBlock) and earlier.plan != later.plan
    ]
    assert all(command.discard >= (3 if command.plan.static_graph else 2) for command in changed)


@pytest.mark.parametrize("seed", range(10))
def test_where_all_are_alike_the_default_is_kept(seed: int) -> None:
    world = World(noise=0.03, change_ms=lambda plan, ms: 100.0)
    world.random = random.Random(seed)
    verdict = world.tune(CASE)
    assert verdict.plan == Plan() or verdict.gain_ms < 8, "a lucky plan is no slower"
    assert verdict.steps <= 64


def test_a_gain_within_noise_is_not_taken() -> None:
    world = World(noise=0.0, change_ms=lambda plan, ms: 100.0 if plan == Plan() else 99.6)
    verdict = world.tune(CASE)
    assert verdict.plan == Plan()
    assert "no other plan beats torch's default capacity beyond noise" in verdict.reason


def test_stock_settings_are_taken_where_they_are_fastest() -> None:
    verdict = World(change_ms=lambda plan, ms: ms - 40 if plan == Plan.stock() else ms).tune(CASE)
    assert verdict.plan == Plan.stock()
    assert "stock settings are the fastest" in verdict.reason


def test_stock_settings_need_memory_for_the_gradients_twice() -> None:
    world = World(headroom_bytes=2.0 * LINE.total_bytes)
    assert Plan.stock() not in {trial.plan for trial in world.tune(CASE).trials}
    world = World(headroom_bytes=1.0 * LINE.total_bytes)
    verdict = world.tune(CASE)
    assert not verdict.trials
    assert "needs memory for the gradients once more" in verdict.reason


def test_it_stops_early_where_the_answer_is_clear() -> None:
    clear = World(change_ms=lambda plan, ms: 60.0 if plan.bucket_cap_mb not in (None,) else 200.0)
    clear.tune(replace(CASE, stock=None, options=TuningOptions(candidates=(4.0,))))
    blocks = [command.plan for command in clear.commands if isinstance(command, RunBlock)][2:]
    assert len(blocks) == 4


def test_clear_losers_are_dropped() -> None:
    world = World(change_ms=lambda plan, ms: 500.0 if plan == Plan.stock() else ms)
    world.tune(CASE)
    assert world.plans.count(Plan.stock()) == 1


@pytest.mark.parametrize(("max_steps", "max_seconds"), [(20, 60.0), (64, 2.0)])
def test_a_budget_without_room_for_trials(max_steps: int, max_seconds: float) -> None:
    verdict = World().tune(replace(CASE, options=TuningOptions(max_steps=max_steps, max_seconds=max_seconds)))
    assert verdict.plan == Plan()
    assert "leaves no room for trials" in verdict.reason
    assert verdict.steps < 10


def test_the_time_budget_holds() -> None:
    verdict = World().tune(replace(CASE, options=TuningOptions(max_seconds=8.0)))
    assert verdict.seconds <= 9.0
    assert verdict.trials


def test_observing_re_wraps_nothing() -> None:
    world = World()
    verdict = world.tune(replace(CASE, options=TuningOptions(observe=True)))
    assert world.plans == [Plan()]
    assert verdict.plan == Plan()
    assert verdict.predicted_gain_ms is not None
    assert verdict.predicted_gain_ms > 5
    assert "observed only" in verdict.reason
    assert "promises" in verdict.reason
    fast = World()
    fast.link = Link.of([(65536, 0.001), (80 * MIB, 0.01)])
    nothing = fast.tune(replace(CASE, options=TuningOptions(observe=True)))
    assert nothing.predicted_gain_ms is not None
    assert nothing.predicted_gain_ms < 0.1


def test_hooks_come_after_the_capacities() -> None:
    hooks = (HookSpec("bf16"), HookSpec("powersgd", {"start_powerSGD_iter": 0}))
    world = World(
        change_ms=lambda plan, ms: ms - 30 if plan.hook.name == "bf16" else ms + 50 * (plan.hook.name != "none")
    )
    verdict = world.tune(replace(CASE, hooks=hooks))
    assert verdict.plan.hook == HookSpec("bf16")
    assert verdict.steps <= 96
    first_lossy = next(i for i, plan in enumerate(world.plans) if plan.hook.name != "none")
    assert len([plan for plan in world.plans[:first_lossy] if plan.hook.name == "none"]) >= 7
    exact = World(change_ms=lambda plan, ms: ms if plan.hook.name == "none" else ms + 200)
    assert exact.tune(replace(CASE, hooks=hooks)).plan.hook.name == "none"


def test_the_promise_of_observing_knows_the_hooks_bytes() -> None:
    half = World(payload_bytes=LINE.total_bytes // 2)
    options = TuningOptions(observe=True)
    verdict = half.tune(replace(CASE, default=Plan(hook=HookSpec("bf16")), stock=None, options=options))
    assert verdict.payload_factor == 0.5
    link = next(command for command in half.commands if isinstance(command, MeasureLink))
    assert link.largest_bytes == LINE.total_bytes // 2


def test_waiting_costs_nothing() -> None:
    waiting, prompt = World(), World()
    verdict = waiting.tune(replace(CASE, wait_steps=1000))
    assert verdict.steps == prompt.tune(CASE).steps
    assert isinstance(waiting.commands[0], RunBlock)
    assert waiting.commands[0].discard == 1003
    assert verdict.seconds < 30


def test_a_given_capacity_is_called_so() -> None:
    world = World(change_ms=lambda plan, ms: 100.0)
    given = replace(CASE, default=Plan(bucket_cap_mb=9), stock=None, tunes_capacity=False, hooks=(HookSpec("bf16"),))
    assert "no other plan beats the given capacity" in world.tune(given).reason


def test_too_few_gradients() -> None:
    world = World()
    verdict = world.tune(replace(CASE, total_bytes=1000))
    assert not world.commands
    assert verdict.plan == Plan()
    assert "too few to tune" in verdict.reason


class TestAnEarlierVerdict:
    def test_that_still_holds(self) -> None:
        earlier = World().tune(CASE)
        world = World()
        verdict = world.tune(replace(CASE, cached=earlier))
        assert verdict.plan == earlier.plan
        assert verdict.steps <= 16
        assert verdict.reason.startswith("an earlier verdict was verified")
        assert verdict.is_verified
        assert [trial.plan for trial in verdict.trials] == [trial.plan for trial in earlier.trials]
        assert (verdict.timeline, verdict.link) == (earlier.timeline, earlier.link)
        kept = verdict.trial_of(earlier.plan)
        assert kept is not None
        assert len(kept.steps_ms) == 4

    def test_that_does_not_hold_any_more(self) -> None:
        earlier = World().tune(CASE)
        world = World(change_ms=lambda plan, ms: ms + 60 * (plan == earlier.plan))
        verdict = world.tune(replace(CASE, cached=earlier))
        assert verdict.plan != earlier.plan
        assert len(verdict.trials) >= 3

    def test_that_kept_the_default(self) -> None:
        """It is compared with the best of the others."""
        alike = World(noise=0.0, change_ms=lambda plan, ms: 100.0 + (plan != Plan()) + 4 * (plan == Plan.stock()))
        earlier = alike.tune(CASE)
        assert earlier.plan == Plan()
        again = alike.tune(replace(CASE, cached=earlier))
        assert again.is_verified
        assert again.steps <= 16
        assert again.plan == Plan()
        assert World().tune(replace(CASE, cached=earlier)).plan != Plan(), "something is faster now"
        nothing = World().tune(replace(CASE, cached=Verdict(Plan(), Plan(), "so it is")))
        assert not nothing.is_verified


def measured(steps: list[float], ready: dict[int, float], exposed: float) -> _Measured:
    gradients = [("a", 8, "float32"), ("b", 16, "float32")]
    return _Measured(steps, 0.1, 5.0, None, [(10.0, 20.0, exposed, 1.0)] * 2, ready, gradients)


def test_ranks_agree_on_the_one_that_waited_least() -> None:
    """Rank 1's loader was slow in the second step: rank 0 waited for it in the reduction."""
    ranks = [measured([9.0, 50.0, 10.0], {0: 20.0, 1: 5.0}, 30.0), measured([9.5, 10.5, 10.4], {0: 18.0, 1: 6.0}, 2.0)]
    block = agreed(ranks, RunBlock(Plan(), 1, 2, True))
    assert block.discarded_ms == (9.0,)
    assert block.steps_ms == (10.5, 10.0)
    assert block.exposed_ms == 2.0
    assert block.timeline is not None
    assert [(g.name, g.ready_ms) for g in block.timeline.gradients] == [("b", 6.0), ("a", 20.0)]
    in_reverse = [replace(rank, reduces_in_ready_order=False) for rank in ranks]
    line = agreed(in_reverse, RunBlock(Plan(), 1, 2, True)).timeline
    assert line is not None
    assert [g.name for g in line.gradients] == ["b", "a"]


def test_the_error_of_a_median() -> None:
    values = [random.Random(3 + i).gauss(10, 1) for i in range(400)]
    chunks = [values[i : i + 20] for i in range(0, 400, 20)]
    spread = statistics.stdev(statistics.median(chunk) for chunk in chunks)
    assert statistics.mean(median_error(chunk) for chunk in chunks) == pytest.approx(spread, rel=0.35)
    assert median_error([1.0, 2.0]) == float("inf")
    assert Trial(Plan(), (), (3.0, 1.0, 2.0)).median_ms == 2.0
