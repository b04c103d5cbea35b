"""The strategy through Lightning's life cycle: wraps where it should, and refuses what cannot work."""

import gc
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from ranks import RankError, Ranks
from scenarios import (
    Messages,
    Mlp,
    ReWrap,
    Sparse,
    assert_ranks_equal,
    data,
    state_of,
    train,
    trainer,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt import DDPOptStrategy, HookSpec, Plan


def evaluate(arguments: dict[str, Any]) -> list[str]:
    strategy = DDPOptStrategy(**arguments)
    module, fitter = Mlp(), trainer(strategy, limit_val_batches=2, limit_test_batches=2, limit_predict_batches=2)
    seen = []

    class Watch(L.Callback):
        def look(self, trainer: L.Trainer, *args: Any) -> None:
            hooks = [p for p in module.parameters() if p._post_accumulate_grad_hooks or p._backward_hooks]
            seen.append(f"{type(trainer.strategy.model).__name__} {len(hooks)}")

        on_validation_batch_start = on_test_batch_start = on_predict_batch_start = look

    fitter.callbacks.append(Watch())
    fitter.validate(module, data(), verbose=False)
    fitter.test(module, data(), verbose=False)
    fitter.predict(module, data())
    alive = [o for o in gc.get_objects() if isinstance(o, DistributedDataParallel)]
    return [*seen, f"{len(alive)} wrappers"]


def test_validate_test_and_predict_wrap_nothing(two_ranks: Ranks) -> None:
    for seen in two_ranks(evaluate, {"comm_hook": "bf16", "static_graph": True}):
        assert seen == ["Mlp 0"] * 6 + ["0 wrappers"]


def fit_and_validate() -> dict[str, Any]:
    fitter = trainer(DDPOptStrategy(static_graph=True), max_steps=10, val_check_interval=4, limit_val_batches=2)
    module = Mlp()
    fitter.fit(module, data(), data())
    fitter.validate(module, data(), verbose=False)
    assert fitter.strategy.model is module
    fitter.fit_loop.epoch_loop.max_steps = 20
    fitter.fit(module, data(), data())
    return {"state": state_of(module)}


def test_fit_validate_fit_equals_stock(two_ranks: Ranks) -> None:
    ours, theirs = two_ranks(fit_and_validate), two_ranks(train, None, steps=10, fits=2)
    for our, their in zip(ours, theirs, strict=True):
        for name, array in their["state"].items():
            if "running" not in name:
                np.testing.assert_array_equal(our["state"][name], array, err_msg=name)


def fit_alone(kind: str, manual: str | None) -> dict[str, Any]:
    messages = Messages()
    arguments = {"static_graph": True, "comm_hook": "bf16"}
    strategy = DDPOptStrategy(**arguments) if kind == "ours" else SingleDeviceStrategy(torch.device("cpu"))
    module = Mlp() if manual is None else Mlp(accumulate=2, blocks_sync=manual == "no_sync")
    fitter = trainer(
        strategy,
        max_steps=20,
        accumulate_grad_batches=3 if manual is None else 1,
        callbacks=[ReWrap({4: Plan(static_graph=True)})],
    )
    wrapped = []
    fitter.callbacks.append(
        L.pytorch.callbacks.LambdaCallback(on_train_batch_start=lambda t, *a: wrapped.append(type(t.strategy.model)))
    )
    fitter.fit(module, data())
    messages.close()
    return {"state": state_of(module), "wrapped": set(wrapped), "said": messages.texts}


@pytest.mark.parametrize("manual", [None, "sync", "no_sync"])
def test_one_process_is_not_wrapped(one_rank: Ranks, manual: str | None) -> None:
    ours, alone = one_rank(fit_alone, "ours", manual)[0], one_rank(fit_alone, "single", manual)[0]
    assert ours["wrapped"] == {Mlp}
    for name, array in alone["state"].items():
        np.testing.assert_array_equal(ours["state"][name], array, err_msg=name)
    assert "world size 1: the module is not wrapped" in ours["said"][0]
    assert "bf16" in ours["said"][0]


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def fit_error(arguments: dict[str, Any], make: type[Mlp]) -> str:
    strategy = DDPOptStrategy(**arguments)
    try:
        trainer(strategy, max_steps=2).fit(make(), data())
    except ValueError as error:
        return f"{error} / wrapped: {isinstance(strategy.model, DistributedDataParallel)}"
    return "no error"


def test_what_only_the_model_shows_is_refused_before_the_wrap(two_ranks: Ranks) -> None:
    for message in two_ranks(fit_error, {"comm_hook": "powersgd"}, Sparse):
        assert "comm_hook='powersgd' cannot carry the sparse gradients of 'table'" in message
        assert message.endswith("wrapped: False")
    for message in two_ranks(fit_error, {}, Frozen):
        assert "Frozen has no parameter that requires a gradient" in message
        assert message.endswith("wrapped: False")
    assert two_ranks(fit_error, {}, Mlp) == ["no error"] * 2  # and nothing is left over from the refusals


def say_static_and_unused() -> list[str]:
    messages = Messages()
    train({"static_graph": True, "find_unused_parameters": True}, steps=3)
    messages.close()
    return messages.texts


def test_static_graph_with_find_unused_parameters_is_explained_and_allowed(two_ranks: Ranks) -> None:
    said = two_ranks(say_static_and_unused)
    assert any("find_unused_parameters=True changes nothing" in text for text in said[0])
    assert said[1] == [], "only rank zero speaks"


class Unused(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_static_graph_trains_with_unused_parameters(two_ranks: Ranks, accumulate: int) -> None:
    static = two_ranks(train, {"static_graph": True}, make_module=Unused, accumulate=accumulate)
    dynamic = two_ranks(train, {"find_unused_parameters": True}, make_module=Unused, accumulate=accumulate)
    assert_ranks_equal(static)
    for name, array in dynamic[0]["state"].items():
        np.testing.assert_array_equal(static[0]["state"][name], array, err_msg=name)


def say_disabled(monkey: bool) -> tuple[list[str], dict[str, Any]]:
    import os

    os.environ["DDPOPT_DISABLE"] = "1"
    messages = Messages()
    try:
        fitter = trainer(DDPOptStrategy(static_graph=True, bucket_cap_mb=0.001, comm_hook="bf16"), max_steps=20)
        module, wrappers = Mlp(), []
        fitter.callbacks.append(
            L.pytorch.callbacks.LambdaCallback(on_train_batch_start=lambda t, *a: wrappers.append(t.strategy.model))
        )
        fitter.fit(module, data())
        ddp = wrappers[0]
        settings = (ddp.static_graph, ddp.gradient_as_bucket_view, ddp.bucket_bytes_cap_default)
        return messages.texts, {"state": state_of(module), "settings": settings}
    finally:
        messages.close()
        del os.environ["DDPOPT_DISABLE"]


def test_disabled_is_stock_ddp_with_stock_settings(two_ranks: Ranks) -> None:
    ours, stock = two_ranks(say_disabled, True), two_ranks(train, None)
    for (said, result), expected in zip(ours, stock, strict=True):
        assert result["settings"] == (False, False, True)
        for name, array in expected["state"].items():
            np.testing.assert_array_equal(result["state"][name], array, err_msg=name)
        assert len(said) <= 1
    assert "DDPOPT_DISABLE is set" in ours[0][0][0]


@pytest.mark.parametrize("hook", ["none", "bf16", "powersgd"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(two_ranks: Ranks, hook: str, precision: str) -> None:
    arguments = {"comm_hook": hook, "static_graph": True, "bucket_cap_mb": 0.002}
    results = two_ranks(train, arguments, precision=precision)
    assert_ranks_equal(results)
    stock = two_ranks(train, None, precision=precision)[0]
    if hook == "none":
        assert_ranks_equal([results[0], stock])
    assert abs(results[0]["losses"][-1] - stock["losses"][-1]) < 0.2


def scales_in_hook() -> list[tuple[float, float]]:
    seen = []

    class Look(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
            seen.append((float(trainer.strategy._hook.loss_scale), trainer.precision_plugin.scaler.get_scale()))

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    train({"comm_hook": "powersgd"}, callbacks=[Look()], steps=8, plugins=[precision])
    return seen


def test_hooks_are_told_the_loss_scale(two_ranks: Ranks) -> None:
    for seen in two_ranks(scales_in_hook):
        assert len({scale for scale, _ in seen}) > 1
        assert all(told == scale for told, scale in seen)


def change_to_unknown_callable() -> str:
    strategy = DDPOptStrategy()
    try:
        strategy.change_plan(Plan(hook=HookSpec("custom", {"callable": "f"})))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_plan_with_a_callable_that_was_not_given_is_refused() -> None:
    assert "was not given the callable 'f'" in change_to_unknown_callable()


def hang() -> None:
    if dist.get_rank() == 0:
        raise KeyError("rank 0 left")
    dist.barrier()


def test_the_harness_reports_a_failing_rank() -> None:
    ranks = Ranks(2)
    with pytest.raises(RankError, match="rank 0 left"):
        ranks(hang)
    assert ranks(dist.get_rank) == [0, 1]
    ranks.close()
