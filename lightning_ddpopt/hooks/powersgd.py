"""PowerSGD: each weight matrix's gradient travels as the product of two thin matrices. The hook ``powersgd``."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # `torch.distributed.GradBucket`, which mypy does not see

from lightning_ddpopt.hooks.hook import CommHook, HookContext


class PowerSGDHook(CommHook):
    """Rank-r approximation of gradients with error feedback (Vogels, Karimireddy, Jaggi, NeurIPS 2019, algorithm 1).

    The algorithm of torch's ``powerSGD_hook``. Different here: state is keyed by parameter name and not by bucket, so
    that it outlives re-wraps and other layouts; a step with a non-finite gradient leaves no trace in it; the
    collectives run in a fixed order in the hook itself, so that several buckets work on gloo; no host synchronisation.

    A tensor of shape (n, …) is taken as a matrix of n rows. It is compressed when ``(rows + cols) * r *
    min_compression_rate < rows * cols``; all others travel exactly, together.

    Args:
        context: the run.
        matrix_approximation_rank: r, the columns of the two factors.
        start_powerSGD_iter: number of a parameter's first synchronised steps that travel exactly.
        min_compression_rate: see above.
        use_error_feedback: add to each gradient what the previous approximations of it left out.
        warm_start: start from the previous step's right factor instead of a new random one.
        random_seed: of the first right factor; the same on all ranks.

    """

    def __init__(
        self,
        context: HookContext,
        *,
        matrix_approximation_rank: int,
        start_powerSGD_iter: int,  # noqa: N803 - torch's name
        min_compression_rate: float,
        use_error_feedback: bool,
        warm_start: bool,
        random_seed: int,
    ) -> None:
        super().__init__(context)
        self.rank = matrix_approximation_rank
        self.start_step = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.random_seed = random_seed
        self._steps: dict[str, int] = {}
        self._right_factors: dict[str, Tensor] = {}  # (cols, r), fp32, equal on all ranks
        self._residuals: dict[str, Tensor] = {}  # (rows, cols), fp32, this rank's own, of the unscaled gradient
        self._stream: torch.cuda.Stream | None = None

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.device.type != "cuda":
            self._reduce_in_place(bucket)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future
        # DDP calls this on the stream that computes the backward pass: working there would stop it.
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(buffer.device))
        future = torch.futures.Future(devices=[buffer.device])
        with torch.cuda.stream(stream):
            self._reduce_in_place(bucket)
            future.set_result(buffer)  # DDP waits for what this stream holds now
        return future

    @torch.no_grad()
    def _reduce_in_place(self, bucket: GradBucket) -> None:
        exact: list[Tensor] = []
        by_shape: dict[tuple[int, int], list[tuple[str, Tensor]]] = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            assert isinstance(parameter, nn.Parameter)
            name = self.context.parameter_names[parameter]
            step = self._steps.get(name, 0)
            self._steps[name] = step + 1
            gradient = _as_stored(gradient, parameter)
            shape = self._matrix_shape(gradient)
            if step < self.start_step or shape is None:
                exact.append(gradient)
            else:
                by_shape.setdefault(shape, []).append((name, gradient))
        if exact:
            self._reduce_exactly(exact)
        if by_shape:
            self._reduce_compressed(by_shape)

    def _matrix_shape(self, gradient: Tensor) -> tuple[int, int] | None:
        if gradient.ndim < 2 or gradient.numel() == 0:
            return None
        rows, cols = gradient.shape[0], gradient[0].numel()
        compressed = (rows + cols) * min(self.rank, rows, cols)
        return (rows, cols) if compressed * self.min_compression_rate < rows * cols else None

    def _reduce_exactly(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).div_(self.context.world_size)
        self._wait(self.all_reduce(flat))
        self._scatter(flat, gradients)

    def _reduce_compressed(self, by_shape: Mapping[tuple[int, int], list[tuple[str, Tensor]]]) -> None:
        groups = list(by_shape.values())
        names = [[name for name, _ in group] for group in groups]
        matrices = [
            torch.stack([gradient.reshape(shape).float() for _, gradient in group]) for shape, group in by_shape.items()
        ]
        # DDP drops the result for a parameter that no rank used; nothing may be taken from its residual then.
        used = [(matrix != 0).any(dim=(1, 2)).float() for matrix in matrices]
        if self.use_error_feedback:
            for group_names, matrix in zip(names, matrices, strict=True):
                self._add_residuals(group_names, matrix)
        previous = [self._previous_rights(n, m) for n, m in zip(names, matrices, strict=True)]

        lefts = [matrix @ right for matrix, right in zip(matrices, previous, strict=True)]
        self._average([*lefts, *used])
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights = [matrix.mT @ left for matrix, left in zip(matrices, lefts, strict=True)]
        self._average(rights)

        for group, matrix, left, right, before, is_used in zip(
            groups, matrices, lefts, rights, previous, used, strict=True
        ):
            approximation = left @ right.mT
            self._remember([name for name, _ in group], matrix - approximation, right, before, is_used)
            result = torch.where(is_used[:, None, None] != 0, approximation, torch.zeros_like(approximation))
            for (_, gradient), reduced in zip(group, result, strict=True):
                gradient.copy_(reduced.reshape(gradient.shape))

    def _add_residuals(self, names: list[str], matrix: Tensor) -> None:
        for index, name in enumerate(names):
            residual = self._residuals.get(name)
            if residual is not None:
                scale = 1.0 if self.loss_scale is None else self.loss_scale
                matrix[index].add_(residual * scale)

    def _previous_rights(self, names: list[str], matrices: Tensor) -> Tensor:
        cols, rank = matrices.shape[2], min(self.rank, *matrices.shape[1:])
        rights = []
        for name in names:
            right = self._right_factors.get(name)
            if right is None or right.shape != (cols, rank):
                right = self._random_right(name, cols, rank, matrices.device)
            rights.append(right)
        return torch.stack(rights)

    def _random_right(self, name: str, cols: int, rank: int, device: torch.device) -> Tensor:
        step = 0 if self.warm_start else self._steps[name]
        generator = torch.Generator(device).manual_seed(crc32(f"{self.random_seed}/{name}/{step}".encode()))
        return torch.randn(cols, rank, generator=generator, device=device)

    def _remember(
        self, names: list[str], residuals: Tensor, rights: Tensor, previous_rights: Tensor, used: Tensor
    ) -> None:
        """Keep the state of this step, except where it is not finite or unused: there the previous state stays.

        The averaged right factor tells, since an inf or NaN of any rank ends in it and it is the same on all ranks.

        """
        keep = rights.isfinite().all(dim=(1, 2)) & (used != 0)
        if self.loss_scale is not None:
            residuals = residuals / self.loss_scale
        for index, name in enumerate(names):
            if self.warm_start:
                self._right_factors[name] = torch.where(keep[index], rights[index], previous_rights[index])
            if self.use_error_feedback:
                before = self._residuals.get(name, torch.zeros((), device=residuals.device))
                self._residuals[name] = torch.where(keep[index], residuals[index], before)

    def _average(self, factors: list[Tensor]) -> None:
        flat = torch.cat([factor.reshape(-1) for factor in factors]).div_(self.context.world_size)
        self._wait(self.all_reduce(flat))
        self._scatter(flat, factors)

    @staticmethod
    def _scatter(flat: Tensor, tensors: list[Tensor]) -> None:
        for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
            tensor.copy_(part.view_as(tensor))

    @staticmethod
    def _wait(work: dist.Work) -> None:
        work.wait()  # NCCL: the current stream waits, not the host

    def average_residuals(self) -> None:
        for name in sorted(self._residuals):
            residual = self._residuals[name].div_(self.context.world_size)
            dist.all_reduce(residual, group=self.context.process_group)

    def state_dict(self, *, with_residuals: bool = True) -> dict[str, Any]:
        residuals = self._residuals if with_residuals else {}
        return {
            "steps": dict(self._steps),
            "right_factors": {name: right.to("cpu", copy=True) for name, right in self._right_factors.items()},
            "residuals": {name: residual.to("cpu", copy=True) for name, residual in residuals.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        devices = {name: parameter.device for parameter, name in self.context.parameter_names.items()}

        def on_device(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: tensor.to(devices[name]) for name, tensor in tensors.items() if name in devices}

        self._steps = dict(state["steps"])
        self._right_factors = on_device(state["right_factors"])
        self._residuals = on_device(state["residuals"])


def _as_stored(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    """``gradient`` with the strides in which DDP stores it: the parameter's own, where these fill their memory.

    ``GradBucket.gradients()`` shows it as if it were contiguous, which scrambles a transposed matrix (torch 2.11 to
    2.14).

    """
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size != 1 and stride != expected:
            return gradient
        expected *= size
    return gradient.as_strided(parameter.shape, parameter.stride())
