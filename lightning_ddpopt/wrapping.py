"""Wraps a module in DistributedDataParallel as a plan says, and reads back what DDP made of it.

The only module that touches DDP's arguments and private parts. Knows no Lightning; when to wrap is the strategy's.
"""

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # `torch.distributed.GradBucket`, which mypy does not see
from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt.plan import Plan

DDP_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}
# What the plan or Lightning sets; the rest is free for the user to pass through the strategy.
_SET_ELSEWHERE = {
    "device_ids": "Lightning sets it from Trainer(devices=...)",
    "output_device": "Lightning sets it from Trainer(devices=...)",
    "bucket_cap_mb_list": "give the list as bucket_cap_mb",
    "device_mesh": "give the mesh's group as process_group",
}


# DDP's flags and their defaults; it takes any truthy value for True, "false" among them.
_FLAGS: dict[str, bool | None] = {
    name: parameter.default
    for name, parameter in inspect.signature(DistributedDataParallel.__init__).parameters.items()
    if isinstance(parameter.default, bool) or name in ("broadcast_buffers", "forward_sync_buffers")
}


def checked_ddp_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments for DDP, without those that it lacks or that something else sets.

    What something else sets may be given as None: LightningCLI spells out every default of DDP.

    Raises:
        ValueError: names the argument, what is allowed and the fix.

    """
    for name, value in arguments.items():
        if name in _FLAGS and not isinstance(value, bool) and not (value is None and _FLAGS[name] is None):
            raise ValueError(f"{name}={value!r} must be True or False.")
        if name in _SET_ELSEWHERE and arguments[name] is not None:
            raise ValueError(f"{name}={arguments[name]!r} cannot be passed on to DDP: {_SET_ELSEWHERE[name]}.")
        if name not in DDP_ARGUMENTS:
            allowed = ", ".join(sorted(DDP_ARGUMENTS - set(_SET_ELSEWHERE)))
            raise ValueError(
                f"{name!r} is neither an argument of DDPOptStrategy nor of Lightning's DDPStrategy, and"
                f" torch.nn.parallel.DistributedDataParallel has none of that name. DDP's are: {allowed}."
            )
    return {name: value for name, value in arguments.items() if name not in _SET_ELSEWHERE}


@dataclass(frozen=True)
class Layout:
    """The buckets of one wrapped module.

    Args:
        bucket_bytes: bytes of gradient in each bucket, in the order of reduction.
        rebuilt: whether these are the buckets that DDP formed in gradient-ready order. The first backward passes after
            a wrap (one, with a static graph two) still run on buckets in reverse order of the parameters.

    """

    bucket_bytes: tuple[int, ...]
    rebuilt: bool

    @property
    def total_bytes(self) -> int:
        return sum(self.bucket_bytes)

    def __str__(self) -> str:
        sizes = [f"{size / 2**20:.3g}" for size in self.bucket_bytes]
        if len(sizes) > 8:
            sizes = [*sizes[:4], "...", *sizes[-3:]]
        noun = "bucket" if len(self.bucket_bytes) == 1 else "buckets"
        return f"{len(self.bucket_bytes)} {noun} of {', '.join(sizes)} MiB"


def all_reduce_bytes_sent(payload_bytes: float, world_size: int) -> float:
    """Bytes that each rank sends for an all-reduce of ``payload_bytes``: 2 (n - 1) / n times the payload.

    That of a ring and of every bandwidth-optimal all-reduce (Patarasuk and Yuan, JPDC 2009).

    """
    return 2 * (world_size - 1) / world_size * payload_bytes


def check_module(module: nn.Module, plan: Plan, ddp_arguments: Mapping[str, Any]) -> None:
    """Refuse what only the module shows to be impossible. Called before the first wrap; not collective.

    Raises:
        ValueError: nothing to train, or gradients that the plan's hook cannot carry.

    """
    trainable = {name: p for name, p in reduced_parameters(module) if p.requires_grad}
    if not trainable:
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to exchange:"
            " unfreeze some, or use Trainer.validate / test / predict."
        )
    if plan.hook.name == "none":
        return
    if ddp_arguments.get("mixed_precision") is not None:
        raise ValueError(
            f"comm_hook={plan.hook.name!r} and DDP's mixed_precision argument both register a communication hook:"
            " drop one, or use Trainer(precision=...) instead of mixed_precision."
        )
    if plan.hook.name == "custom":
        return
    for name, submodule in module.named_modules():
        is_sparse = isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
        if is_sparse and submodule.weight.requires_grad:
            raise ValueError(
                f"comm_hook={plan.hook.name!r} cannot carry the sparse gradients of {name!r}"
                f" ({type(submodule).__name__}(sparse=True)): use comm_hook='none', or sparse=False there."
            )
    for name, parameter in trainable.items():
        if parameter.is_complex():
            raise ValueError(
                f"comm_hook={plan.hook.name!r} would drop the imaginary part of the gradient of {name!r}"
                f" ({parameter.dtype}): use comm_hook='none'."
            )


def reduced_parameters(module: nn.Module, ignored: Collection[str] | None = None) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that DDP would reduce if they were trainable, by name.

    Args:
        module: the module to be wrapped.
        ignored: DDP's ``parameters_to_ignore``; None: what ``module`` asks it to ignore.

    """
    if ignored is None:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    seen: set[nn.Parameter] = set()
    for module_name, submodule in module.named_modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            # As DDP's reducer: a root parameter is called ".name", a tied one is ignored by each of its names.
            full_name = f"{module_name}.{name}"
            if full_name not in ignored and parameter not in seen:
                seen.add(parameter)
                yield full_name.removeprefix("."), parameter


