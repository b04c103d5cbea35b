"""What the strategy's constructor takes and refuses."""

import pickle
import warnings
from datetime import timedelta

import lightning as L  # noqa: N812
import pytest
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_ddpopt import DDPOptStrategy, HookSpec, Plan

LOCAL_SGD = PostLocalSGDState(None, None, start_localSGD_iter=1)


def test_defaults() -> None:
    strategy = DDPOptStrategy()
    assert strategy.plan == Plan(False, True, None, HookSpec("none"))
    assert isinstance(strategy, DDPStrategy)


def test_arguments_become_the_plan() -> None:
    strategy = DDPOptStrategy(
        static_graph=True,
        gradient_as_bucket_view=False,
        bucket_cap_mb=[1, 25],
        comm_hook="powersgd",
        comm_hook_options={"matrix_approximation_rank": 4},
    )
    assert strategy.plan == Plan(True, False, (1, 25), HookSpec("powersgd", {"matrix_approximation_rank": 4}))


def test_a_plan_or_its_file_is_taken_whole(tmp_path) -> None:
    plan = Plan(True, False, 10, HookSpec("bf16"))
    plan.save(tmp_path / "plan.json")
    assert DDPOptStrategy(plan=plan).plan == plan
    assert DDPOptStrategy(plan=tmp_path / "plan.json").plan == plan
    assert DDPOptStrategy(plan=str(tmp_path / "plan.json")).plan == plan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 is not a capacity"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1 is not a capacity"),
        ({"bucket_cap_mb": float("inf")}, "bucket_cap_mb=inf is not a capacity"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25' is not a capacity"),
        ({"bucket_cap_mb": []}, "holds no capacity"),
        ({"comm_hook": "gzip"}, "comm_hook='gzip' is not known"),
        ({"comm_hook": "auto", "comm_hook_options": {"rank": 1}}, "comm_hook='auto' chooses one"),
        ({"comm_hook": "auto", "plan": Plan()}, "plan and comm_hook both"),
        ({"allow": "lossy"}, "allow='lossy' is not one of 'quantized', 'low_rank'"),
        ({"comm_hook": None}, "comm_hook=None is not known"),
        ({"comm_hook": "bf16", "comm_hook_options": {"rank": 1}}, "has no option 'rank'"),
        ({"comm_hook_options": {"rank": 1}}, "hook 'none' has no option 'rank'"),
        ({"comm_hook_options": [1]}, "must be a mapping"),
        ({"comm_hook": print, "comm_hook_options": {"stat": 1}}, "takes only 'state', not 'stat'"),
        ({"comm_hook": "bf16", "ddp_comm_hook": print}, "both name a communication hook"),
        ({"ddp_comm_hook": print, "comm_hook_options": {"state": 1}}, "give its state as ddp_comm_state"),
        ({"ddp_comm_hook": "bf16"}, "is not callable: give hooks by name as comm_hook"),
        ({"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}, "there is none"),
        ({"ddp_comm_wrapper": "fp16", "comm_hook": "bf16"}, "ddp_comm_wrapper='fp16' is not callable"),
        ({"ddp_comm_state": 5}, "ddp_comm_state belongs to ddp_comm_hook"),
        ({"comm_hook": print, "ddp_comm_state": 5}, "ddp_comm_state belongs to ddp_comm_hook"),
        ({"find_unused_parameters": "yes"}, "find_unused_parameters='yes' must be True or False"),
        ({"broadcast_buffers": "false"}, "broadcast_buffers='false' must be True or False"),
        ({"device_mesh": object()}, "give the mesh's group as process_group"),
        ({"start_method": "thread"}, "start_method='thread'.*popen"),
        ({"model_averaging_period": 0}, "model_averaging_period=0 must be a whole number of at least 1"),
        ({"ddp_comm_hook": print, "ddp_comm_state": LOCAL_SGD}, "needs model_averaging_period"),
        ({"bucket_cap_mb": "Auto"}, "bucket_cap_mb='Auto'.*allowed is 'auto'"),
        ({"static_graph": "yes"}, "static_graph='yes' must be True or False"),
        ({"gradient_as_bucket_view": None}, "gradient_as_bucket_view=None must be True or False"),
        ({"tuning": "watch"}, "tuning='watch' must be True, False, 'observe' or a mapping"),
        ({"tuning": 1}, "tuning=1 must be True, False"),
        ({"tuning": {"steps": 3}}, "tuning has no option 'steps'. Its options: observe, max_steps"),
        ({"tuning": {"max_steps": 0}}, "max_steps=0 must be a whole number of at least 1"),
        ({"tuning": {"max_seconds": float("inf")}}, "max_seconds=inf must be a number of seconds"),
        ({"tuning": {"candidates": []}}, r"candidates=\[\] must be a list"),
        ({"tuning": {"candidates": [0]}}, "bucket_cap_mb=0 is not a capacity"),
        ({"tuning": {"candidates": [None]}}, "None must be a number of MiB"),
        ({"tuning": {"cache": 3}}, "cache=3 must be True, False or a folder"),
        (
            {"tuning": {"recheck_every_n_steps": 5}},
            "recheck_every_n_steps=5 must be None or a whole number of at least 100",
        ),
        ({"gradient_check_steps": -1}, "gradient_check_steps=-1"),
        ({"gradient_check_steps": True}, "gradient_check_steps=True"),
        ({"bucket_cap": 25}, "'bucket_cap' is neither an argument of DDPOptStrategy"),
        ({"device_ids": [0], "output_device": None}, "device_ids=.* cannot be passed on"),
        ({"bucket_cap_mb_list": [1]}, "give the list as bucket_cap_mb"),
        ({"plan": Plan(), "static_graph": True}, "plan and static_graph both"),
        ({"plan": Plan(), "bucket_cap_mb": None}, "plan and bucket_cap_mb both"),
        ({"plan": Plan(), "comm_hook": "bf16"}, "plan and comm_hook both"),
        ({"plan": Plan(), "ddp_comm_hook": print}, "plan and ddp_comm_hook both"),
        ({"plan": 3}, "plan=3 must be a Plan or the path"),
        ({"plan": "no_such_plan.json"}, "no_such_plan.json"),
        ({"plan": Plan(hook=HookSpec("custom", {"callable": "f"}))}, "callable 'f', which a plan cannot bring back"),
    ],
)
def test_bad_input_is_refused_in_the_constructor(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPOptStrategy(**arguments)


def test_arguments_of_lightning_and_ddp_pass_through() -> None:
    timeout = timedelta(seconds=77)
    strategy = DDPOptStrategy(
        find_unused_parameters=True, process_group_backend="gloo", timeout=timeout, start_method="spawn"
    )
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert (strategy.process_group_backend, strategy._timeout, strategy._start_method) == ("gloo", timeout, "spawn")


def test_a_callable_hook_goes_into_the_plan_by_its_name() -> None:
    by_us = DDPOptStrategy(comm_hook=default_hooks.allreduce_hook, comm_hook_options={"state": 5})
    by_lightning = DDPOptStrategy(ddp_comm_hook=default_hooks.allreduce_hook, ddp_comm_state=5)
    for strategy in (by_us, by_lightning):
        assert strategy.plan.hook == HookSpec("custom", {"callable": "allreduce_hook"})
        assert (strategy._ddp_comm_hook, strategy._ddp_comm_state) == (default_hooks.allreduce_hook, 5)


def test_a_strategy_can_be_pickled_for_spawn() -> None:
    strategy = DDPOptStrategy(comm_hook="powersgd", static_graph=True)
    assert pickle.loads(pickle.dumps(strategy)).plan == strategy.plan


def test_disabled_means_stock(monkeypatch) -> None:
    monkeypatch.setenv("DDPOPT_DISABLE", "1")
    strategy = DDPOptStrategy(static_graph=True, comm_hook=print, find_unused_parameters=True)
    assert strategy.plan == Plan.stock()
    assert strategy._ddp_comm_hook is None
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    monkeypatch.setenv("DDPOPT_DISABLE", "0")
    assert DDPOptStrategy(static_graph=True).plan.static_graph


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hook", ["none", "fp16", "bf16", "powersgd"])
def test_registered_names(hook: str) -> None:
    name = "ddpopt" if hook == "none" else f"ddpopt_{hook}"
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, DDPOptStrategy)
    assert trainer.strategy.plan == Plan(hook=HookSpec(hook))


@pytest.mark.parametrize("strategy", ["ddpopt", "ddpopt_bf16", "instance"])
def test_the_twin_namespace_is_told_what_is_wrong(strategy: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytorch_lightning
    given = DDPOptStrategy() if strategy == "instance" else strategy
    with pytest.raises(
        TypeError, match=r"works with `lightning.pytorch.Trainer`, not with `pytorch_lightning.Trainer`"
    ):
        pytorch_lightning.Trainer(accelerator="cpu", devices=2, strategy=given, logger=False)


def test_every_stock_ddp_argument_is_still_accepted() -> None:
    for name, value in {"broadcast_buffers": False, "skip_all_reduce_unused_params": True, "init_sync": True}.items():
        assert DDPOptStrategy(**{name: value})._ddp_kwargs == {name: value}
