"""The strategy through Lightning's life cycle: wraps where it should, and leaves nothing behind."""

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from ranks import RankError, Ranks
from scenarios import Mlp, ReWrap, data, state_of, train, trainer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt import DDPOptStrategy, HookSpec, Plan


class Messages(logging.Handler):
    """Collects what the package says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("lightning_ddpopt").addHandler(self)
        logging.getLogger("lightning_ddpopt").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("lightning_ddpopt").removeHandler(self)
        super().close()


def assert_ranks_equal(results: list[dict[str, Any]], what: str = "state") -> None:
    for other in results[1:]:
        for name, array in results[0][what].items():
            if "running" not in name:  # a batch norm sees its own rank's batches
                np.testing.assert_array_equal(array, other[what][name], err_msg=name)


# ---------------------------------------------------------------------------------------------- what is wrapped when


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


# ---------------------------------------------------------------------------------------------- what is refused late


class Sparse(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 3, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.table(batch[1] % 3).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


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


def say_auto(fits: int) -> list[str]:
    messages = Messages()
    train({}, steps=2, fits=fits)
    messages.close()
    return messages.texts


def test_auto_says_once_that_it_is_torchs_default(two_ranks: Ranks) -> None:
    said = two_ranks(say_auto, 2)[0]
    assert len([text for text in said if "bucket_cap_mb='auto' is torch's default" in text]) == 1


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


# ---------------------------------------------------------------------------------------------- re-wraps


def re_wrap_often() -> dict[str, Any]:
    """20 re-wraps; which wrappers live, and how many bytes of tensors, after each."""
    wrappers, alive, tensor_bytes = [], [], []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            model = trainer.strategy.model
            if not wrappers or wrappers[-1]() is not model:
                wrappers.append(weakref.ref(model))
            del model
            alive.append(sum(reference() is not None for reference in wrappers))
            tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_sparse}
            tensor_bytes.append(sum(storages.values()))

    caps = [0.001, 0.004]
    plans = {2 * step: Plan(bucket_cap_mb=caps[step % 2], static_graph=step % 3 == 0) for step in range(1, 21)}
    gc.disable()  # a wrapper must go without the help of the cycle collector
    try:
        result = train({}, plans=plans, steps=50, callbacks=[Watch()])
    finally:
        gc.enable()
    return result | {"alive": alive, "wrappers": len(wrappers), "tensor bytes": tensor_bytes}


def test_re_wraps_leave_no_wrapper_and_no_memory_behind(two_ranks: Ranks) -> None:
    for result in two_ranks(re_wrap_often):
        assert result["wrappers"] == 21
        assert set(result["alive"]) == {1}
        after_first, after_last = result["tensor bytes"][3], result["tensor bytes"][-1]
        assert after_last <= after_first
    stock = two_ranks(train, None, steps=50)[0]
    for name, array in stock["state"].items():
        np.testing.assert_array_equal(result["state"][name], array, err_msg=name) if "running" not in name else None


class Unfreezing(Mlp):
    """Its first layers are frozen at the start."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.net[:4].requires_grad_(False)


class UnfreezeAt(L.Callback):
    def __init__(self, batch: int, rank: int | None = None) -> None:
        self.batch, self.rank = batch, rank

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch and self.rank in (None, trainer.global_rank):
            module.net[:4].requires_grad_(True)


def unfreeze(arguments: dict[str, Any], **mode: Any) -> dict[str, Any]:
    messages = Messages()
    result = train(arguments, make_module=Unfreezing, callbacks=[UnfreezeAt(7)], **mode)
    messages.close()
    return result | {"said": messages.texts}


