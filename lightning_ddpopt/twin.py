"""Tells users of ``pytorch_lightning.Trainer`` that the strategy belongs to ``lightning.pytorch``.

The two namespaces hold separate classes, and the twin's own refusal ("invalid strategy name") names neither the cause
nor the fix.
"""

from typing import Any, NoReturn

from lightning_ddpopt.plan import HOOK_DEFAULTS

MESSAGE = (
    "DDPOptStrategy works with `lightning.pytorch.Trainer`, not with `pytorch_lightning.Trainer`:"
    " replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl`."
)


def strategy_names() -> dict[str, str]:
    """Registered strategy name -> hook name: ``ddpopt`` for exact gradients, ``ddpopt_HOOK`` for each hook."""
    return {"ddpopt" if hook == "none" else f"ddpopt_{hook}": hook for hook in HOOK_DEFAULTS}


def refuse(pytorch_lightning: Any) -> None:
    """Make every strategy name of ours raise in the twin's registry. Instances are caught by the strategy itself."""

    def raise_wrong_namespace() -> NoReturn:
        raise TypeError(MESSAGE)

    for name in strategy_names():
        pytorch_lightning.strategies.StrategyRegistry.register(name, raise_wrong_namespace, override=True)
