"""Tuning while training: the same parameters as stock DDP, on all ranks one verdict, whatever happens on the way."""

import functools
import gc
import json
import random
import time
import weakref
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder
from ranks import Ranks
from scenarios import Messages, Wide, assert_ranks_equal, data, state_of, train, trainer
from torch.nn.parallel import DistributedDataParallel
from tuning_runs import NO_CACHE, assert_same_parameters, stock, tune

from lightning_ddpopt import DDPOptStrategy, HookSpec, Plan
from lightning_ddpopt.tuning import link as link_module
from lightning_ddpopt.tuning import session as session_module
from lightning_ddpopt.tuning.recorder import BackwardRecorder
from lightning_ddpopt.tuning.tuner import Tuner
from lightning_ddpopt.tuning.verdict import Verdict

__all__ = ["stock"]  # a fixture


@pytest.mark.parametrize("steps", [10, 20, 80])
@pytest.mark.parametrize("tuning", [True, False, "observe"], ids=str)
def test_the_parameters_are_those_of_stock_ddp(
    two_ranks: Ranks, stock: dict[int, dict[str, Any]], tuning: Any, steps: int
) -> None:
    """With 10 and 20 steps the fit ends in the middle of the tuning."""
    tuning = {"cache": False} if tuning is True else tuning
    results = two_ranks(tune, {"tuning": tuning}, steps=steps)
    assert_same_parameters(results, stock[steps])
    is_done = tuning is not False and steps >= (80 if isinstance(tuning, dict) else 10)
    for result in results:
        assert (result["verdict"] is not None) == is_done
        assert is_done or result["plan"] == Plan()
    if isinstance(tuning, dict) and not is_done:
        assert any("training ended before tuning did" in text for text in results[0]["said"])


