"""Whether a run did what its rung says. A figure of a run that did something else is worse than none."""

from itertools import chain, repeat

from torch.nn.parallel import DistributedDataParallel

from lightning_ddpopt.machine.transport import is_transport
from lightning_ddpopt.plan import Plan
from lightning_ddpopt.records import Record
from lightning_ddpopt.wrapping import Layout, all_reduce_bytes_sent

MIB = 2**20


def check_rung(
    record: Record,
    asked: Plan | None,
    wrapper: DistributedDataParallel | None,
    layout: Layout | None,
    devices: object,
) -> None:
    """Raise where a run differs from what was asked.

    Args:
        record: the finished run.
        asked: the plan that the config describes; None: no DDP.
        wrapper: what DDP was wrapped around the module, if it was.
        layout: the buckets that DDP formed, if it was.
        devices: ``trainer.devices`` as asked.

    Raises:
        RuntimeError: with all differences.

    """
    wrong = []
    if isinstance(devices, int) and record.world_size != devices * record.num_nodes:
        wrong.append(f"{devices * record.num_nodes} ranks were asked for, {record.world_size} trained")
    if asked is None and (wrapper is not None or record.world_size > 1):
        wrong.append(f"no DDP was asked for, {record.world_size} rank(s) trained under {type(wrapper).__name__}")
    if record.plan is not None and record.plan != asked:
        wrong.append(f"the plan is {record.plan}, asked for {asked} (is DDPOPT_DISABLE set?)")
    if record.plan is not None and wrapper is None:
        wrong.append(f"nothing was wrapped, but the plan is: {record.plan}")
    if record.plan is not None and wrapper is not None and layout is not None:
        wrong += _wrapper_differences(record.plan, wrapper)
        wrong += _layout_differences(record.plan, layout, [p.numel() * p.element_size() for p in _reduced(wrapper)])
        exact = all_reduce_bytes_sent(layout.total_bytes, record.world_size)
        sent = record.bytes_sent_per_step
        if record.world_size > 1 and record.plan.hook.name != "none" and (sent is None or sent >= exact):
            wrong.append(f"hook {record.plan.hook} sent {sent} bytes a step, exact gradients are {exact:.0f}")
    if record.world_size > 1 and record.transport_asked != "auto":
        others = [found for found in record.transports if not is_transport(found, record.transport_asked)]
        if others or not record.transports:
            found = (
                ", ".join(record.transports) or "nothing that NCCL's log tells (is NCCL_DEBUG_FILE set to one file?)"
            )
            wrong.append(f"transport {record.transport_asked} was asked for, found: {found}")
    if wrong:
        raise RuntimeError(f"rung {record.label!r} did not do what it says, so no record is kept: " + "; ".join(wrong))


def _reduced(wrapper: DistributedDataParallel) -> list:  # type: ignore[type-arg]
    ignored = wrapper.parameters_to_ignore
    return [p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored]


def _wrapper_differences(plan: Plan, wrapper: DistributedDataParallel) -> list[str]:
    asked = {"static_graph": plan.static_graph, "gradient_as_bucket_view": plan.gradient_as_bucket_view}
    done = {name: bool(getattr(wrapper, name)) for name in asked}
    return [f"{name}={done[name]}, asked for {asked[name]}" for name in asked if done[name] != asked[name]]


def _layout_differences(plan: Plan, layout: Layout, parameter_bytes: list[int]) -> list[str]:
    """DDP closes a bucket as soon as it has reached its capacity; only the last one may stay below."""
    wrong = []
    if not layout.rebuilt:
        wrong.append("DDP has not formed its buckets in gradient-ready order")
    if layout.total_bytes != sum(parameter_bytes):
        wrong.append(f"the buckets hold {layout.total_bytes} bytes, the gradients {sum(parameter_bytes)}")
    cap = plan.bucket_cap_mb
    caps = [1.0, 25.0] if cap is None else list(cap) if isinstance(cap, tuple) else [cap]
    for index, (size, mib) in enumerate(zip(layout.bucket_bytes, chain(caps, repeat(caps[-1])), strict=False)):
        is_last = index == len(layout.bucket_bytes) - 1
        if (size < mib * MIB and not is_last) or size >= mib * MIB + max(parameter_bytes):
            wrong.append(f"bucket {index} has {size / MIB:.3g} MiB where its capacity is {mib:g} MiB")
    return wrong
