"""Tuning in a Lightning run: whether, of what, and where its verdict goes."""

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt import wrapping
from lightning_ddpopt.machine.environment import device_name, exchange_variables, hardware, versions
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


def reason_not_to_tune(
    module: LightningModule, plan: Plan, ddp_arguments: Mapping[str, Any], *, observes: bool
) -> str | None:
    """Why trials would be wrong for this run, in words that follow "not tuned: "; None where they are right.

    ``observes`` is true where nothing is to be re-wrapped.

    """
    if torch.are_deterministic_algorithms_enabled() and not observes:
        return (
            "Trainer(deterministic=...) asks for runs that repeat, and a choice made by timing may differ; give"
            " bucket_cap_mb, or plan with the file of an earlier verdict"
        )
    submodules = list(module.modules())
    if module._compiler_ctx is not None or any(map(_is_compiled, submodules)):
        return (
            "the module is compiled, and keeps the graph splits of the capacity it was first wrapped with; give"
            " bucket_cap_mb"
        )
    for name in ("delay_all_reduce_named_params", "mixed_precision"):
        if ddp_arguments.get(name) is not None:
            return f"DDP's {name} leaves hooks on the module, which a re-wrap cannot take off; give bucket_cap_mb"
    if plan.hook.name == CUSTOM_HOOK:
        return "a callable hook may keep state for each bucket, which other buckets would break; give bucket_cap_mb"
    if any(isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse for submodule in submodules):
        return "DDP reduces sparse gradients one by one, and forms no buckets in gradient-ready order with them"
    return None


def _is_compiled(module: nn.Module) -> bool:
    """By ``torch.compile`` of it, of one of its methods, or of a function that it holds."""
    if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
        return True
    values = itertools.chain(vars(module).values(), *(vars(cls).values() for cls in type(module).__mro__))
    return any(isinstance(one, FunctionType) and hasattr(one, "_torchdynamo_orig_callable") for one in values)


def facts_of(
    module: LightningModule,
    default: Plan,
    *,
    tunes_capacity: bool,
    hooks: Sequence[HookSpec],
    options: TuningOptions | None,
    ddp_arguments: Mapping[str, Any],
    group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, Any]:
    """What a verdict depends on: parameters, settings, kind of machine and versions, as rank 0 of ``group`` sees them.

    Not what is not known here: the size of batches, and the wire between machines. Collective. Plain values, to be
    compared, and kept in JSON and checkpoints.

    """
    parameters = [
        [list(parameter.shape), str(parameter.dtype), parameter.requires_grad]
        for _, parameter in wrapping.reduced_parameters(module)
    ]
    peers: list[bool] = []
    if device.type == "cuda":
        others = [other for other in range(torch.cuda.device_count()) if other != device.index]
        peers = [torch.cuda.can_device_access_peer(device, other) for other in others]
    facts = {
        "parameters": hashlib.sha256(json.dumps(parameters).encode()).hexdigest(),
        "settings": default.to_dict(),
        "tunes_capacity": tunes_capacity,
        "hooks": [str(hook) for hook in hooks],
        "ddp_arguments": {name: one for name, one in ddp_arguments.items() if isinstance(one, bool | int | float)},
        "observes": options is not None and options.observe,
        "candidates": list(options.candidates or ()) if options is not None else [],
        "precision": str(module.trainer.precision),
        "micro_batches": module.trainer.accumulate_grad_batches,
        "world_size": group.size(),
        "nodes": module.trainer.num_nodes,
        "backend": dist.get_backend(group),
        "device": device_name(device),
        "hardware": hardware(),
        "peers": peers,
        "variables": dict(exchange_variables()),
        "versions": dict(versions()),
    }
    agreed = [facts]
    dist.broadcast_object_list(agreed, src=dist.get_global_rank(group, 0), group=group)
    return agreed[0]


MOST_RETUNINGS = 4
"""How often a fit tunes anew because another set of parameters is trained."""


