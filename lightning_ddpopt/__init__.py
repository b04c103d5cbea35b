"""A Lightning strategy that exchanges gradients in less time. Importing it imports neither torch nor Lightning.

The strategy names (``strategy="ddpopt"`` and one per hook) are registered as soon as ``lightning.pytorch`` is imported,
before or after this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

from lightning_ddpopt import twin
from lightning_ddpopt.plan import HookSpec, Plan

if TYPE_CHECKING:
    from lightning_ddpopt.profiling.capture import NsysCallback
    from lightning_ddpopt.profiling.monitor import OverlapMonitor
    from lightning_ddpopt.profiling.nvtx import NVTXProfiler
    from lightning_ddpopt.strategy import DDPOptStrategy
    from lightning_ddpopt.wrapping import Layout

__version__ = "0.1.0"
__all__ = [
    "DDPOptStrategy",
    "HookSpec",
    "Layout",
    "NVTXProfiler",
    "NsysCallback",
    "OverlapMonitor",
    "Plan",
    "__version__",
]

_LAZY = {
    "DDPOptStrategy": "lightning_ddpopt.strategy",
    "Layout": "lightning_ddpopt.wrapping",
    "NVTXProfiler": "lightning_ddpopt.profiling.nvtx",
    "NsysCallback": "lightning_ddpopt.profiling.capture",
    "OverlapMonitor": "lightning_ddpopt.profiling.monitor",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


@when_imported("lightning.pytorch")
def _register_strategies(lightning_pytorch: Any) -> None:
    import_module("lightning_ddpopt.strategy")  # registers the names as it defines the class


@when_imported("pytorch_lightning")
def _refuse_twin_namespace(pytorch_lightning: Any) -> None:
    twin.refuse(pytorch_lightning)
