"""Verdicts outlive their tuning: in the cache, in checkpoints, in files, in a second fit, until a later check."""

import json
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from ranks import Ranks
from scenarios import Messages, Wide, assert_ranks_equal, data, state_of, train, trainer
from tuning_runs import NO_CACHE, assert_same_parameters, stock, tune

from lightning_ddpopt import DDPOptStrategy, HookSpec, Plan
from lightning_ddpopt.tuning import run as run_module
from lightning_ddpopt.tuning.verdict import Trial, Verdict

__all__ = ["stock"]  # a fixture


def change_and_resume(checkpoint: str) -> Plan:
    strategy, module = DDPOptStrategy(**NO_CACHE), Wide()
    fitter = trainer(strategy, max_steps=70)
    fitter.fit(module, data())
    fitter.save_checkpoint(checkpoint)
    strategy.change_plan(Plan(bucket_cap_mb=0.1))
    fitter.fit_loop.epoch_loop.max_steps = 80
    fitter.fit(module, data(), ckpt_path=checkpoint)
    return strategy.plan


def test_a_plan_of_the_user_holds_when_resuming(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(change_and_resume, str(tmp_path / "a.ckpt")) == [Plan(bucket_cap_mb=0.1)] * 2


def test_a_cached_verdict_is_verified(two_ranks: Ranks, stock: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    arguments = {"tuning": {"cache": str(tmp_path)}}
    first = two_ranks(tune, arguments)[0]["verdict"]
    (file,) = tmp_path.glob("verdict_*.json")
    results = two_ranks(tune, arguments)
    assert_same_parameters(results, stock[80])
    again = results[0]["verdict"]
    assert again == results[1]["verdict"]
    if again.is_verified:  # on a busy machine the comparison may end otherwise
        assert again.plan == first.plan
        assert again.steps <= 16
        assert "an earlier verdict" in again.reason
    other = two_ranks(tune, arguments | {"static_graph": True})  # another case, another file
    assert "an earlier verdict" not in other[0]["verdict"].reason
    assert len(list(tmp_path.glob("verdict_*.json"))) == 2
    file.write_text("{")
    results = two_ranks(tune, arguments)
    assert_same_parameters(results, stock[80])
    assert any("is ignored" in text for text in results[0]["said"])
    assert "an earlier verdict" not in results[0]["verdict"].reason


def test_a_cached_plan_other_than_the_default_is_verified_on_real_steps(
    two_ranks: Ranks, stock: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    arguments = {"tuning": {"cache": str(tmp_path)}}
    two_ranks(tune, arguments)
    (file,) = tmp_path.glob("verdict_*.json")
    stored = json.loads(file.read_text())
    slower = next(trial for trial in stored["verdict"]["trials"] if trial["plan"]["bucket_cap_mb"] is not None)
    stored["verdict"]["plan"] = slower["plan"]
    file.write_text(json.dumps(stored))
    results = two_ranks(tune, arguments, steps=30)
    assert_same_parameters(results, stock[30])
    verdict = results[0]["verdict"]
    if verdict is not None:  # it was verified; else it was slower than the default, and tuning went on
        assert verdict.plan == Plan.from_dict(slower["plan"])
        assert verdict.steps <= 16
        assert verdict.is_verified


def tune_with_checkpoints(folder: str, every: int, steps: int) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=every)
    return tune(NO_CACHE, steps=steps, callbacks=[saver], enable_checkpointing=True)


def resume(checkpoint: str, steps: int) -> dict[str, Any]:
    strategy, module = DDPOptStrategy(**NO_CACHE), Wide()
    fitter = trainer(strategy, max_steps=steps)
    fitter.fit(module, data(), ckpt_path=checkpoint)
    return {"state": state_of(module), "verdict": strategy.verdict, "plan": strategy.plan}


def test_resuming_in_and_after_tuning(two_ranks: Ranks, stock: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    whole = two_ranks(tune_with_checkpoints, str(tmp_path), 16, 80)
    early = torch.load(tmp_path / "step=16.ckpt", weights_only=True)["ddpopt"]
    assert "verdict" not in early
    assert_same_parameters(whole, stock[80])
    in_tuning = two_ranks(resume, str(tmp_path / "step=16.ckpt"), 80)
    assert_same_parameters(in_tuning, stock[80])
    assert in_tuning[0]["verdict"] == in_tuning[1]["verdict"], "it began anew"
    after = two_ranks(resume, str(tmp_path / "step=64.ckpt"), 80)
    assert_same_parameters(after, stock[80])
    torch.load(tmp_path / "step=64.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "step=64.ckpt", weights_only=True)["ddpopt"]
    if "verdict" in saved:  # 64 steps are the most that tuning takes
        assert after[0]["verdict"] == whole[0]["verdict"]
        assert after[0]["plan"] == whole[0]["plan"]


def resume_elsewhere(checkpoint: str, device: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:  # whose machine counts
            patch.setattr(run_module, "device_name", lambda _: device)
        return resume(checkpoint, 70 + 70)


def test_the_verdict_of_another_machine_is_not_taken_over(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(tune_with_checkpoints, str(tmp_path), 70, 70)
    saved = torch.load(tmp_path / "step=70.ckpt", weights_only=True)["ddpopt"]
    verdict = Verdict.from_dict(saved["verdict"])
    assert [one["verdict"] for one in two_ranks(resume_elsewhere, str(tmp_path / "step=70.ckpt"), "CPU")] == [
        verdict
    ] * 2
    results = two_ranks(resume_elsewhere, str(tmp_path / "step=70.ckpt"), "another one")
    assert_ranks_equal(results)
    assert results[0]["verdict"] == results[1]["verdict"] is not None
    assert results[0]["verdict"] != verdict


def save_with_powersgd(checkpoint: str) -> None:
    """A checkpoint as `comm_hook="auto"` leaves it where PowerSGD won, on another machine."""
    hook = HookSpec("powersgd", {"start_powerSGD_iter": 0})
    strategy = DDPOptStrategy(plan=Plan(hook=hook))
    fitter = trainer(strategy, max_steps=5)
    fitter.fit(Wide(), data())
    fitter.save_checkpoint(checkpoint)
    if dist.get_rank() == 0:
        saved = torch.load(checkpoint, weights_only=True)
        trial = Trial(Plan(hook=hook), (1,), (1.0,))
        verdict = Verdict(Plan(hook=hook), Plan(), reason="it is the fastest", trials=(trial,))
        saved["ddpopt"] |= {"verdict": verdict.to_dict(), "tuned": {"device": "another one"}}
        assert saved["ddpopt"]["hook_state"]["residuals"]
        torch.save(saved, checkpoint)
    dist.barrier()


def resume_with_auto_hook(checkpoint: str) -> dict[str, Any]:
    messages = Messages()
    strategy, module = DDPOptStrategy(comm_hook="auto", allow="low_rank", **NO_CACHE), Wide()
    fitter = trainer(strategy, max_steps=12)
    fitter.fit(module, data(), ckpt_path=checkpoint)
    messages.close()
    return {"state": state_of(module), "said": messages.texts}


def test_state_of_a_hook_that_is_not_taken_over_is_not_kept_for_a_trial(two_ranks: Ranks, tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "a.ckpt")
    two_ranks(save_with_powersgd, checkpoint)
    results = two_ranks(resume_with_auto_hook, checkpoint)
    assert_ranks_equal(results)
    assert any("is not used: tuning begins anew" in text for text in results[0]["said"])


def resume_with_checks(checkpoint: str, steps: int) -> list[str]:
    strategy, messages = DDPOptStrategy(tuning={"cache": False, "recheck_every_n_steps": 100}), Messages()
    fitter = trainer(strategy, max_steps=steps)
    fitter.fit(Wide(), data(), ckpt_path=checkpoint)
    messages.close()
    return [text for text in messages.texts if "tuning took" in text]


def test_the_first_check_of_a_resumed_run_waits_its_time(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(tune_with_checkpoints, str(tmp_path), 70, 70)
    checkpoint = str(tmp_path / "step=70.ckpt")
    assert not two_ranks(resume_with_checks, checkpoint, 70 + 98)[0]
    assert len(two_ranks(resume_with_checks, checkpoint, 70 + 100 + 64 + 6)[0]) >= 1


def tune_twice() -> list[Any]:
    strategy, module = DDPOptStrategy(**NO_CACHE), Wide()
    fitter, verdicts = trainer(strategy), []
    for steps in (70, 90):
        fitter.fit_loop.epoch_loop.max_steps = steps
        fitter.fit(module, data())
        verdicts.append((strategy.verdict, strategy.plan))
    return verdicts


def test_a_second_fit_keeps_the_verdict(two_ranks: Ranks) -> None:
    for first, second in two_ranks(tune_twice):
        assert first[0] is not None
        assert first == second


def test_a_later_check(two_ranks: Ranks) -> None:
    arguments = {"tuning": {"cache": False, "recheck_every_n_steps": 100}}
    results = two_ranks(tune, arguments, steps=240)
    assert_same_parameters(results, two_ranks(train, None, steps=240, make_module=Wide)[0])
    assert results[0]["verdict"] == results[1]["verdict"]
    assert len([text for text in results[0]["said"] if "tuning took" in text]) == 2


class StopsInCheck(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.strategy.verdict is not None and trainer.strategy.is_tuning


def stop_in_a_check() -> dict[str, Any]:
    arguments = {"tuning": {"cache": False, "recheck_every_n_steps": 100}}
    return tune(arguments, steps=240, callbacks=[StopsInCheck()])


def test_training_that_ends_in_a_later_check_keeps_the_verdict(two_ranks: Ranks) -> None:
    results = two_ranks(stop_in_a_check)
    assert_ranks_equal(results)
    for result in results:
        assert 110 < result["steps"] < 180
        assert result["plan"] == result["verdict"].plan
    assert any("training ended before tuning did" in text for text in results[0]["said"])


def tune_with_a_logger(folder: str) -> dict[str, Any]:
    strategy = DDPOptStrategy(**NO_CACHE)
    fitter = trainer(strategy, max_steps=80, logger=CSVLogger(folder, name="run", version=0))
    fitter.fit(Wide(), data())
    return {"plan": strategy.plan, "verdict": strategy.verdict}


def test_files_and_metrics(two_ranks: Ranks, tmp_path: Path) -> None:
    first, _ = two_ranks(tune_with_a_logger, str(tmp_path))
    folder = tmp_path / "run" / "0" if (tmp_path / "run" / "0").exists() else tmp_path / "run" / "version_0"
    assert Plan.load(folder / "ddpopt_plan.json") == first["plan"]
    assert Verdict.load(folder / "ddpopt_verdict.json") == first["verdict"]
    assert "ddpopt/gain_ms" in (folder / "metrics.csv").read_text()
    replayed = two_ranks(train, {"plan": str(folder / "ddpopt_plan.json")}, steps=10, make_module=Wide)
    assert replayed[0]["plan"] == first["plan"]
    assert replayed[0]["verdict"] is None