def unfreeze_in_plain_torch(accumulate: int, steps: int) -> dict[str, Any]:
    """The same training with gradients averaged by hand: what DDP should come to, bit for bit with two ranks."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    module = Unfreezing().to(device)
    optimizer = module.configure_optimizers()
    loader, batch = [[tensor.to(device) for tensor in tensors] for tensors in data()], 0
    while steps:
        for position, (inputs, labels) in enumerate(loader):
            if batch == 7:
                module.net[:4].requires_grad_(True)
            loss = nn.functional.cross_entropy(module.net(inputs), labels)
            (loss / accumulate).backward()
            batch += 1
            if (position + 1) % accumulate and position + 1 < len(loader):
                continue
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad /= dist.get_world_size()
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            steps -= 1
            if not steps:
                break
    return {"state": state_of(module)}


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_unfrozen_layers_are_reduced(two_ranks: Ranks, static: bool, accumulate: int) -> None:
    ours = two_ranks(unfreeze, {"static_graph": static, "bucket_cap_mb": 0.004}, accumulate=accumulate)
    assert_ranks_equal(ours)
    for rank, result in enumerate(ours):  # if one rank alone did it, the others would wait: that rank must say why
        assert any(f"rank {rank}: requires_grad changed of 'net.0.weight'" in text for text in result["said"])
    assert any("re-wrapped for 'net.0.weight'" in text for text in ours[0]["said"])
    expected = two_ranks(unfreeze_in_plain_torch, accumulate, 20)
    for name, array in expected[0]["state"].items():
        if "running" not in name and "tracked" not in name:
            np.testing.assert_array_equal(ours[0]["state"][name], array, err_msg=name)


@pytest.mark.parametrize("manual", ["sync", "no_sync"])
@pytest.mark.parametrize("static", [True, False])
def test_unfrozen_layers_are_reduced_in_manual_optimisation(two_ranks: Ranks, static: bool, manual: str) -> None:
    ours = two_ranks(unfreeze, {"static_graph": static}, accumulate=2, manual=manual)
    assert_ranks_equal(ours)
    dynamic = two_ranks(unfreeze, {}, accumulate=2, manual=manual)
    assert_ranks_equal([ours[0], dynamic[0]])


class Finetuned(Mlp):
    """What BackboneFinetuning wants."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.backbone = self.net[:4]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def finetune(hook: str) -> dict[str, Any]:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01)
    return train({"comm_hook": hook}, make_module=Finetuned, callbacks=[callback], steps=40)


@pytest.mark.parametrize("hook", ["none", "powersgd"])
def test_backbone_finetuning_keeps_the_ranks_equal(two_ranks: Ranks, hook: str) -> None:
    results = two_ranks(finetune, hook)
    assert_ranks_equal(results)
    untouched = state_of(Finetuned())
    assert (results[0]["state"]["net.0.weight"] != untouched["net.0.weight"]).any(), "it was unfrozen"


def unfreeze_on_one_rank() -> str:
    try:
        train({}, make_module=Unfreezing, callbacks=[FreezeDifferently(7)])
    except RuntimeError as error:
        return str(error)
    return "no error"


class FreezeDifferently(UnfreezeAt):
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            module.net[trainer.global_rank * 3].requires_grad_(True)


def test_ranks_that_unfreeze_different_layers_are_told(two_ranks: Ranks) -> None:
    for rank, message in enumerate(two_ranks(unfreeze_on_one_rank)):
        assert "The ranks do not train the same parameters any more" in message
        assert f"on rank {rank} 'net.{3 * rank}.weight'" in message


def accumulate_on_schedule(arguments: dict[str, Any] | None) -> dict[str, Any]:
    return train(arguments, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})], steps=30)


def test_a_schedule_of_accumulation_equals_stock(two_ranks: Ranks) -> None:
    ours, stock = two_ranks(accumulate_on_schedule, {"static_graph": True}), two_ranks(accumulate_on_schedule, None)
    for our, their in zip(ours, stock, strict=True):
        for name, array in their["state"].items():
            np.testing.assert_array_equal(our["state"][name], array, err_msg=name)