class TrainableSet:
    """Which parameters required a gradient at one moment: DDP reduces only those that did when it wrapped.

    Args:
        module: the module to be wrapped.

    """

    def __init__(self, module: nn.Module) -> None:
        self._named = list(reduced_parameters(module))
        self._parameters = [parameter for _, parameter in self._named]
        self._required = [parameter.requires_grad for parameter in self._parameters]

    def changed(self) -> list[str]:
        """Names of the parameters whose ``requires_grad`` has changed since. Cheap enough for every step."""
        return [name for name, _, _ in self._changes()]

    def newly_trainable(self) -> list[str]:
        """Names of those that require a gradient now and did not then."""
        return [name for name, _, requires_now in self._changes() if requires_now]

    def newly_frozen(self) -> list[nn.Parameter]:
        """Those that required a gradient then and do not now."""
        return [parameter for _, parameter, requires_now in self._changes() if not requires_now]

    def _changes(self) -> list[tuple[str, nn.Parameter, bool]]:
        now = [parameter.requires_grad for parameter in self._parameters]
        if now == self._required:
            return []
        compared = zip(self._named, now, self._required, strict=True)
        return [(name, parameter, is_) for (name, parameter), is_, was in compared if is_ != was]

    def digest(self) -> bytes:
        """The same on two ranks if and (but for collisions) only if they train the same parameters."""
        return hashlib.sha256(repr(self._required).encode()).digest()


def wrap(
    module: nn.Module,
    plan: Plan,
    *,
    device_ids: list[int] | None,
    ddp_arguments: Mapping[str, Any],
    syncs_buffers_next: bool | None = None,
) -> DistributedDataParallel:
    """Wrap ``module`` as ``plan`` says, without its hook. Collective: every rank of the group must call it.

    Args:
        module: the module; its parameters and their ``.grad`` stay the objects that they are.
        plan: the plan.
        device_ids: this rank's device as DDP wants it, None on CPU.
        ddp_arguments: further keyword arguments of DDP.
        syncs_buffers_next: None at a first wrap, which broadcasts rank 0's parameters and buffers. At a re-wrap what
            :func:`unwrap` gave: no parameter is exchanged, since the ranks hold the same ones already.

    """
    arguments = dict(ddp_arguments)
    if plan.static_graph:
        # A static graph finds unused parameters in its first iteration; DDP warns where both are asked for.
        arguments.pop("find_unused_parameters", None)
    if isinstance(plan.bucket_cap_mb, tuple):
        arguments["bucket_cap_mb_list"] = list(plan.bucket_cap_mb)
    else:
        arguments["bucket_cap_mb"] = plan.bucket_cap_mb
    if syncs_buffers_next is not None:
        arguments["init_sync"] = False
    ddp = DistributedDataParallel(
        module,
        device_ids=device_ids,
        static_graph=plan.static_graph,
        gradient_as_bucket_view=plan.gradient_as_bucket_view,
        **arguments,
    )
    if syncs_buffers_next is not None:
        ddp.require_forward_param_sync = syncs_buffers_next
    return ddp


