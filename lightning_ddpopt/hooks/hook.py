"""What every communication hook of ours is: state keyed by parameter name, and a count of the bytes it exchanged."""

# No `from __future__ import annotations` here: DDP compares the annotations of `run_hook` with the classes themselves.

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # `torch.distributed.GradBucket`, which mypy does not see


@dataclass(frozen=True)
class HookContext:
    """What a hook may know about the run it serves.

    Args:
        process_group: the group that DDP reduces over.
        parameter_names: parameter -> its name in the LightningModule, frozen parameters included, so that state
            survives re-wraps, other layouts and unfreezing.

    """

    process_group: dist.ProcessGroup
    parameter_names: Mapping[nn.Parameter, str]

    @property
    def world_size(self) -> int:
        return self.process_group.size()


class CommHook(ABC):
    """A DDP communication hook with its state.

    DDP calls :meth:`reduce` once per bucket and synchronised backward, in the same order on every rank. A hook starts
    its collectives inside that call and in a fixed order, never from a future's callback, whose order is free.

    """

    def __init__(self, context: HookContext) -> None:
        self.context = context
        self.loss_scale: Tensor | None = None
        self._payload_bytes = 0

    @abstractmethod
    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks.

        Args:
            bucket: this rank's gradients, one flat tensor, not divided by the world size.

        Returns:
            a future of the flat averaged gradients, of the bucket's shape and type, the same bits on every rank.

        """

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start summing ``tensor`` over the ranks in place, and count its bytes."""
        self._payload_bytes += tensor.numel() * tensor.element_size()
        work = dist.all_reduce(tensor, group=self.context.process_group, async_op=True)
        assert work is not None  # only a rank outside the group gets None
        return work

    def take_payload_bytes(self) -> int:
        """Bytes this rank has put into all-reduces since the last call."""
        taken, self._payload_bytes = self._payload_bytes, 0
        return taken

    def average_residuals(self) -> None:
        """Replace what this rank still owes by the mean over the ranks. Collective: every rank must call it."""

    def state_dict(self, *, with_residuals: bool = True) -> dict[str, Any]:
        """State as plain tensors on the CPU, numbers and dicts, which weights-only loading accepts.

        Args:
            with_residuals: False for a checkpoint that one rank writes alone, whose residuals speak for no other.

        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, possibly of a run with another world size."""


def run_hook(state: CommHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The function that DDP registers for every hook of ours."""
    return state.reduce(bucket)
