"""Turns the strategy's arguments into a plan, and refuses those that contradict each other."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ddpopt.plan import CUSTOM_HOOK, HookSpec, Plan


def resolve_plan(
    plan: Plan | str | Path | None,
    *,
    static_graph: bool,
    gradient_as_bucket_view: bool,
    bucket_cap_mb: float | Sequence[float] | str | None,
    comm_hook: str | Callable[..., Any],
    comm_hook_options: Mapping[str, Any] | None,
    ddp_comm_hook: Callable[..., Any] | None,
    ddp_comm_state: object | None,
    ddp_comm_wrapper: Callable[..., Any] | None,
) -> Plan:
    """The plan that the arguments of ``DDPOptStrategy`` describe.

    Raises:
        ValueError: names the value, what is allowed and the fix.

    """
    _refuse_two_hooks(comm_hook, comm_hook_options, ddp_comm_hook)
    if isinstance(comm_hook, str) and comm_hook == "auto" and comm_hook_options:
        raise ValueError("comm_hook_options are for a named hook, and comm_hook='auto' chooses one: give one of them.")
    if ddp_comm_state is not None and ddp_comm_hook is None:
        raise ValueError("ddp_comm_state belongs to ddp_comm_hook, which is not given; comm_hook takes its options.")
    if ddp_comm_wrapper is not None and not callable(ddp_comm_wrapper):
        raise ValueError(f"ddp_comm_wrapper={ddp_comm_wrapper!r} is not callable: give a function that wraps a hook.")
    if isinstance(bucket_cap_mb, str) and bucket_cap_mb != "auto":
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} is not a capacity. The only word allowed is 'auto'.")
    if plan is None:
        capacity = None if isinstance(bucket_cap_mb, str) and bucket_cap_mb == "auto" else bucket_cap_mb
        custom = ddp_comm_hook if ddp_comm_hook is not None else comm_hook
        if callable(custom):
            name = getattr(custom, "__qualname__", type(custom).__qualname__)
            spec = HookSpec(CUSTOM_HOOK, {"callable": name})
        else:
            spec = HookSpec("none" if custom == "auto" else custom, comm_hook_options or {})
        resolved = Plan(static_graph, gradient_as_bucket_view, capacity, spec)  # type: ignore[arg-type]
    else:
        given = {
            "static_graph": static_graph is not False,
            "gradient_as_bucket_view": gradient_as_bucket_view is not True,
            "bucket_cap_mb": not isinstance(bucket_cap_mb, str) or bucket_cap_mb != "auto",
            "comm_hook": comm_hook != "none",
            "comm_hook_options": bool(comm_hook_options),
            "ddp_comm_hook": ddp_comm_hook is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise ValueError(f"plan and {name} both say how to exchange gradients: give one of them.")
        resolved = _given_plan(plan)
    if ddp_comm_wrapper is not None and resolved.hook.name == "none":
        raise ValueError("ddp_comm_wrapper wraps a hook, and there is none: give comm_hook or ddp_comm_hook too.")
    return resolved


def _refuse_two_hooks(comm_hook: object, options: Mapping[str, Any] | None, ddp_comm_hook: object) -> None:
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"comm_hook_options={options!r} must be a mapping of option names to values.")
    if ddp_comm_hook is not None:
        if not callable(ddp_comm_hook):
            raise ValueError(f"ddp_comm_hook={ddp_comm_hook!r} is not callable: give hooks by name as comm_hook.")
        if comm_hook != "none":
            raise ValueError("comm_hook and ddp_comm_hook both name a communication hook: give one of them.")
        if options:
            raise ValueError("comm_hook_options are not for ddp_comm_hook: give its state as ddp_comm_state.")
    elif callable(comm_hook):
        unknown = sorted(set(options or {}) - {"state"})
        if unknown:
            raise ValueError(f"comm_hook_options: a callable hook takes only 'state', not {unknown[0]!r}.")


def _given_plan(plan: Plan | str | Path) -> Plan:
    if not isinstance(plan, Plan | str | Path):
        raise ValueError(f"plan={plan!r} must be a Plan or the path of one that Plan.save wrote.")
    resolved = plan if isinstance(plan, Plan) else Plan.load(plan)
    if resolved.hook.name == CUSTOM_HOOK:
        raise ValueError(
            f"plan: its hook was the callable {resolved.hook.options.get('callable')!r}, which a plan cannot bring"
            " back: pass the plan's other settings one by one, and the callable as comm_hook."
        )
    return resolved