class AutoTuning:
    """Tuning as one strategy uses it: it begins with a fit, goes on between its steps, and ends with a verdict.

    Args:
        options: the user's; None: no tuning.
        default: the user's settings with torch's default capacity.
        tunes_capacity: whether the capacity is to be tuned.
        hooks: lossy hooks that may be chosen too.
        ddp_arguments: further arguments of DDP.

    """

    def __init__(
        self,
        options: TuningOptions | None,
        default: Plan,
        *,
        tunes_capacity: bool,
        hooks: tuple[HookSpec, ...],
        ddp_arguments: Mapping[str, Any],
    ) -> None:
        self._ddp_arguments = ddp_arguments
        self.session: TuningSession | None = None
        self.verdict: Verdict | None = None
        self._options, self._default, self._tunes_capacity, self._hooks = options, default, tunes_capacity, hooks
        self._facts: Mapping[str, Any] = {}
        self._tuned_facts: Mapping[str, Any] | None = None
        self._verdict_step: int | None = None  # when it was found or last checked; unknown of a run before
        self._retunings = 0
        self._told: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether anything is to be tuned."""
        return (self._tunes_capacity or bool(self._hooks)) and self._options is not None

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do between steps."""
        return self.session is not None or (
            self._options is not None and self._options.recheck_every_n_steps is not None
        )

    @property
    def default(self) -> Plan:
        """What holds where nothing better is known."""
        return self._default

    def switch_off(self) -> None:
        """The user has chosen a plan."""
        self.stop()
        self._options = None

    def begin(self, module: LightningModule, group: dist.ProcessGroup, device: torch.device) -> Plan:
        """Begin with a fit, or keep the verdict of an earlier one, or of a checkpoint's, that was the same. Collective.

        Returns:
            the plan to begin with.

        """
        self._retunings = 0
        self._verdict_step = None
        self._facts = self._facts_of(module, group, device)
        if self._tuned_facts == self._facts and self.verdict is not None:
            return self.verdict.plan
        self.verdict = self._tuned_facts = None
        self._start(module, group, device)
        return self._default

    def begin_anew(self, module: LightningModule, group: dist.ProcessGroup, device: torch.device) -> Plan:
        """Other gradients are exchanged from now on: tune anew, but not for ever. Collective."""
        self.stop()
        self.verdict = self._tuned_facts = None
        self._retunings += 1
        if self._retunings <= MOST_RETUNINGS:
            self._facts = self._facts_of(module, group, device)
            self._start(module, group, device)
        else:
            self._say_once(f"not tuned again: requires_grad has changed {MOST_RETUNINGS + 1} times in this fit")
        return self._default

    def next_plan(
        self, plan: Plan, ddp: DistributedDataParallel, module: LightningModule, group: dist.ProcessGroup
    ) -> Plan:
        """Between two batches: the plan for the next steps. Collective where a block of trials is over.

        Args:
            plan: the plan in force.
            ddp: the wrapper in use.
            module: what it wraps.
            group: the group that it reduces over.

        """
        trainer = module.trainer
        if self._is_check_due(plan, trainer.global_step):
            self._verdict_step = trainer.global_step
            verify = self.verdict if plan != self._default else None
            self._start(module, group, ddp.device, verify=verify, uses_cache=False)
        session = self.session
        if session is None or not session.is_due:
            return plan
        verdict = session.advance(ddp)
        if verdict is None:
            assert session.plan is not None
            return session.plan
        self.session = None
        self.verdict, self._tuned_facts, self._verdict_step = verdict, self._facts, trainer.global_step
        announce(trainer, verdict)
        assert self._options is not None
        if verdict.trials and not verdict.is_verified and trainer.is_global_zero:
            cache = cache_of(self._options)
            if cache is not None:
                cache.store(self._facts, verdict)
        return verdict.plan

    def stop(self) -> Plan | None:
        """Without a new verdict.

        Returns:
            the plan that holds then; None where no tuning was under way.

        """
        if self.session is None:
            return None
        self.session.close()
        self.session = None
        return self._default if self.verdict is None else self.verdict.plan

    def state_dict(self) -> dict[str, Any]:
        """The verdict and what it is of, for a checkpoint; empty before there is one."""
        if self.verdict is None or not self.verdict.trials or self._tuned_facts is None or not self.is_on:
            return {}
        return {"verdict": self.verdict.to_dict(), "tuned": dict(self._tuned_facts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> Plan | None:
        """Take over the verdict of the run before; :meth:`begin` compares whether this one is alike.

        Returns:
            its plan; None where there is none to take.

        """
        if "verdict" not in state or not self.is_on:
            return None
        try:
            self.verdict, self._tuned_facts = Verdict.from_dict(state["verdict"]), state["tuned"]
        except (ValueError, KeyError) as error:  # of another version
            say(log, f"the checkpoint's verdict is not used: {error}", logging.WARNING)
            return None
        return self.verdict.plan

    def _facts_of(self, module: LightningModule, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
        return facts_of(
            module,
            self._default,
            tunes_capacity=self._tunes_capacity,
            hooks=self._hooks,
            options=self._options,
            ddp_arguments=self._ddp_arguments,
            group=group,
            device=device,
        )

    def _is_check_due(self, plan: Plan, step: int) -> bool:
        every = self._options.recheck_every_n_steps if self._options is not None else None
        if self._verdict_step is None:
            self._verdict_step = step
        is_idle = self.session is None and self.verdict is not None and plan == self.verdict.plan
        return every is not None and is_idle and step - self._verdict_step >= every

    def _start(
        self,
        module: LightningModule,
        group: dist.ProcessGroup,
        device: torch.device,
        verify: Verdict | None = None,
        uses_cache: bool = True,
    ) -> None:
        """Make a session. Not collective; its steps are.

        Args:
            module: what DDP wraps.
            group: the group that DDP reduces over.
            device: this rank's.
            verify: a verdict to be checked, instead of one from the cache.
            uses_cache: whether to look into the cache.

        """
        options, default = self._options, self._default
        assert options is not None
        reason = reason_not_to_tune(module, default, self._ddp_arguments, observes=options.observe)
        if reason is not None:
            self._say_once(f"not tuned: {reason}")
            return
        hooks = self._hooks_for(module)
        if hooks and not options.observe:
            names = " and ".join(hook.name for hook in hooks)
            self._say_once(f"comm_hook='auto': after the capacities, trials of {names} train lossily for some steps")
        gradients = [p for _, p in wrapping.reduced_parameters(module) if p.requires_grad]
        stock = replace(default, gradient_as_bucket_view=False)  # static or not: without it, such a model may not train
        is_exact = default.hook.name == "none" and self._tunes_capacity
        case = TuningCase(
            default=default,
            total_bytes=sum(p.numel() * p.element_size() for p in gradients),
            stock=stock if is_exact and stock != default else None,
            hooks=hooks,
            tunes_capacity=self._tunes_capacity,
            wait_steps=int(default.hook.options.get("start_powerSGD_iter", 0)),
            options=options,
            cached=verify,
        )
        facts = self._facts

        def procedure() -> Procedure:
            cached = verify
            if uses_cache and (cache := cache_of(options)) is not None:
                cached = cache.load(facts)
            return Tuner(replace(case, cached=cached)).run()

        self.session = TuningSession(procedure, default, group, device)

    def _hooks_for(self, module: LightningModule) -> tuple[HookSpec, ...]:
        """Those that can carry the module's gradients."""
        able = []
        for hook in self._hooks:
            try:
                wrapping.check_module(module, replace(self._default, hook=hook), self._ddp_arguments)
                able.append(hook)
            except ValueError as error:
                self._say_once(f"comm_hook='auto': {hook.name} is not tried: {error}")
        return tuple(able)

    def _say_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            say(log, message)


def cache_of(options: TuningOptions) -> VerdictCache | None:
    """Where verdicts are kept; None: nowhere."""
    if options.observe or options.cache is False or options.candidates is not None:
        return None
    try:
        return VerdictCache(default_folder() if options.cache is True else options.cache)
    except RuntimeError:  # no home directory
        return None


def announce(trainer: Trainer, verdict: Verdict) -> None:
    """Tell the verdict: one line in the log, metrics, and two files where the run keeps its own. On rank zero."""
    say(log, str(verdict))
    if trainer.is_global_zero:
        try:
            _keep(trainer, verdict)
        except Exception as error:  # of a logger or a file system; the other ranks are training already
            say(log, f"the verdict was not written: {error!r}", logging.WARNING)


def _keep(trainer: Trainer, verdict: Verdict) -> None:
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
    folder.mkdir(parents=True, exist_ok=True)
    verdict.plan.save(folder / PLAN_FILE)
    verdict.save(folder / VERDICT_FILE)
    say(log, f"DDPOptStrategy(plan={str(folder / PLAN_FILE)!r}) does the same without tuning")


def _run_folder(trainer: Trainer) -> Path | None:
    """Where this run keeps its files; None where it keeps none, or not on this machine."""
    folder = _run_folder_or_address(trainer)
    return None if folder is None or "://" in folder else Path(folder)


def _run_folder_or_address(trainer: Trainer) -> str | None:
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None) or logger.save_dir
        if isinstance(folder, str | Path):  # that of fast_dev_run's logger is a function
            return str(folder)
    checkpoints = getattr(trainer.checkpoint_callback, "dirpath", None)
    if checkpoints:
        return str(checkpoints)
    return str(trainer.default_root_dir) if trainer.default_root_dir != os.getcwd() else None