MODES: list[dict[str, Any]] = [
    {"accumulate": 2},
    {"accumulate": 3},
    {"manual": "no_sync", "accumulate": 1},
    {"manual": "no_sync", "accumulate": 2},
    {"manual": "sync", "accumulate": 1},
    {"limit_train_batches": 3},
    {"fits": 2, "steps": 40},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_in_every_mode(two_ranks: Ranks, static: bool, mode: dict[str, Any]) -> None:
    settings = {"steps": 80} | mode
    results = two_ranks(tune, {"static_graph": static} | NO_CACHE, **settings)
    expected = two_ranks(train, None, make_module=Wide, **settings)
    assert_same_parameters(results, expected[0])
    first, second = (result["verdict"] for result in results)
    if "fits" not in mode:  # 40 steps are not enough, and the second fit begins anew
        assert first is not None
        assert first == second
        assert first.trials


def test_several_backward_passes_in_a_step_are_not_tuned(two_ranks: Ranks) -> None:
    mode: dict[str, Any] = {"manual": "sync", "accumulate": 2}
    results = two_ranks(tune, NO_CACHE, **mode)
    assert_same_parameters(results, two_ranks(train, None, make_module=Wide, steps=80, **mode)[0])
    for result in results:
        assert result["plan"] == Plan()
        assert "several backward passes that synchronise" in result["verdict"].reason


def test_the_verdict(two_ranks: Ranks) -> None:
    first, second = two_ranks(tune, NO_CACHE)
    verdict = first["verdict"]
    assert verdict == second["verdict"]
    assert verdict.plan == first["plan"] == second["plan"]
    assert verdict.trials[0].plan == verdict.default == Plan()
    assert {trial.plan for trial in verdict.trials} >= {Plan(), Plan.stock()}
    assert len(verdict.trials) >= 3
    assert 20 <= verdict.steps <= 64
    assert all(len(trial.steps_ms) >= 4 and min(trial.steps_ms) > 0 for trial in verdict.trials)
    kept = verdict.trial_of(verdict.plan)
    assert first["layout"].bucket_bytes == kept.bucket_bytes
    assert first["layout"].rebuilt
    timeline = verdict.timeline
    assert [g.name for g in timeline.gradients][:2] in (["net.5.bias", "net.5.weight"], ["net.5.weight", "net.5.bias"])
    assert timeline.total_bytes == 286_736
    assert timeline.gradients[-1].name.startswith("net.0")
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
    assert any(text.startswith(f"ddpopt: {verdict}") for text in first["said"])
    assert not any("tuning" in text for text in second["said"])


class Fails(L.Callback):
    """Something of the tuning fails on one rank."""

    def __init__(self, what: str) -> None:
        self.what = what

    def setup(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.patch = pytest.MonkeyPatch()

        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError("out of paper")

        if dist.get_rank() != 1:
            if self.what == "tuner":
                self.patch.setattr(Tuner, "_candidates", fail)
            return
        if self.what == "link":
            self.patch.setattr(link_module, "_allocate", fail)
        if self.what == "recorder":
            self.patch.setattr(session_module, "BackwardRecorder", fail)
        if self.what == "measuring":
            self.patch.setattr(session_module, "headroom_bytes", fail)
        if self.what == "wrap":
            whole = DDPOptStrategy._register_ddp_hooks

            def register(strategy: DDPOptStrategy) -> None:
                if strategy.plan.bucket_cap_mb is not None:
                    fail()
                whole(strategy)

            self.patch.setattr(DDPOptStrategy, "_register_ddp_hooks", register)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.patch.undo()


def tune_and_fail(what: str) -> dict[str, Any]:
    return tune(NO_CACHE, callbacks=[Fails(what)])


@pytest.mark.parametrize("what", ["recorder", "measuring", "wrap", "tuner", "link"])
def test_a_failure_anywhere_ends_tuning_everywhere(
    two_ranks: Ranks, stock: dict[int, dict[str, Any]], what: str
) -> None:
    results = two_ranks(tune_and_fail, what)
    assert_same_parameters(results, stock[80])
    for result in results:
        assert result["plan"] == Plan()
        assert "tuning was given up" in result["verdict"].reason
        assert ("MemoryError: no" if what == "link" else "OSError: out of paper") in result["verdict"].reason
    assert results[0]["verdict"] == results[1]["verdict"]


class SlowLoader(Wide):
    """Rank 1 gets its batches late, now and then; after Lightning's broadcast, in which rank 0 would wait for it."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if dist.get_rank() == 1:
            time.sleep(random.Random().choice([0, 0.04, 0.06]))
        return batch


def tune_with_a_slow_rank() -> dict[str, Any]:
    return train(NO_CACHE, steps=80, make_module=SlowLoader)


def test_a_slow_loader_on_one_rank_is_not_seen(two_ranks: Ranks, stock: dict[int, dict[str, Any]]) -> None:
    """Without the minimum over ranks, the other rank's steps would take these 30 ms in the mean."""
    results = two_ranks(tune_with_a_slow_rank)
    assert_same_parameters(results, stock[80])
    verdict = results[0]["verdict"]
    assert verdict == results[1]["verdict"]
    assert verdict.trials
    assert all(trial.median_ms < 25 for trial in verdict.trials)


def tune_with_uneven_loaders() -> dict[str, Any]:
    fitter, module = trainer(DDPOptStrategy(**NO_CACHE), max_steps=70), Wide()
    fitter.fit(module, data(batches=5 + 2 * dist.get_rank()))
    return {"state": state_of(module), "verdict": fitter.strategy.verdict}


def test_loaders_of_unlike_length(two_ranks: Ranks) -> None:
    results = two_ranks(tune_with_uneven_loaders)
    assert_ranks_equal(results)
    assert results[0]["verdict"] == results[1]["verdict"] is not None


def leaves_nothing_behind() -> dict[str, Any]:
    wrappers: list[weakref.ref[DistributedDataParallel]] = []
    seen: dict[str, Any] = {}
    made, closed = [], []
    patch = pytest.MonkeyPatch()

    class Watched(session_module.BackwardRecorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        def close(self) -> None:
            super().close()
            closed.append(self)

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if not wrappers or wrappers[-1]() is not trainer.strategy.model:
                wrappers.append(weakref.ref(trainer.strategy.model))
            seen["alive"] = sum(wrapper() is not None for wrapper in wrappers)
            seen["session"] = trainer.strategy._session

    patch.setattr(session_module, "BackwardRecorder", Watched)
    gc.disable()
    try:
        tune(NO_CACHE, callbacks=[Watch()])
    finally:
        gc.enable()
        patch.undo()
    return seen | {"wrappers": len(wrappers), "recorders": len(made), "closed": len(set(closed))}


def record_backward() -> list[int]:
    device = torch.device("cpu")
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    recorder = BackwardRecorder(ddp, device)
    counts = []
    for _ in range(2):
        ddp(torch.ones(2, 3)).sum().backward()
        counts.append(len(recorder.marks))
        recorder.close()
        recorder.marks = {}
    return counts


def test_a_closed_recorder_marks_nothing(two_ranks: Ranks) -> None:
    assert two_ranks(record_backward) == [[2, 0], [2, 0]]


def test_nothing_is_left_behind(two_ranks: Ranks) -> None:
    for result in two_ranks(leaves_nothing_behind):
        assert result["wrappers"] >= 3
        assert result["alive"] == 1
        assert result["session"] is None
        assert result["recorders"] == result["closed"] >= 1


def tune_deterministically() -> dict[str, Any]:
    try:
        return tune({}, steps=10, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


def observe_deterministically() -> dict[str, Any]:
    try:
        return tune({"tuning": "observe"}, steps=30, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_observing_is_no_matter_for_a_deterministic_run(two_ranks: Ranks, stock: dict[int, dict[str, Any]]) -> None:
    results = two_ranks(observe_deterministically)
    assert_same_parameters(results, stock[30])
    assert results[0]["verdict"].reason.startswith("observed only")
    assert results[0]["plan"] == Plan()


class WithUnused(Wide):
    """Trains under a static graph only."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(64, 64)


def tune_with_unused() -> dict[str, Any]:
    return train({"static_graph": True} | NO_CACHE, steps=80, make_module=WithUnused)


def test_what_needs_a_static_graph_keeps_it_in_every_trial(two_ranks: Ranks) -> None:
    results = two_ranks(tune_with_unused)
    assert_ranks_equal(results)
    assert all(trial.plan.static_graph for trial in results[0]["verdict"].trials)


class StepsPastLightning(Wide):
    def __init__(self) -> None:
        super().__init__(accumulate=1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def test_optimizers_that_are_stepped_unseen(two_ranks: Ranks) -> None:
    results = two_ranks(past_lightning, NO_CACHE)
    assert_same_parameters(results, two_ranks(past_lightning, None)[0])
    assert "no optimizer step of Lightning's" in results[0]["verdict"].reason


def past_lightning(arguments: dict[str, Any] | None) -> dict[str, Any]:
    strategy = "ddp" if arguments is None else DDPOptStrategy(**arguments)
    fitter, module = trainer(strategy, max_epochs=20), StepsPastLightning()
    fitter.fit(module, data())
    return {"state": state_of(module), "verdict": getattr(fitter.strategy, "verdict", None)}


def find_a_rate_first() -> dict[str, Any]:
    finder = LearningRateFinder(num_training_steps=20)
    strategy, module = DDPOptStrategy(**NO_CACHE), Wide()
    module.lr = 0.01
    fitter = trainer(strategy, max_steps=90, callbacks=[finder], enable_checkpointing=True)
    fitter.fit(module, data())
    return {"state": state_of(module), "verdict": strategy.verdict}


def test_after_a_learning_rate_finder_it_tunes(two_ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    results = two_ranks(find_a_rate_first)
    assert_ranks_equal(results)
    assert results[0]["verdict"] == results[1]["verdict"] is not None
    assert results[0]["verdict"].trials


class Compiled(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.net[3].compile(backend="eager")


class CompiledMethod(Wide):
    @torch.compile(backend="eager")
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])


class CompiledFunction(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.loss = torch.compile(torch.nn.functional.cross_entropy, backend="eager")


def tune_compiled(make_module: Any = Compiled) -> dict[str, Any]:
    messages = Messages()
    result = train({}, steps=10, make_module=make_module)
    messages.close()
    return result | {"said": messages.texts}


def tune_with_a_callable() -> dict[str, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return tune({"comm_hook": allreduce_hook}, steps=10)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (tune_deterministically, "deterministic=...) asks for runs that repeat"),
        (tune_compiled, "the module is compiled"),
        (functools.partial(tune_compiled, CompiledMethod), "the module is compiled"),
        (functools.partial(tune_compiled, CompiledFunction), "the module is compiled"),
        (tune_with_a_callable, "a callable hook may keep state for each bucket"),
    ],
)
def test_where_trials_would_be_wrong_there_are_none(
    two_ranks: Ranks, stock: dict[int, dict[str, Any]], function: Any, reason: str
) -> None:
    results = two_ranks(function)
    assert_same_parameters(results, stock[10])
    assert results[0]["verdict"] is None
    assert len([text for text in results[0]["said"] if "not tuned" in text and reason in text]) == 1


def tune_then_change(at: int) -> dict[str, Any]:
    return tune(NO_CACHE, plans={at: Plan(bucket_cap_mb=0.1)})


def test_change_plan_ends_tuning(two_ranks: Ranks, stock: dict[int, dict[str, Any]]) -> None:
    results = two_ranks(tune_then_change, 15)
    assert_same_parameters(results, stock[80])
    for result in results:
        assert result["plan"] == Plan(bucket_cap_mb=0.1)
        assert result["verdict"] is None


def change_before_fit() -> dict[str, Any]:
    strategy, module = DDPOptStrategy(**NO_CACHE), Wide()
    strategy.change_plan(Plan(bucket_cap_mb=0.1))
    fitter = trainer(strategy, max_steps=30)
    fitter.fit(module, data())
    return {"state": state_of(module), "plan": strategy.plan, "verdict": strategy.verdict}


def test_a_plan_of_the_user_before_fit_is_not_tuned(two_ranks: Ranks, stock: dict[int, dict[str, Any]]) -> None:
    results = two_ranks(change_before_fit)
    assert_same_parameters(results, stock[30])
    assert results[0]["plan"] == Plan(bucket_cap_mb=0.1)
    assert results[0]["verdict"] is None


class Skips(Wide):
    """The rest of an epoch is skipped now and then."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch % 2 == 0 and batch_idx == 9 else None


def tune_with_skips(arguments: dict[str, Any] | None, accumulate: int) -> dict[str, Any]:
    return train(arguments, steps=80, make_module=Skips, accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_skipped_batches(two_ranks: Ranks, accumulate: int) -> None:
    results = two_ranks(tune_with_skips, NO_CACHE, accumulate)
    assert_same_parameters(results, two_ranks(tune_with_skips, None, accumulate)[0])
    assert results[0]["verdict"] == results[1]["verdict"] is not None


class UnfreezeAt(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            module.net[0].requires_grad_(True)


class Frozen(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)


def unfreeze(arguments: dict[str, Any], at: int) -> dict[str, Any]:
    return train(arguments, steps=160, make_module=Frozen, callbacks=[UnfreezeAt(at)])


@pytest.mark.parametrize("at", [20, 75])
def test_unfrozen_layers_are_tuned_anew(two_ranks: Ranks, at: int) -> None:
    results = two_ranks(unfreeze, NO_CACHE, at)
    assert_ranks_equal(results)
    untuned = two_ranks(unfreeze, {"tuning": False}, at)
    assert_same_parameters(results, untuned[0])
    assert results[0]["verdict"].timeline.total_bytes == 286_736, "the verdict is of all layers"


@pytest.mark.parametrize("allow", ["quantized", "low_rank"])
def test_hooks_are_tried_where_they_are_allowed(two_ranks: Ranks, allow: str) -> None:
    arguments = {"comm_hook": "auto", "allow": allow} | NO_CACHE
    results = two_ranks(tune, arguments, steps=110)
    assert_ranks_equal(results)
    verdict = results[0]["verdict"]
    assert verdict == results[1]["verdict"]
    hooks = {trial.plan.hook.name for trial in verdict.trials}
    assert hooks == {"none", "bf16"} | ({"powersgd"} if allow == "low_rank" else set())
    assert verdict.steps <= 96
    assert any("train lossily" in text for text in results[0]["said"])


def test_only_hooks_are_tried_where_the_capacity_is_given(two_ranks: Ranks) -> None:
    results = two_ranks(tune, {"comm_hook": "auto", "bucket_cap_mb": 0.1} | NO_CACHE, steps=110)
    trials = results[0]["verdict"].trials
    assert {trial.plan for trial in trials} == {Plan(bucket_cap_mb=0.1), Plan(bucket_cap_mb=0.1, hook=HookSpec("bf16"))}


def test_a_named_hook_is_kept_and_its_capacity_tuned(two_ranks: Ranks) -> None:
    results = two_ranks(tune, {"comm_hook": "bf16"} | NO_CACHE)
    assert_ranks_equal(results)
    assert {trial.plan.hook.name for trial in results[0]["verdict"].trials} == {"bf16"}


def test_candidates_of_the_user(two_ranks: Ranks) -> None:
    results = two_ranks(tune, {"tuning": {"candidates": [0.0001, 0.07], "cache": False}})
    tried = {trial.plan.bucket_cap_mb for trial in results[0]["verdict"].trials}
    assert tried == {None, 0.0001, 0.07}


def test_too_few_gradients_are_left_alone(two_ranks: Ranks) -> None:
    result = two_ranks(train, NO_CACHE, steps=10)[0]
    assert result["verdict"].steps == 0
    assert "too few to tune" in result["verdict"].reason


def test_three_ranks_agree(three_ranks: Ranks) -> None:
    results = three_ranks(tune, NO_CACHE)
    assert_ranks_equal(results)
    assert results[0]["verdict"] == results[1]["verdict"] == results[2]["verdict"] is not None


class ComplexScale(Wide):
    """A parameter whose gradient a cast would cripple."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + (self.turn * (1 + 1j)).imag.mean()


def tune_hooks_with_complex_gradients() -> dict[str, Any]:
    messages = Messages()
    arguments = {"comm_hook": "auto", "allow": "low_rank"} | NO_CACHE
    result = train(arguments, steps=110, make_module=ComplexScale)
    messages.close()
    result["state"].pop("turn")
    return result | {"said": messages.texts}


def test_hooks_that_cannot_carry_the_gradients_are_not_tried(two_ranks: Ranks) -> None:
    results = two_ranks(tune_hooks_with_complex_gradients)
    assert_ranks_equal(results)
    assert {trial.plan.hook.name for trial in results[0]["verdict"].trials} == {"none"}
    assert any("bf16 is not tried" in text and "imaginary part" in text for text in results[0]["said"])


def test_tuning_waits_for_a_hook_to_compress(two_ranks: Ranks) -> None:
    arguments = {"comm_hook": "powersgd", "comm_hook_options": {"start_powerSGD_iter": 70}} | NO_CACHE
    results = two_ranks(tune, arguments, steps=150)
    assert_ranks_equal(results)
    verdict = results[0]["verdict"]
    assert verdict.trials
    assert verdict.steps <= 64
    assert verdict.payload_factor < 0.5
