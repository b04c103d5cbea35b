"""The live figure against communication whose exposed time is known."""

import gc
import statistics
import time
import weakref
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from ranks import Ranks
from scenarios import Messages, Mlp, ReWrap, data, state_of, trainer

from lightning_ddpopt import DDPOptStrategy, OverlapMonitor, Plan


def wait_for_gradients(seconds: float, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook whose reduction of the last bucket takes long after it is started."""
    if bucket.is_last():
        time.sleep(seconds)
    tensor = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])


def monitored(arguments: dict[str, Any] | None, watch: bool = True, plans: Any = None, **more: Any) -> dict[str, Any]:
    monitor, messages, module = OverlapMonitor(), Messages(), Mlp(**more.pop("module", {}))
    strategy = DDPStrategy() if arguments is None else DDPOptStrategy(**arguments)
    fitter = trainer(
        strategy, callbacks=[ReWrap(plans or {}), *([monitor] if watch else [])], **({"max_steps": 12} | more)
    )
    try:
        fitter.fit(module, data())
        return {"ms": monitor.exposed_ms, "state": state_of(module), "said": messages.texts, "handle": monitor._handle}
    finally:
        messages.close()


@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_it_sees_the_exposed_tail(two_ranks: Ranks, seconds: float) -> None:
    arguments = {"comm_hook": wait_for_gradients, "comm_hook_options": {"state": seconds}, "bucket_cap_mb": 0.01}
    for result in two_ranks(monitored, arguments):
        assert 8 <= len(result["ms"]) <= 10, "all steps but those in which DDP has not told its buckets"
        assert sorted(result["ms"])[4] >= 1000 * seconds
        assert sorted(result["ms"])[4] < 1000 * seconds + 20
        assert result["handle"] is None


def test_it_says_the_median(two_ranks: Ranks) -> None:
    first, second = two_ranks(monitored, {})
    median = statistics.median(first["ms"])
    (said,) = [text for text in first["said"] if "exposed communication" in text]
    assert float(said.split(": ")[-1].split(" ms")[0]) == round(median, 2)
    assert not [text for text in second["said"] if "exposed communication" in text]


@pytest.mark.parametrize("arguments", [None, {"bucket_cap_mb": 0.01, "static_graph": True}])
def test_it_changes_no_bit(two_ranks: Ranks, arguments: dict[str, Any] | None) -> None:
    for one, other in zip(two_ranks(monitored, arguments), two_ranks(monitored, arguments, False), strict=True):
        assert all((array == other["state"][name]).all() for name, array in one["state"].items())


def test_it_follows_a_re_wrap(two_ranks: Ranks) -> None:
    for result in two_ranks(monitored, {}, plans={6: Plan(bucket_cap_mb=0.01)}):
        assert 12 - 8 <= len(result["ms"]) <= 12 - 4


def test_only_backwards_that_reduce_are_counted(two_ranks: Ranks) -> None:
    for result in two_ranks(monitored, {}, accumulate_grad_batches=3):  # 32 backwards, 12 of which reduce
        assert 8 <= len(result["ms"]) <= 12


def logged(folder: str) -> list[tuple[int, float]]:
    logger = CSVLogger(folder)
    found: list[tuple[int, float]] = []
    log_metrics = logger.log_metrics
    logger.log_metrics = lambda metrics, step: (
        found.append((step, metrics.get("ddpopt/exposed_ms"))),
        log_metrics(metrics, step),
    )  # type: ignore[method-assign]
    fitter = trainer(DDPOptStrategy(), callbacks=[OverlapMonitor()], logger=logger, log_every_n_steps=5, max_steps=16)
    fitter.fit(Mlp(), data())
    return [(step, value) for step, value in found if value is not None]


def test_it_logs_every_few_steps(two_ranks: Ranks, tmp_path: Any) -> None:
    first, second = two_ranks(logged, str(tmp_path))
    assert [step for step, _ in first] == [5, 10, 15]
    assert all(value > 0 for _, value in first)
    assert second == []


class SeesWrappers(L.Callback):
    def __init__(self) -> None:
        self.seen: list[weakref.ref[Any]] = []
        self.alive: set[int] = set()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if not any(wrapper() is trainer.strategy.model for wrapper in self.seen):
            self.seen.append(weakref.ref(trainer.strategy.model))
        gc.collect()
        self.alive.add(sum(wrapper() is not None for wrapper in self.seen))


def live_wrappers() -> tuple[int, set[int]]:
    plans, sees = {batch: Plan(bucket_cap_mb=batch / 1000) for batch in (5, 10, 15)}, SeesWrappers()
    fitter = trainer(DDPOptStrategy(), max_steps=16, callbacks=[ReWrap(plans), OverlapMonitor(), sees])
    fitter.fit(Mlp(), data())
    return len(sees.seen), sees.alive


def test_it_keeps_no_earlier_wrapper_alive(two_ranks: Ranks) -> None:
    assert two_ranks(live_wrappers) == 2 * [(4, {1})]


def test_without_ddp_it_says_so(one_rank: Ranks) -> None:
    (result,) = one_rank(monitored, {})
    assert result["ms"] == []
    assert "OverlapMonitor: nothing is wrapped in DDP" in " ".join(result["said"])
