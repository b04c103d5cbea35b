"""When each gradient becomes ready in backward, without making the host wait for the device."""

import weakref
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt.clock import mark
from lightning_ddpopt.wrapping import reduced_parameters


class BackwardRecorder:
    """Marks, in every backward pass, the moment at which each parameter's gradient is ready.

    It hooks the nodes that accumulate gradients, before DDP's own hook there, which copies gradients and starts
    reductions: their cost is not the gradient's. Nothing is kept of the gradients.

    Args:
        ddp: the wrapper.
        device: this rank's.

    Attributes:
        ddp: a weak reference to the wrapper, which must not outlive its re-wrap.
        marks: where to put the marks, by the parameter's index; the caller replaces it for each step.
        gradients: name, bytes and type of each parameter's gradient, by its index.

    """

    def __init__(self, ddp: DistributedDataParallel, device: torch.device) -> None:
        self.ddp = weakref.ref(ddp)
        self.marks: dict[int, Any] = {}
        self._device = device
        named = [(name, p) for name, p in reduced_parameters(ddp.module, ddp.parameters_to_ignore) if p.requires_grad]
        self.gradients = [
            (name, p.numel() * p.element_size(), str(p.dtype).removeprefix("torch.")) for name, p in named
        ]
        self._handles = [
            torch.autograd.graph.get_gradient_edge(p).node.register_prehook(partial(self._mark, index))
            for index, (_, p) in enumerate(named)
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _mark(self, index: int, gradients: Any) -> None:
        self.marks[index] = mark(self._device)
