"""A resumed run equals an uninterrupted one; hook state survives saving, other worlds and interruptions."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.trainer.states import TrainerStatus
from ranks import Ranks
from scenarios import (
    Messages,
    Mlp,
    assert_ranks_equal,
    data,
    state_of,
    train,
    trainer,
)

from lightning_ddpopt import DDPOptStrategy


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
    return train({"comm_hook": "powersgd"}, make_module=Tunable, callbacks=finder, enable_checkpointing=True, steps=24)


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
