"""Gradients cast to a 16-bit type for the wire: the hooks ``fp16`` and ``bf16``."""

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lightning_ddpopt.hooks.hook import CommHook, HookContext


class CastHook(CommHook):
    """Divide by the world size, cast, sum over the ranks in that type, cast back.

    As torch's ``fp16_compress_hook`` and ``bf16_compress_hook``, but the division happens before the cast and in the
    gradient's own precision, in one kernel with it, so that fp16 underflows later.

    Args:
        context: the run.
        dtype: ``torch.float16`` (11 bits of precision; above 65504 it overflows to inf) or ``torch.bfloat16`` (8 bits,
            the range of fp32).

    """

    def __init__(self, context: HookContext, dtype: torch.dtype) -> None:
        super().__init__(context)
        self.dtype = dtype

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        compressed = torch.empty_like(buffer, dtype=self.dtype)
        torch.div(buffer, self.context.world_size, out=compressed)

        def decompress(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            reduced: list[Tensor] = future.value()
            return buffer.copy_(reduced[0])

        return self.all_reduce(compressed).get_future().then(decompress)
