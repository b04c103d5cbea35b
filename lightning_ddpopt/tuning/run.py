"""Tuning in a Lightning run: whether, of what, and where its verdict goes."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_ddpopt import wrapping
from lightning_ddpopt.machine.environment import device_name, exchange_variables, versions
from lightning_ddpopt.messages import say
from lightning_ddpopt.plan import CUSTOM_HOOK, HookSpec, Plan
from lightning_ddpopt.tuning.cache import VerdictCache, default_folder
from lightning_ddpopt.tuning.options import TuningOptions
from lightning_ddpopt.tuning.session import TuningSession
from lightning_ddpopt.tuning.tuner import Procedure, Tuner, TuningCase
from lightning_ddpopt.tuning.verdict import Verdict

log = logging.getLogger(__name__)

HOOKS_ALLOWED: Mapping[str, tuple[HookSpec, ...]] = {
    "quantized": (HookSpec("bf16"),),
    "low_rank": (HookSpec("bf16"), HookSpec("powersgd", {"start_powerSGD_iter": 0})),
}
"""What ``allow`` covers. PowerSGD compresses from its first step on here, or its trial would show exact gradients."""
PLAN_FILE, VERDICT_FILE = "ddpopt_plan.json", "ddpopt_verdict.json"


def reason_not_to_tune(module: LightningModule, plan: Plan) -> str | None:
    """Why trials would be wrong for this run, in words that follow "not tuned: "; None where they are right."""
    if torch.are_deterministic_algorithms_enabled():
        return (
            "Trainer(deterministic=...) asks for runs that repeat, and a choice made by timing may differ; give"
            " bucket_cap_mb, or plan with the file of an earlier verdict"
        )
    submodules = list(module.modules())
    if module._compiler_ctx is not None or any(
        hasattr(submodule, "_orig_mod") or submodule._compiled_call_impl is not None for submodule in submodules
    ):
        return (
            "the module is compiled, and keeps the graph splits of the capacity it was first wrapped with; give"
            " bucket_cap_mb"
        )
    if plan.hook.name == CUSTOM_HOOK:
        return "a callable hook may keep state for each bucket, which other buckets would break; give bucket_cap_mb"
    if any(isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse for submodule in submodules):
        return "DDP reduces sparse gradients one by one, and forms no buckets in gradient-ready order with them"
    return None


def facts_of(module: nn.Module, default: Plan, world_size: int, hooks: Sequence[HookSpec]) -> dict[str, Any]:
    """What a verdict depends on as far as all ranks see it alike: parameters, settings, number of ranks."""
    parameters = [
        [list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
        for _, parameter in wrapping.reduced_parameters(module)
    ]
    return {
        "parameters": hashlib.sha256(json.dumps(parameters).encode()).hexdigest(),
        "settings": default.to_dict(),
        "hooks": [hook.name for hook in hooks],
        "world_size": world_size,
    }


def start_session(
    trainer: Trainer,
    module: LightningModule,
    facts: Mapping[str, Any],
    *,
    default: Plan,
    tunes_capacity: bool,
    hooks: tuple[HookSpec, ...],
    options: TuningOptions,
    group: dist.ProcessGroup,
    device: torch.device,
    verify: Verdict | None = None,
    uses_cache: bool = True,
) -> TuningSession:
    """A session that tunes ``module``. Not collective; its steps are.

    Args:
        trainer: the run.
        module: what DDP wraps.
        facts: from :func:`facts_of`.
        default: the user's settings with torch's default capacity.
        tunes_capacity: whether capacities may be changed; else only hooks.
        hooks: lossy hooks that may be chosen too.
        options: the user's.
        group: the group that DDP reduces over.
        device: this rank's.
        verify: a verdict of this run to be verified (a later check), instead of one from the cache.
        uses_cache: whether to look into the cache.

    """
    gradients = [p for _, p in wrapping.reduced_parameters(module) if p.requires_grad]
    stock = replace(default, gradient_as_bucket_view=False, static_graph=False)
    is_exact = default.hook.name == "none" and tunes_capacity
    start_iter = default.hook.options.get("start_powerSGD_iter", 0)
    case = TuningCase(
        default=default,
        total_bytes=sum(p.numel() * p.element_size() for p in gradients),
        stock=stock if is_exact and stock != default else None,
        hooks=hooks,
        tunes_capacity=tunes_capacity,
        warmup_steps=max(3, int(start_iter) + 1),
        options=options,
    )

    def procedure() -> Procedure:
        cached = verify
        if uses_cache and verify is None and (cache := cache_of(options)) is not None:
            cached = cache.load(cache_key(trainer, facts, device))
        return Tuner(replace(case, cached=cached)).run()

    return TuningSession(procedure, default, group, device)


def cache_of(options: TuningOptions) -> VerdictCache | None:
    """Where verdicts are kept; None: nowhere."""
    if options.observe or options.cache is False or options.candidates is not None:
        return None
    return VerdictCache(default_folder() if options.cache is True else options.cache)


def cache_key(trainer: Trainer, facts: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """All that a verdict depends on; of the machine as rank 0 sees it."""
    peers: list[bool] = []
    if device.type == "cuda":
        others = [other for other in range(torch.cuda.device_count()) if other != device.index]
        peers = [torch.cuda.can_device_access_peer(device, other) for other in others]
    return {
        **facts,
        "nodes": trainer.num_nodes,
        "precision": str(trainer.precision),
        "micro_batches": trainer.accumulate_grad_batches,
        "backend": dist.get_backend(),
        "device": device_name(device),
        "peers": peers,
        "variables": dict(exchange_variables()),
        "versions": dict(versions()),
    }


def announce(trainer: Trainer, verdict: Verdict) -> None:
    """Tell the verdict: one line in the log, metrics, and two files where the run keeps its own. On rank zero."""
    say(log, str(verdict))
    if not trainer.is_global_zero:
        return
    default, kept = verdict.trial_of(verdict.default), verdict.trial_of(verdict.plan)
    if default is not None and kept is not None:
        metrics = {
            "ddpopt/step_ms": kept.median_ms,
            "ddpopt/default_step_ms": default.median_ms,
            "ddpopt/gain_ms": verdict.gain_ms,
            "ddpopt/tuning_steps": float(verdict.steps),
            "ddpopt/tuning_cost_s": verdict.cost_s,
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
    folder = _run_folder(trainer)
    if folder is None or not verdict.trials:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        verdict.plan.save(folder / PLAN_FILE)
        verdict.save(folder / VERDICT_FILE)
        say(log, f"DDPOptStrategy(plan={str(folder / PLAN_FILE)!r}) does the same without tuning")
    except OSError as error:
        say(log, f"the plan was not written: {error}", logging.WARNING)


def _run_folder(trainer: Trainer) -> Path | None:
    """Where this run keeps its files; None where it keeps none."""
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None) or logger.save_dir
        if isinstance(folder, str | Path):  # that of fast_dev_run's logger is a function
            return Path(folder)
    checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
    if checkpoints:
        return Path(checkpoints)
    return Path(trainer.default_root_dir) if trainer.default_root_dir != os.getcwd() else None
