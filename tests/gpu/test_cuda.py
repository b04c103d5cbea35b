"""What only CUDA has: GradScaler, streams, device memory."""

import time
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from scenarios import Mlp, assert_ranks_equal, train

from lightning_ddpopt import HookSpec, Plan
from lightning_ddpopt.hooks.cast import CastHook
from lightning_ddpopt.hooks.powersgd import PowerSGDHook


class Overflowing(Mlp):
    """Rank 0's loss is so large at two steps that fp16 gradients overflow."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return loss * 1e6 if self.global_rank == 0 and self.trainer.fit_loop.total_batch_idx in (6, 11) else loss


class Scales(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(trainer.precision_plugin.scaler.get_scale())


def train_in_fp16(arguments: dict[str, Any] | None) -> dict[str, Any]:
    scales = Scales()
    return train(arguments, precision="16-mixed", make_module=Overflowing, callbacks=[scales]) | {"scales": scales.seen}


@pytest.mark.parametrize("hook", ["none", "fp16", "bf16", "powersgd"])
def test_fp16_with_loss_scaling_and_overflows(two_ranks: Ranks, hook: str) -> None:
    """Both overflows are skipped on both ranks alike, and training goes on."""
    results = two_ranks(train_in_fp16, {"comm_hook": hook, "static_graph": True, "bucket_cap_mb": 0.004})
    assert_ranks_equal(results)
    assert results[0]["scales"] == results[1]["scales"]
    assert results[0]["scales"][6] < results[0]["scales"][5]
    assert results[0]["scales"][11] < results[0]["scales"][10]
    assert all(np.isfinite(array).all() for array in results[0]["state"].values())
    stock = two_ranks(train_in_fp16, None)
    if hook == "none":
        assert_ranks_equal([results[0], stock[0]])
    assert abs(results[0]["losses"][-1] - stock[0]["losses"][-1]) < 0.2


def train_without_host_syncs(hook: str) -> dict[str, Any]:
    """Any host synchronisation inside the hook raises."""
    cls = PowerSGDHook if hook == "powersgd" else CastHook
    original = cls.reduce

    def strict(self: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, bucket)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    cls.reduce = strict  # type: ignore[method-assign]
    try:
        return train({"comm_hook": hook, "bucket_cap_mb": 0.004})
    finally:
        cls.reduce = original  # type: ignore[method-assign]


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_hooks_do_not_stop_the_host(two_ranks: Ranks, hook: str) -> None:
    assert_ranks_equal(two_ranks(train_without_host_syncs, hook))


def memory_over_re_wraps(hook: str) -> list[int]:
    used: list[int] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step in (14, 68):
                # NCCL's watchdog keeps the tensors of a collective until it next looks, a fraction of a second later.
                torch.cuda.synchronize()
                time.sleep(1)
                used.append(torch.cuda.memory_allocated())

    spec = HookSpec(hook)
    plans = {3 * n: Plan(hook=spec, bucket_cap_mb=[0.5, 2][n % 2]) for n in range(1, 21)}
    train(
        {"comm_hook": hook},
        plans=plans,
        steps=70,
        callbacks=[Watch()],
        make_module=WideMlp,
    )
    return used


class WideMlp(Mlp):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(width=1024, **arguments)


@pytest.mark.parametrize("hook", ["none", "bf16", "powersgd"])
def test_device_memory_is_flat_over_re_wraps(two_ranks: Ranks, hook: str) -> None:
    for after_4, after_20 in two_ranks(memory_over_re_wraps, hook):
        assert after_20 <= after_4 + 2**16  # one wrapper that lived on would hold 4 MiB