class UnfreezesInStep(Unfreezing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 8:
            self.net[:4].requires_grad_(True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("mode", [{}, {"manual": "sync"}])
@pytest.mark.parametrize("static", [True, False])
def test_unfreezing_inside_training_step_is_refused(two_ranks: Ranks, static: bool, mode: dict[str, Any]) -> None:
    """No wrapper could reduce those gradients: without a word the ranks would drift apart."""
    for message in two_ranks(check_error, {"static_graph": static}, UnfreezesInStep, **mode):
        assert "requires_grad of 'net.0.weight'" in message
        assert "changed inside training_step" in message
        assert "on_train_batch_start or earlier" in message


class FreezeAt(L.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            module.net[:4].requires_grad_(False)


@pytest.mark.parametrize("find", [True, False])
@pytest.mark.parametrize("batch", [6, 7, 8])
def test_layers_frozen_within_an_accumulation_window(two_ranks: Ranks, batch: int, find: bool) -> None:
    """What earlier micro-batches of the window left in their gradients is averaged."""
    arguments = {"find_unused_parameters": find}
    results = two_ranks(train, arguments, accumulate=3, callbacks=[FreezeAt(batch)])
    assert_ranks_equal(results)


class UsedByTurns(Mlp):
    """Every other micro-batch uses one more layer."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.extra = nn.Linear(16, 16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        return super().training_step([self.extra(inputs) if batch_idx % 2 == 0 else inputs, labels], batch_idx)


@pytest.mark.parametrize("view", [True, False])
def test_a_re_wrap_does_not_forget_which_parameters_a_window_used(two_ranks: Ranks, view: bool) -> None:
    arguments = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    plans = {7: Plan(gradient_as_bucket_view=view, bucket_cap_mb=0.004)}
    ours = two_ranks(train, arguments, make_module=UsedByTurns, accumulate=2, plans=plans)
    plain = two_ranks(train, arguments, make_module=UsedByTurns, accumulate=2)
    assert_ranks_equal([*ours, *plain])


class SkipsAnEpoch(Mlp):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


@pytest.mark.parametrize("static", [True, False])
def test_a_skipped_epoch_after_the_wrap(two_ranks: Ranks, static: bool) -> None:
    """The static wrap is made for a micro-batch that then does not run; the next one does not synchronise."""
    ours = two_ranks(train, {"static_graph": static}, make_module=SkipsAnEpoch, accumulate=3)
    stock = two_ranks(train, None, make_module=SkipsAnEpoch, accumulate=3)
    assert_ranks_equal([*ours, *stock])


class RootScale(Mlp):
    """A parameter of the root module that DDP is asked to ignore, by the name that DDP knows it by."""

    _ddp_params_and_buffers_to_ignore = (".scale", "net.5.bias")

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0] * self.scale + self.empty.sum(), batch[1]], batch_idx)


@pytest.mark.parametrize("hook", ["none", "bf16", "powersgd"])
def test_ignored_and_empty_parameters(two_ranks: Ranks, hook: str) -> None:
    first, second = two_ranks(train, {"comm_hook": hook}, make_module=RootScale)
    differ = {name for name, array in first["state"].items() if (array != second["state"][name]).any()}
    assert {name for name in differ if "running" not in name} == {"scale", "net.5.bias"}


def state_in_second_fit() -> list[Any]:
    seen = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                seen.append((dict(trainer.strategy._hook.state_dict()["steps"]), trainer.strategy.layout))

    train({"comm_hook": "powersgd"}, steps=6, fits=2, callbacks=[Look()])
    return seen


def test_a_second_fit_starts_with_fresh_hook_state(two_ranks: Ranks) -> None:
    for seen in two_ranks(state_in_second_fit):
        for steps, layout in (seen[0], seen[-1]):
            assert set(steps.values()) == {1}
            assert layout is None


def change_plan_errors() -> list[str]:
    errors = []

    class Change(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                for plan in ("bf16", None, Plan(hook=HookSpec("powersgd"))):
                    try:
                        trainer.strategy.change_plan(plan)
                    except ValueError as error:
                        errors.append(str(error))

    train({}, make_module=Sparse, callbacks=[Change()], steps=6)
    return errors


def test_change_plan_refuses_what_the_constructor_or_the_wrap_would(two_ranks: Ranks) -> None:
    for errors in two_ranks(change_plan_errors):
        assert len(errors) == 3
        assert "change_plan takes a Plan, not 'bf16'" in errors[0]
        assert "cannot carry the sparse gradients of 'table'" in errors[2]


def train_with_unlike_plans(at: int | None) -> str:
    plan = Plan(bucket_cap_mb=[0.001, 0.01][dist.get_rank()])
    try:
        train({}, plans={at: plan}) if at is not None else train({"plan": plan})
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("at", [None, 5])
def test_ranks_with_different_plans_are_told(two_ranks: Ranks, at: int | None) -> None:
    for cap, message in zip(("0.001", "0.01"), two_ranks(train_with_unlike_plans, at), strict=True):
        assert "The ranks have different plans" in message
        assert f"bucket capacity {cap} MiB" in message
    assert_ranks_equal(two_ranks(train, {}))


# ---------------------------------------------------------------------------------------------- manual optimisation


class TwoBackwards(Mlp):
    """Several backwards in one training_step; all of them, or only the last, synchronise."""

    def __init__(self, sync_all: bool) -> None:
        super().__init__(accumulate=1)
        self.sync_all = sync_all

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        for part in range(2):
            loss = nn.functional.cross_entropy(self.net(inputs[part::2]), labels[part::2]) / 2
            if part == 0 and not self.sync_all:
                with self.trainer.strategy.block_backward_sync():
                    self.manual_backward(loss)
            else:
                self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


def two_backwards(arguments: dict[str, Any] | None, sync_all: bool, fits: int) -> dict[str, Any]:
    strategy = DDPStrategy() if arguments is None else DDPOptStrategy(**arguments)
    module, fitter = TwoBackwards(sync_all), trainer(strategy)
    for fit in range(1, fits + 1):
        fitter.fit_loop.epoch_loop.max_steps = 20 // fits * fit
        fitter.fit(module, data())
    return {"state": state_of(module)}


@pytest.mark.parametrize("fits", [1, 2])
@pytest.mark.parametrize("sync_all", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_several_backwards_in_a_step_equal_stock(two_ranks: Ranks, static: bool, sync_all: bool, fits: int) -> None:
    """Stock DDP with a static graph leaves the second backward of the first step unreduced, without a word."""
    ours = two_ranks(two_backwards, {"static_graph": static, "bucket_cap_mb": 0.004}, sync_all, fits)
    stock = two_ranks(two_backwards, None, sync_all, fits)
    for our, their in zip(ours, stock, strict=True):
        for name, array in their["state"].items():
            np.testing.assert_array_equal(our["state"][name], array, err_msg=name)


class Adversaries(L.LightningModule):
    """Two optimizers that take turns, as a GAN's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.one, self.other = nn.Linear(16, 4), nn.Linear(4, 4)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(self.other(self.one(inputs)), labels)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(m.parameters(), lr=0.05) for m in (self.one, self.other)]


def play(arguments: dict[str, Any] | None) -> dict[str, Any]:
    find = {"find_unused_parameters": True}
    strategy = DDPStrategy(**find) if arguments is None else DDPOptStrategy(**arguments, **find)
    messages, module = Messages(), Adversaries()
    trainer(strategy, max_steps=20).fit(module, data())
    messages.close()
    return {"state": state_of(module), "said": messages.texts}


@pytest.mark.parametrize("static", [True, False])
def test_toggled_optimizers_equal_stock(two_ranks: Ranks, static: bool) -> None:
    ours, stock = two_ranks(play, {"static_graph": static}), two_ranks(play, None)
    assert_ranks_equal([*ours, *stock])
    told = [text for text in ours[0]["said"] if "static_graph=True has no effect while training_step switches" in text]
    assert len(told) == static


# ---------------------------------------------------------------------------------------------- the gradient check


class Spoiled(Mlp):
    """On rank 1 something adds to one gradient after the reduction, at one step."""

    at = 1

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self.global_rank == 1 and self.trainer.global_step == self.at:
            self.net[3].weight.grad[0, 0] += 1e-3


class SpoiledLater(Spoiled):
    at = 10


def check_error(arguments: dict[str, Any], make: type[Mlp], plans: dict[int, Plan] | None = None, **mode: Any) -> str:
    try:
        train(arguments, make_module=make, plans=plans, **mode)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("mode", [{}, {"accumulate": 2}, {"accumulate": 2, "manual": "no_sync"}])
@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}, {"comm_hook": "bf16"}])
def test_unequal_gradients_raise_with_the_parameters_name(
    two_ranks: Ranks, arguments: dict[str, Any], mode: dict[str, Any]
) -> None:
    for message in two_ranks(check_error, arguments, Spoiled, **mode):
        assert "the gradients of 'net.3.weight' are not the same on all ranks" in message
        assert "gradient_check_steps=0" in message
    assert two_ranks(check_error, arguments | {"gradient_check_steps": 0}, Spoiled, **mode) == ["no error"] * 2


