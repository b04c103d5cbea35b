"""Re-wraps while training: by a new plan, by a new trainable set; nothing is left behind."""

import gc
import weakref
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
)
from ranks import Ranks
from scenarios import (
    Messages,
    Mlp,
    Sparse,
    assert_ranks_equal,
    check_error,
    data,
    state_of,
    train,
)
from torch import nn

from lightning_ddpopt import HookSpec, Plan


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
            storages = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_sparse
            }
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