def unwrap(ddp: DistributedDataParallel) -> tuple[nn.Module, bool]:
    """Take DDP's gradient hooks off the module. Parameters and ``.grad`` stay as they are.

    The caller must drop its references to ``ddp``: each wrapper that lives keeps its buckets, a copy of the gradients.

    Returns:
        the module, and whether the next forward would have broadcast the buffers (after a ``no_sync()`` backward it
        would not).

    """
    ddp._remove_autograd_hooks()
    return ddp.module, ddp.require_forward_param_sync


def register_hook(ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
    """Register ``hook`` on CPU and CUDA alike.

    DDP refuses ``bf16_compress_hook`` by its name on builds without CUDA (torch 2.11 to 2.14) and wants ``__name__``,
    ``__qualname__``, and a second parameter called ``bucket``; so it gets a plain function.

    """

    def comm_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)  # type: ignore[no-any-return]

    ddp.register_comm_hook(state, comm_hook)


def ranks_agree(value: bytes, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether all ranks hold the same ``value``. Collective."""
    number = int.from_bytes(value[:7], "big")  # 56 bits, so that its negative fits too
    ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    largest, smallest_negated = ends.tolist()
    return bool(largest == -smallest_negated)


def gradients_that_differ(ddp: DistributedDataParallel) -> list[str]:
    """Names of the parameters whose gradients differ between ranks, by a checksum of their bits.

    Collective: every rank must call it after a synchronised backward. One all-reduce of 16 bytes a parameter; reads the
    result, so that the host waits for the device.

    """
    named = [(name, p) for name, p in reduced_parameters(ddp.module, ddp.parameters_to_ignore) if p.requires_grad]
    sums = torch.stack([_checksum(parameter.grad, ddp.device) for _, parameter in named])
    ends = torch.stack([sums, -sums])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=ddp.process_group)
    differs = (ends[0] != -ends[1]).tolist()
    return [name for (name, _), different in zip(named, differs, strict=True) if different]


def _checksum(gradient: Tensor | None, device: torch.device) -> Tensor:
    """A 62-bit sum of the bits of ``gradient``; every NaN counts alike; -1 where there is none."""
    if gradient is None:
        return torch.full((), -1, dtype=torch.int64, device=device)
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        parts = [gradient.values(), gradient.indices()]
    else:
        parts = [gradient]
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        flat = torch.view_as_real(part) if part.is_complex() else part
        if flat.is_floating_point():
            flat = torch.where(flat.isnan(), torch.zeros_like(flat), flat)
            total += part.isnan().sum() * 1_000_003
        bits = flat.contiguous().view(_BITS[flat.element_size()])
        total += bits.sum(dtype=torch.int64)
    return total & (2**62 - 1)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def layout_of(ddp: DistributedDataParallel) -> Layout:
    """The buckets as DDP's logging data tells them, as of its last sampled iteration."""
    data = ddp._get_ddp_logging_data()
    rebuilt = data.get("rebuilt_bucket_sizes")
    sizes = rebuilt or data["bucket_sizes"]
    return Layout(tuple(int(size) for size in str(sizes).split(",")), rebuilt=bool(rebuilt))


def bucket_parameters(ddp: DistributedDataParallel) -> list[list[nn.Parameter]]:
    """The parameters of each bucket in the order in which their gradients became ready when DDP formed the buckets.

    Empty while DDP has not formed its buckets in that order.

    """
    text = str(ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", ""))
    reduced = [p for _, p in reduced_parameters(ddp.module, ddp.parameters_to_ignore) if p.requires_grad]
    return [[reduced[int(index)] for index in bucket.split()] for bucket in text.split(",") if bucket.strip()]


def rebuilds_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether DDP forms its buckets anew in gradient-ready order: not while it looks for unused parameters."""
    return bool(ddp.static_graph or not ddp.find_unused_parameters)


def average_gradients(parameters: Collection[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Average what ``no_sync()`` backwards have left in ``.grad``, where any rank has something. Collective.

    Args:
        parameters: the same ones in the same order on every rank; not empty.
        group: the group that DDP reduces over; None: the default group.

    """
    device = next(iter(parameters)).device
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    for parameter, is_present in zip(parameters, present.tolist(), strict=True):
        if not is_present:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient.div_(dist.get_world_size(group))
        dist.all_reduce(gradient, group=group)
        parameter.grad = gradient


def end_manual_forward(ddp: DistributedDataParallel) -> None:
    """Leave a wrapper that was made inside another one's forward as that forward would have left it.

    In manual optimisation DDP's forward ends with gradient synchronisation off, so that the next one does not
    broadcast buffers.

    """
    ddp.require_forward_param_sync = False