def test_the_check_runs_again_after_every_wrap(two_ranks: Ranks) -> None:
    assert two_ranks(check_error, {}, SpoiledLater) == ["no error"] * 2
    re_wrapped = two_ranks(check_error, {}, SpoiledLater, {9: Plan(bucket_cap_mb=0.004)})
    assert all("'net.3.weight'" in message and "step 2 after the wrap" in message for message in re_wrapped)


# ---------------------------------------------------------------------------------------------- hooks of the user's


class Calls:
    def __init__(self, extra: float = 0.0) -> None:
        self.count, self.extra = 0, extra


def counting_hook(state: Calls, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    state.count += 1
    bucket.buffer().add_(state.extra * dist.get_rank())
    if state.extra:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def train_counting(how: str, extra: float = 0.0) -> dict[str, Any]:
    calls, messages = Calls(extra), Messages()
    arguments = {
        "ours": {"comm_hook": counting_hook, "comm_hook_options": {"state": calls}},
        "lightning's": {"ddp_comm_hook": counting_hook, "ddp_comm_state": calls},
        "wrapped": {
            "ddp_comm_hook": counting_hook,
            "ddp_comm_state": calls,
            "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper,
        },
    }[how]
    result = train(arguments | {"bucket_cap_mb": 0.004})
    messages.close()
    return {"calls": calls.count, "said": messages.texts, **result}


@pytest.mark.parametrize("how", ["ours", "lightning's", "wrapped"])
def test_callable_hooks_run(two_ranks: Ranks, how: str) -> None:
    results, stock = two_ranks(train_counting, how), two_ranks(train, None)
    buckets = len(results[0]["layout"].bucket_bytes)
    assert buckets > 1
    assert [result["calls"] for result in results] == [1 + 19 * buckets] * 2  # the first step knows but one bucket
    assert_ranks_equal(results)
    same = all((results[0]["state"][n] == a).all() for n, a in stock[0]["state"].items())
    assert same == (how != "wrapped")
    assert results[0]["bytes"] is None


def test_a_callable_hook_that_means_to_leave_ranks_unequal_is_only_warned_about(two_ranks: Ranks) -> None:
    results = two_ranks(train_counting, "ours", 0.1)
    told = [text for text in results[0]["said"] if "are not the same on all ranks" in text]
    assert len(told) >= 1
    assert "set gradient_check_steps=0" in told[0]


@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook", "allreduce_hook"])
def test_torchs_own_hooks_run_on_the_cpu_too(two_ranks: Ranks, name: str) -> None:
    hook = getattr(default_hooks, name)
    results = two_ranks(train, {"ddp_comm_hook": hook, "bucket_cap_mb": 0.004})
    assert_ranks_equal(results)


def train_with_local_sgd(period: int) -> dict[str, Any]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    state = PostLocalSGDState(None, groups[dist.get_rank()], start_localSGD_iter=4)
    arguments = {"ddp_comm_hook": post_localSGD_hook, "ddp_comm_state": state, "model_averaging_period": period}
    return train(arguments)


def test_post_local_sgd_averages_on_the_cpu_too(two_ranks: Ranks) -> None:
    assert_ranks_equal(two_ranks(train_with_local_sgd, 5))
    apart = two_ranks(train_with_local_sgd, 7)  # 20 steps do not end with an averaging
    with pytest.raises(AssertionError):
        assert_ranks_equal(apart)


# ---------------------------------------------------------------------------------------------- checkpoints


def saver(folder: str) -> ModelCheckpoint:
    # Saving averages the residuals, so an equal run must save at equal steps. A save at an epoch's end must come from
    # `every_n_train_steps`: one from `save_on_train_epoch_end` resumes with one batch too many (lightning 2.6.6).
    return ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=8)


