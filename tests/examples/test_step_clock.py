"""The clock counts optimizer steps, and refuses to tell what it did not see."""

import time
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from scenarios import Mlp, data
from step_clock import StepClock

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: loaders without workers, torch's pytree


class Slow(Mlp):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def fit(clock: StepClock, max_steps: int, accumulate: int = 1, batches: int = 16) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    torch.manual_seed(0)
    trainer.fit(Slow(), data(batches=batches))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_each_step_takes_its_micro_batches(micro_batches: int) -> None:
    clock = StepClock(warmup_steps=2, steps=5, micro_batches=micro_batches)
    fit(clock, max_steps=9, accumulate=micro_batches, batches=27)
    steps_ms = clock.steps_ms()
    assert len(steps_ms) == 5
    assert all(20 * micro_batches <= step < 20 * micro_batches + 200 for step in steps_ms)
    assert 1 / clock.steps_per_s() >= 0.02 * micro_batches


def test_too_few_steps() -> None:
    clock = StepClock(warmup_steps=2, steps=5)
    fit(clock, max_steps=6)
    with pytest.raises(ValueError, match=r"ended after 6 steps.*measure\.warmup_steps=2 and measure\.steps=5"):
        clock.steps_ms()


def test_a_step_of_fewer_micro_batches_is_refused() -> None:
    clock = StepClock(warmup_steps=1, steps=5, micro_batches=3)
    with pytest.raises(ValueError, match="optimizer step 3 had 1 micro-batches, not 3"):
        fit(clock, max_steps=9, accumulate=3, batches=7)


@pytest.mark.parametrize(("warmup_steps", "steps"), [(0, 5), (1, 1)])
def test_counts_that_cannot_be_measured(warmup_steps: int, steps: int) -> None:
    with pytest.raises(ValueError, match=rf"measure\.warmup_steps={warmup_steps}.*measure\.steps={steps}"):
        StepClock(warmup_steps, steps)
