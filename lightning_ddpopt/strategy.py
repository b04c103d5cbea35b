"""The Lightning strategy: Lightning's life cycle around a plan. What DDP does stands in ``wrapping``."""

import atexit
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override
from wrapt import when_imported

from lightning_ddpopt import twin, wrapping
from lightning_ddpopt.arguments import resolve_plan
from lightning_ddpopt.hooks.hook import CommHook, HookContext, run_hook
from lightning_ddpopt.hooks.registry import build_hook
from lightning_ddpopt.messages import say, say_here, some
from lightning_ddpopt.plan import CUSTOM_HOOK, Plan
from lightning_ddpopt.tuning.options import TuningOptions
from lightning_ddpopt.tuning.run import HOOKS_ALLOWED, AutoTuning
from lightning_ddpopt.tuning.session import TuningSession
from lightning_ddpopt.tuning.verdict import Verdict
from lightning_ddpopt.wrapping import Layout, TrainableSet

log = logging.getLogger(__name__)

CHECKPOINT_KEY = "ddpopt"
START_METHODS = ("popen", "spawn", "fork", "forkserver")


class DDPOptStrategy(DDPStrategy):
    """Lightning's ``DDPStrategy`` that exchanges gradients by a :class:`~lightning_ddpopt.plan.Plan`.

    Args:
        plan: a plan, or the path of one that :meth:`Plan.save` wrote. The five arguments after it then stay unset.
        static_graph: your promise that every iteration uses the same graph; never guessed.
        gradient_as_bucket_view: let ``.grad`` be views into the buckets: one gradient copy less in memory and time.
        bucket_cap_mb: ``"auto"`` (tuned on the first training steps), None (torch's default: 1 MiB, then 25), MiB,
            or MiB for each bucket in gradient-ready order.
        comm_hook: ``"none"`` (exact), ``"fp16"``, ``"bf16"``, ``"powersgd"``, a callable ``hook(state, bucket)``, or
            ``"auto"``: exact, or a hook that ``allow`` covers where its trial was faster; such trials train lossily.
        comm_hook_options: options of a named hook (see :data:`~lightning_ddpopt.plan.HOOK_DEFAULTS`); for a callable
            ``{"state": ...}``.
        allow: what ``comm_hook="auto"`` may choose: ``"quantized"`` (bf16) or ``"low_rank"`` (PowerSGD too).
        tuning: whether what is ``"auto"`` is tuned; ``"observe"`` trains by torch's default capacity and says what
            could be gained; or a mapping of options (see :class:`~lightning_ddpopt.tuning.options.TuningOptions`).
        gradient_check_steps: number of synchronised backward passes after each wrap in which the ranks compare their
            gradients and raise where they differ; 0 turns it off. It waits for the device in those steps.
        **kwargs: all arguments of ``DDPStrategy``, and through it those of DistributedDataParallel.

    With ``DDPOPT_DISABLE=1`` in the environment it is stock DDP: the arguments above are checked and then ignored,
    those of ``DDPStrategy`` and DDP apply as they would there.

    Raises:
        ValueError: a value that cannot work, with what is allowed and the fix. What only the model shows is raised by
            ``Trainer.fit`` before the first wrap.

    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | Sequence[float] | str | None = "auto",
        comm_hook: str | Callable[..., Any] = "none",
        comm_hook_options: Mapping[str, Any] | None = None,
        allow: str = "quantized",
        tuning: bool | str | Mapping[str, Any] = True,
        gradient_check_steps: int = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._ddp_kwargs = wrapping.checked_ddp_arguments(self._ddp_kwargs)
        if self._start_method not in START_METHODS:
            raise ValueError(f"start_method={self._start_method!r} is not one of {', '.join(START_METHODS)}.")
        period = self._model_averaging_period
        if period is not None and (isinstance(period, bool) or not isinstance(period, int) or period < 1):
            raise ValueError(f"model_averaging_period={period!r} must be a whole number of at least 1.")
        if isinstance(self._ddp_comm_state, PostLocalSGDState) and period is None:
            raise ValueError("ddp_comm_state is a PostLocalSGDState, which needs model_averaging_period, in steps.")
        if allow not in HOOKS_ALLOWED:
            raise ValueError(f"allow={allow!r} is not one of {', '.join(map(repr, HOOKS_ALLOWED))}.")
        tuning_options = TuningOptions.of(tuning)
        if (
            isinstance(gradient_check_steps, bool)
            or not isinstance(gradient_check_steps, int)
            or gradient_check_steps < 0
        ):
            raise ValueError(f"gradient_check_steps={gradient_check_steps!r} must be a whole number, 0 to turn it off.")
        self.plan = resolve_plan(
            plan,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            comm_hook=comm_hook,
            comm_hook_options=comm_hook_options,
            ddp_comm_hook=self._ddp_comm_hook,
            ddp_comm_state=self._ddp_comm_state,
            ddp_comm_wrapper=self._ddp_comm_wrapper,
        )
        self._disabled = _is_disabled()
        is_auto_hook = isinstance(comm_hook, str) and comm_hook == "auto"
        self._tuning = AutoTuning(
            None if self._disabled else tuning_options,
            self.plan,
            tunes_capacity=plan is None and isinstance(bucket_cap_mb, str),
            hooks=HOOKS_ALLOWED[allow] if is_auto_hook else (),
            ddp_arguments=self._ddp_kwargs,
        )
        self._gradient_check_steps = gradient_check_steps
        if self._disabled:
            self.plan = Plan.stock()
        elif callable(comm_hook):  # to where Lightning keeps it
            self._ddp_comm_hook = comm_hook
            self._ddp_comm_state = (comm_hook_options or {}).get("state")
        self._hook: CommHook | None = None
        self._hook_state_to_load: Mapping[str, Any] | None = None
        self._wrapped_plan: Plan | None = None
        self._trainable: TrainableSet | None = None
        self._backwards_since_wrap = 0
        self._has_unsynced_gradients = False
        self._wrapped_in_forward = False
        self._layout: Layout | None = None
        self._payload_bytes: int | None = None
        self._told: set[str] = set()
        self._agreed_plan: Plan | None = None

    @property
    def accelerator(self) -> Accelerator | None:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        if type(accelerator).__module__.split(".")[0] == "pytorch_lightning":
            raise TypeError(twin.MESSAGE)
        self._accelerator = accelerator

    # ---------------------------------------------------------------------------------------- what it did

    @property
    def layout(self) -> Layout | None:
        """The buckets that DDP formed; None before it is known and at world size 1.

        Kept after ``fit`` in the processes that trained: with ``start_method`` spawn or fork not in the calling one.

        """
        return self._layout

    @property
    def bytes_sent_per_step(self) -> float | None:
        """Bytes this rank sends for one synchronised backward; None before it is known, at world size 1, and with
        a callable hook.

        See :func:`~lightning_ddpopt.wrapping.all_reduce_bytes_sent`.

        """
        payload = self._payload_bytes
        if payload is None and self.plan.hook.name == "none" and self._layout is not None:
            payload = self._layout.total_bytes
        return None if payload is None else wrapping.all_reduce_bytes_sent(payload, self._reduction_size)

    @property
    def verdict(self) -> Verdict | None:
        """What tuning found; None before, and where nothing is tuned."""
        return self._tuning.verdict

    @property
    def is_tuning(self) -> bool:
        """Whether the current training steps are trials of the tuner."""
        return self._session is not None

    @property
    def _session(self) -> TuningSession | None:
        return self._tuning.session

    def change_plan(self, plan: Plan) -> None:
        """Exchange gradients by ``plan`` from the next optimizer step on: re-wrap before the forward that leads to it.

        Parameters, optimizer state and accumulated gradients stay as they are. Every rank must call it between the
        same two steps, with an equal plan.

        Raises:
            ValueError: not a plan, or one that this strategy or its module cannot carry out.

        """
        if not isinstance(plan, Plan):
            raise ValueError(f"change_plan takes a Plan, not {plan!r}; Plan.load reads one from a file.")
        if self._disabled:
            say(log, "DDPOPT_DISABLE is set: change_plan has no effect")
            return
        if plan.hook.name == CUSTOM_HOOK and plan.hook != self.plan.hook:
            raise ValueError(f"the strategy was not given the callable {plan.hook.options.get('callable')!r}.")
        if plan.hook.name == "none" and self._ddp_comm_wrapper is not None:
            raise ValueError("ddp_comm_wrapper wraps a hook, and the new plan has none: name a hook in it.")
        if self._wrapped_plan is not None and self.lightning_module is not None:
            wrapping.check_module(self.lightning_module, plan, self._ddp_kwargs)
        self._tuning.switch_off()  # in later fits, too
        self.plan = plan

    # ---------------------------------------------------------------------------------------- Lightning's life cycle

    @override
    def setup_distributed(self) -> None:
        was_initialized = dist.is_initialized()
        super().setup_distributed()
        # Lightning destroys the group at exit for nccl only; without it one gloo run in 40 aborts at exit.
        if not was_initialized and dist.get_backend() != "nccl":
            atexit.register(_destroy_process_group)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        assert self.lightning_module is not None
        self._forget_previous_fit()
        if self._disabled:
            say(log, "DDPOPT_DISABLE is set: stock DistributedDataParallel with torch's default settings")
            return super().configure_ddp()
        if self.world_size == 1:
            say(log, f"world size 1: the module is not wrapped, nothing is exchanged (not applied: {self.plan})")
            return None
        wrapping.check_module(self.model, self.plan, self._ddp_kwargs)
        if self.plan.static_graph and self._ddp_kwargs.get("find_unused_parameters"):
            say(
                log,
                "static_graph=True finds unused parameters itself, in its first iteration:"
                " find_unused_parameters=True changes nothing",
            )
        self._trainable = TrainableSet(self.lightning_module)
        if self._tuning.is_on:
            loaded = self.plan.hook
            self.plan = self._tuning.begin(self.lightning_module, self._reduction_group, self.root_device)
            if self._hook_state_to_load is not None and self.plan.hook != loaded:
                say(
                    log,
                    f"the checkpoint's state of hook {loaded} is not used: tuning begins anew, with {self.plan.hook}",
                )
                self._hook_state_to_load = None
        self._hook = self._build_hook()
        trainer = self.lightning_module.trainer
        first_syncs = self.lightning_module.automatic_optimization and trainer.accumulate_grad_batches == 1
        self._wrap(self._plan_if(first_syncs))
        return None

    @override
    def _register_ddp_hooks(self) -> None:
        if self._disabled:
            return super()._register_ddp_hooks()
        if self.plan.hook.name == "none":
            return None
        assert isinstance(self.model, DistributedDataParallel)
        state, hook = (self._hook, run_hook) if self._hook is not None else (self._ddp_comm_state, self._ddp_comm_hook)
        if self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        assert hook is not None
        wrapping.register_hook(self.model, state, hook)
        return None

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # LearningRateFinder and the like train, and end training, inside a fit.
        if self._wrapped_plan is not None and self._tuning.is_on and self.verdict is None and not self.is_tuning:
            assert self.lightning_module is not None
            self.plan = self._tuning.begin(self.lightning_module, self._reduction_group, self.root_device)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._wrapped_plan is None:
            return
        assert isinstance(self.model, DistributedDataParallel)
        if self._wrapped_in_forward:
            wrapping.end_manual_forward(self.model)
            self._wrapped_in_forward = False
        self._note_layout()
        assert self._trainable is not None
        changed = self._trainable.changed()
        if changed:
            self._rewrap_for_trainable(changed)
        else:
            self._tune(self.model)
            self._wrap_if_needed()
        if self._session is not None:
            self._session.batch_started(self.model)

    def _wrap_if_needed(self) -> None:
        """Re-wrap for a new plan, or for a graph that becomes static, at a micro-batch where that can be done."""
        syncs = self._next_backward_syncs()
        target = self._plan_if(syncs)
        # A new plan waits for the micro-batch that synchronises, unless the wrapper could not take the one before it; a
        # wrapper that looks for unused parameters must see the whole window.
        waits = syncs is False and not self._has_unlearned_static_graph
        if self._looks_for_unused and not target.static_graph:
            waits = self._has_unsynced_gradients
        if target != self._wrapped_plan and not waits:
            self._wrap(target) if self._session is None else self._wrap_for_trial(self._session, target)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._wrapped_plan is not None:
            if self._hook is not None:
                self._hook.loss_scale = self._loss_scale()
            assert self.lightning_module is not None
            self._refuse_late_changes()
            if not self.lightning_module.automatic_optimization:
                self._prepare_static_graph()
        super().pre_backward(closure_loss)
        if self._session is not None:
            self._session.backward_started()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        model = self.model
        if not isinstance(model, DistributedDataParallel) or self._wrapped_plan is None:
            return super().post_backward(closure_loss)
        self._has_unsynced_gradients = not model.require_backward_grad_sync
        if self._has_unsynced_gradients:
            if self._session is not None:
                self._session.backward_ended(synchronised=False)
            return None
        super().post_backward(closure_loss)  # in manual optimisation, reduces a static graph's first iteration
        self._backwards_since_wrap += 1
        if self._hook is not None:
            self._payload_bytes = self._hook.take_payload_bytes()
        checks = self._gradient_check_steps
        if self._session is not None:
            self._session.backward_ended(synchronised=True, payload_bytes=self._payload_bytes)
            checks = min(checks, self._session.discards)  # a check takes time
        if self._backwards_since_wrap <= checks:
            self._check_gradients(model)
        return None

    @override
    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._session is not None:
            self._session.optimizer_stepped()
        return output

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._note_layout(last_chance=True)
        if self._stop_tuning():
            say(log, "training ended before tuning did: no verdict")

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        holds_training_state = "optimizer_states" in checkpoint
        if holds_training_state and self._agreed_plan is not None:
            checkpoint[CHECKPOINT_KEY] = {"plan": self.plan.to_dict(), "hook_state": self._hook_state_to_save()}
            checkpoint[CHECKPOINT_KEY] |= self._tuning.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        ours = checkpoint.get(CHECKPOINT_KEY)
        if ours and self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            if self._wrapped_plan is None:
                self.plan = self._tuning.load_state_dict(ours) or self.plan
            saved, current = ours["plan"]["hook"], self.plan.to_dict()["hook"]
            if ours["hook_state"] and saved == current:
                if self._wrapped_plan is not None and self._hook is not None:
                    self._hook.load_state_dict(ours["hook_state"])  # in the middle of a fit, as LearningRateFinder does
                else:
                    self._hook_state_to_load = ours["hook_state"]
            elif ours["hook_state"]:
                say(log, f"the checkpoint's state of hook {saved} is not used: this run's hook is {current}")
        return checkpoint

    @override
    def teardown(self) -> None:
        super().teardown()
        self._stop_tuning()
        self._wrapped_plan = None
        self._hook_state_to_load = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for name, hook in twin.strategy_names().items():
            description = f"DDPOptStrategy with comm_hook {hook!r}"
            strategy_registry.register(name, cls, description, override=True, comm_hook=hook)

    # ---------------------------------------------------------------------------------------- tuning

    def _tune(self, model: DistributedDataParallel) -> None:
        """Between two batches: take the plan for the next steps from the tuner."""
        if not self._tuning.has_work:
            return
        assert self.lightning_module is not None
        was_tuning = self.is_tuning
        self.plan = self._tuning.next_plan(self.plan, model, self.lightning_module, self._reduction_group)
        if was_tuning and not self.is_tuning:
            self._layout = None  # to be told once more: of the plan that stays

    def _stop_tuning(self) -> bool:
        """Without a verdict; whether it was under way."""
        plan = self._tuning.stop()
        self.plan = plan or self.plan
        return plan is not None

    def _wrap_for_trial(self, session: TuningSession, plan: Plan) -> None:
        """Where the wrap fails on one rank, all go back to torch's default capacity, and hear of it."""
        started = time.perf_counter()
        succeeded = True
        try:
            self._wrap(plan)
        except Exception as error:
            session.fail(error)
            succeeded = False
        if not session.all_ranks_succeeded(succeeded):
            self.plan = self._tuning.default
            self._hook = self._build_hook()
            self._wrap(self._plan_if(self._next_backward_syncs()))
        session.rewrapped(time.perf_counter() - started)

    def _forget_previous_fit(self) -> None:
        self._stop_tuning()
        self._hook = None
        self._has_unsynced_gradients = False
        self._wrapped_plan = None
        self._wrapped_in_forward = False
        self._layout = None
        self._payload_bytes = None
        self._agreed_plan = None

    def _build_hook(self) -> CommHook | None:
        if self.plan.hook.name in ("none", CUSTOM_HOOK):
            return None
        assert self.lightning_module is not None
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}
        hook = build_hook(self.plan.hook, HookContext(self._reduction_group, names))
        if hook is not None and self._hook_state_to_load is not None:
            hook.load_state_dict(self._hook_state_to_load)
        self._hook_state_to_load = None
        return hook

    def _wrap(self, plan: Plan) -> None:
        """Wrap the module, or re-wrap it, with the hook registered. Collective."""
        is_new = self._agreed_plan != self.plan
        if is_new:
            self._agree_on(self.plan)
        if self._wrapped_plan is not None and plan.hook != self._wrapped_plan.hook:
            self._hook = self._build_hook()
            self._payload_bytes = None
        syncs_buffers_next = None if self._wrapped_plan is None else True
        if isinstance(self.model, DistributedDataParallel):
            # No reference may stay: a wrapper that lives keeps its buckets, beside those of the new one.
            self.model, syncs_buffers_next = wrapping.unwrap(self.model)
        assert self.model is not None
        self.model = wrapping.wrap(
            self.model,
            plan,
            device_ids=self.determine_ddp_device_ids(),
            ddp_arguments=self._ddp_kwargs,
            syncs_buffers_next=syncs_buffers_next,
        )
        self._wrapped_plan = plan
        self._register_ddp_hooks()
        self._backwards_since_wrap = 0
        self._layout = None
        # Lightning never resets it: without this, ranks drift silently from the second wrap on (static graph, manual
        # optimisation; lightning 2.6.6).
        self._pl_static_graph_delay_done = False
        if is_new and (self._session is None or syncs_buffers_next is None):
            say(log, f"plan: {self.plan}{', to be tuned' if self._session else ''}")

    def _agree_on(self, plan: Plan) -> None:
        """Make sure that all ranks are about to wrap by the same plan: else they would reduce unlike buckets."""
        digest = hashlib.sha256(plan.to_json().encode()).digest()
        if not wrapping.ranks_agree(digest, self._ddp_kwargs.get("process_group"), self.root_device):
            raise RuntimeError(
                f"The ranks have different plans; rank {self.global_rank} has: {plan}. Give every rank the same"
                " arguments, plan file and environment, and call change_plan on all ranks with the same plan."
            )
        self._agreed_plan = plan

    def _plan_if(self, syncs: bool | None, *, relearn: bool = False) -> Plan:
        """The plan to be wrapped in if the next backward does (not) synchronise; None: not known.

        A static graph learns its graph in the first backward after the wrap, which must be one that synchronises: under
        ``no_sync()`` it crashes (torch 2.11 to 2.14). Until then the module is wrapped with a dynamic graph.

        """
        learned = self._wrapped_plan == self.plan and not self._has_unlearned_static_graph and not relearn
        if self.plan.static_graph and not syncs and not learned:
            return replace(self.plan, static_graph=False)
        return self.plan

    @property
    def _looks_for_unused(self) -> bool:
        return bool(self._ddp_kwargs.get("find_unused_parameters")) and not self.plan.static_graph

    @property
    def _reduction_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup | None = self._ddp_kwargs.get("process_group") or dist.group.WORLD
        assert group is not None
        return group

    @property
    def _reduction_size(self) -> int:
        group = self._ddp_kwargs.get("process_group")
        return self.world_size if group is None else int(group.size())

    @property
    def _has_unlearned_static_graph(self) -> bool:
        return self._wrapped_plan is not None and self._wrapped_plan.static_graph and self._backwards_since_wrap == 0

    def _next_backward_syncs(self) -> bool | None:
        """None where nobody knows: in manual optimisation, where ``training_step`` decides for each backward."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            return None
        return not self.lightning_module.trainer.fit_loop._should_accumulate()

    def _prepare_static_graph(self) -> None:
        """In manual optimisation: make the static wrap at the first backward that synchronises.

        This runs inside the forward of the wrapper in use, which ends its forward as before; the new one serves from
        this backward on.

        """
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        if not self.plan.static_graph or not model.require_backward_grad_sync:
            return
        if model.static_graph:
            return
        assert self._trainable is not None
        if self._trainable.changed():
            self._say_once(
                "static_graph=True has no effect while training_step switches requires_grad (toggle_optimizer):"
                " that graph is not static",
            )
            return
        self._wrap(self.plan)
        self._wrapped_in_forward = True

    def _refuse_late_changes(self) -> None:
        """Between forward and backward it is too late to re-wrap: DDP would not reduce a gradient that is new.

        Freezing there is allowed (``toggle_optimizer``), and DDP's own matter.

        """
        assert self._trainable is not None
        late = self._trainable.newly_trainable()
        if late:
            raise RuntimeError(
                f"requires_grad of {some(late)} changed inside training_step, where its gradient would not be averaged"
                " over the ranks: change it before, in on_train_batch_start or earlier."
            )

    def _rewrap_for_trainable(self, changed: list[str]) -> None:
        """DDP reduces only what was trainable when it wrapped: without this, ranks drift silently."""
        assert self.lightning_module is not None
        assert self._trainable is not None
        # On each rank that sees it: where one does not, the others wait here until the group's timeout.
        say_here(log, f"rank {self.global_rank}: requires_grad changed of {some(changed)}")
        left_over = self._trainable.newly_frozen()
        self._trainable = TrainableSet(self.lightning_module)
        group = self._ddp_kwargs.get("process_group")
        if not wrapping.ranks_agree(self._trainable.digest(), group, self.root_device):
            raise RuntimeError(
                f"The ranks do not train the same parameters any more: on rank {self.global_rank} {some(changed)}"
                " changed requires_grad. Freeze and unfreeze on all ranks at the same step."
            )
        wrapping.check_module(self.lightning_module, self.plan, self._ddp_kwargs)
        if self._tuning.is_on:
            self.plan = self._tuning.begin_anew(self.lightning_module, self._reduction_group, self.root_device)
        if self._has_unsynced_gradients:
            # The new wrapper will not reduce what earlier micro-batches of this window left in some `.grad`.
            if self._looks_for_unused:
                left_over = [parameter for _, parameter in wrapping.reduced_parameters(self.lightning_module)]
            if left_over:
                wrapping.average_gradients(left_over, group)
        self._wrap(self._plan_if(self._next_backward_syncs(), relearn=True))
        say(log, f"re-wrapped for {some(changed)}")

    # ---------------------------------------------------------------------------------------- gradients and hook state

    def _check_gradients(self, model: DistributedDataParallel) -> None:
        if isinstance(self._ddp_comm_state, PostLocalSGDState):
            return  # leaves gradients different by design
        names = wrapping.gradients_that_differ(model)
        if not names:
            return
        message = (
            f"After backward, the gradients of {some(names)} are not the same on all ranks (checked on step"
            f" {self._backwards_since_wrap} after the wrap), so the ranks would drift apart."
        )
        if self.plan.hook.name == CUSTOM_HOOK:
            self._say_once(f"{message} If the hook means that, set gradient_check_steps=0", level=logging.WARNING)
            return
        raise RuntimeError(
            f"{message} Something changed .grad or the graph on one rank only."
            " gradient_check_steps=0 turns the check off."
        )

    def _loss_scale(self) -> Tensor | None:
        """What the loss was multiplied by, on the device; None without a GradScaler."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return None if scaler is None else scaler.scale(torch.ones((), device=self.root_device))

    def _hook_state_to_save(self) -> dict[str, Any]:
        if self._hook is None:
            return {}
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED:
            # One rank may be here alone: no collective.
            say(log, "interrupted: the checkpoint holds no compression residuals", level=logging.WARNING)
            return self._hook.state_dict(with_residuals=False)
        self._hook.average_residuals()
        return self._hook.state_dict()

    # ---------------------------------------------------------------------------------------- telling

    def _note_layout(self, *, last_chance: bool = False) -> None:
        """Read and tell the layout once, as soon as DDP's logging data show the rebuilt buckets."""
        model = self.model
        if self._layout is not None or not isinstance(model, DistributedDataParallel) or not self._backwards_since_wrap:
            return
        layout = wrapping.layout_of(model)
        is_final = layout.rebuilt or not wrapping.rebuilds_buckets(model)
        # The logging data lag behind by up to three iterations and stop after the first ten.
        if is_final or last_chance or self._backwards_since_wrap > 8:
            self._layout = layout
            if self._session is None:
                say(log, f"layout: {layout}{'' if is_final else ', not rebuilt in gradient-ready order yet'}")

    def _say_once(self, message: str, level: int = logging.INFO) -> None:
        if message not in self._told:
            self._told.add(message)
            say(log, message, level)


def _is_disabled() -> bool:
    return os.environ.get("DDPOPT_DISABLE", "").strip().lower() not in ("", "0", "false", "no", "off")


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


DDPOptStrategy.register_strategies(StrategyRegistry)


@when_imported("pytorch_lightning")
def _pass_the_type_check_of_the_twin(pytorch_lightning: Any) -> None:
    """Let the twin's Trainer get as far as our `accelerator` setter, which says what is wrong."""
    pytorch_lightning.strategies.Strategy.register(DDPOptStrategy)