def train_to_checkpoints(arguments: dict[str, Any], folder: str, steps: int, **mode: Any) -> dict[str, Any]:
    return train(arguments, steps=steps, callbacks=[saver(folder)], enable_checkpointing=True, **mode)


def resume(
    arguments: dict[str, Any], checkpoint: str, manual: str | None = None, accumulate: int = 1
) -> dict[str, Any]:
    strategy = DDPOptStrategy(**arguments)
    module = Mlp() if manual is None else Mlp(accumulate=accumulate, blocks_sync=manual == "no_sync")
    torch.nn.init.zeros_(module.net[0].weight)  # all must come from the file
    again, messages = saver(str(Path(checkpoint).parent / "resumed")), Messages()
    fitter = trainer(strategy, max_steps=48, callbacks=[again], enable_checkpointing=True)
    fitter.fit(module, data(), ckpt_path=checkpoint)
    messages.close()
    return {"state": state_of(module), "steps": fitter.global_step, "said": messages.texts}


@pytest.mark.parametrize("mode", [{}, {"accumulate": 2, "manual": "no_sync"}], ids=["automatic", "manual"])
@pytest.mark.parametrize("hook", ["none", "bf16", "powersgd"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    two_ranks: Ranks, tmp_path: Path, hook: str, mode: dict[str, Any]
) -> None:
    arguments = {"comm_hook": hook, "static_graph": True, "bucket_cap_mb": 0.004}
    whole = two_ranks(train_to_checkpoints, arguments, str(tmp_path), 48, **mode)
    resumed = two_ranks(resume, arguments, str(tmp_path / "step=32.ckpt"), **mode)
    for one, other in zip(whole, resumed, strict=True):
        assert one["steps"] == other["steps"] == 48
        for name, array in one["state"].items():
            if "running" not in name:
                np.testing.assert_array_equal(array, other["state"][name], err_msg=name)
    if hook == "powersgd":
        checkpoint = torch.load(tmp_path / "step=32.ckpt", weights_only=True)
        assert checkpoint["ddpopt"]["plan"]["hook"]["name"] == "powersgd"
        assert checkpoint["ddpopt"]["hook_state"]["residuals"]["net.3.weight"].abs().max() > 0


def test_a_checkpoint_fits_another_world_size_and_hook(
    two_ranks: Ranks, three_ranks: Ranks, one_rank: Ranks, tmp_path: Path
) -> None:
    arguments = {"comm_hook": "powersgd", "static_graph": True}
    two_ranks(train_to_checkpoints, arguments, str(tmp_path), 16)
    path = str(tmp_path / "step=16.ckpt")
    rank_4 = arguments | {"comm_hook_options": {"matrix_approximation_rank": 4}}
    for ranks, other in ((three_ranks, arguments), (one_rank, arguments), (two_ranks, rank_4), (two_ranks, {})):
        results = ranks(resume, other, path)
        assert results[0]["steps"] == 48
        assert_ranks_equal(results)
        unused = [text for text in results[0]["said"] if "the checkpoint's state of hook" in text]
        assert len(unused) == (other is not arguments)


def train_beside_lr_finder(find: bool, folder: str) -> dict[str, Any]:
    import os

    os.chdir(folder)  # the finder keeps its checkpoint in the working directory
    finder = [LearningRateFinder(num_training_steps=12, update_attr=False)] if find else []
    return train(
        {"comm_hook": "powersgd"}, make_module=Tunable, callbacks=finder, enable_checkpointing=True, steps=24
    )


class Tunable(Mlp):
    lr = 0.05


def test_the_learning_rate_finder_leaves_no_trace_in_hook_state(two_ranks: Ranks, tmp_path: Path) -> None:
    """It saves, trains up to absurd rates, and restores in the middle of the fit."""
    found = two_ranks(train_beside_lr_finder, True, str(tmp_path))
    plain = two_ranks(train_beside_lr_finder, False, str(tmp_path))
    for one, other in zip(found, plain, strict=True):
        for name, array in other["state"].items():
            if "running" not in name and "tracked" not in name:
                np.testing.assert_array_equal(one["state"][name], array, err_msg=name)


def save_alone_when_interrupted(folder: str) -> list[str]:
    """Rank 0 comes to save alone, as after an exception there: no collective may wait for the other."""
    path, said = f"{folder}/alone.ckpt", []

    class SaveAlone(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6 and trainer.global_rank == 0:
                messages = Messages()
                trainer.state.status = TrainerStatus.INTERRUPTED
                trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), path)
                trainer.state.status = TrainerStatus.RUNNING
                said.extend(messages.texts)
                messages.close()

    train({"comm_hook": "powersgd"}, callbacks=[SaveAlone()])
    return said


def test_an_interrupted_rank_saves_alone(two_ranks: Ranks, tmp_path: Path) -> None:
    said, _ = two_ranks(save_alone_when_interrupted, str(tmp_path))
    assert "holds no compression residuals" in said[0]
    state = torch.load(tmp_path / "alone.ckpt", weights_only=True)["ddpopt"]["hook_state"]
    assert state["residuals"] == {}
    assert state["right_factors"]
    results = two_ranks(resume, {"comm_hook": "powersgd"}, str(tmp_path / "alone.ckpt"))
    assert_ranks_equal(results)


# ---------------------------------------------------------------------------------------------- precision, plans


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
