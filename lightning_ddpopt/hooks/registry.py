"""Builds communication hooks by name, at wrap time. Names, options and defaults stand in ``plan``."""

import torch

from lightning_ddpopt.hooks.cast import CastHook
from lightning_ddpopt.hooks.hook import CommHook, HookContext
from lightning_ddpopt.hooks.powersgd import PowerSGDHook
from lightning_ddpopt.plan import HookSpec


def build_hook(spec: HookSpec, context: HookContext) -> CommHook | None:
    """The hook that ``spec`` names, with fresh state. None for ``"none"``: DDP's own all-reduce."""
    match spec.name:
        case "none":
            return None
        case "fp16":
            return CastHook(context, torch.float16)
        case "bf16":
            return CastHook(context, torch.bfloat16)
        case "powersgd":
            return PowerSGDHook(context, **spec.options)  # type: ignore[arg-type]
    raise AssertionError(f"{spec.name!r} has no implementation here")
