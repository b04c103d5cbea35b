"""A run that did something else than its rung says is refused, with every difference."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rung_checks import check_rung
from torch import nn

from lightning_ddpopt import HookSpec, Layout, Plan
from lightning_ddpopt.records import Record
from lightning_ddpopt.wrapping import all_reduce_bytes_sent

MIB = 2**20
SIZES_MIB = [3, 2, 2, 1]  # of the parameters, in gradient-ready order

GOOD = Record(
    rung="bucket_view",
    label="bucket_view",
    repeat=0,
    measure="claim",
    model="blocks",
    precision="32-true",
    compiled=False,
    device="CPU",
    world_size=2,
    num_nodes=1,
    images_per_step=64,
    steps_per_s=10.0,
    steps_ms_by_rank=[[90.0], [95.0]],
    loss=1.0,
    peak_memory_mib=100.0,
    parameters="",
    plan=Plan(static_graph=True, bucket_cap_mb=2),
    bytes_sent_per_step=8.0 * MIB,
    transport_asked="p2p",
    transports=["P2P/CUMEM/read"],
)
LAYOUT = Layout((3 * MIB, 2 * MIB, 2 * MIB, 1 * MIB), True)


def wrapper(static_graph: bool = True, gradient_as_bucket_view: bool = True) -> Any:
    module = nn.ParameterList([torch.zeros(size * MIB // 4) for size in SIZES_MIB])
    return SimpleNamespace(
        module=module,
        parameters_to_ignore=set(),
        static_graph=static_graph,
        gradient_as_bucket_view=gradient_as_bucket_view,
    )


def check(record: Record, wrapped: Any = None, layout: Layout = LAYOUT, devices: Any = 2) -> None:
    check_rung(record, record.plan, wrapped or wrapper(), layout, devices)


def test_what_did_as_it_says_passes() -> None:
    check(GOOD)
    check(GOOD, devices="auto")
    check(replace(GOOD, transport_asked="auto", transports=[]))
    one = Plan(static_graph=True, bucket_cap_mb=2000)
    check(replace(GOOD, plan=one), layout=Layout((8 * MIB,), True))
    default = Plan(static_graph=True)
    check(replace(GOOD, plan=default), layout=Layout((3 * MIB, 5 * MIB), True))
    listed = Plan(static_graph=True, bucket_cap_mb=(4, 1))
    check(replace(GOOD, plan=listed), layout=Layout((5 * MIB, 2 * MIB, 1 * MIB), True))


def test_a_run_without_ddp_passes() -> None:
    alone = replace(GOOD, world_size=1, plan=None, transports=[])
    check_rung(alone, None, None, None, 1)
    check_rung(alone, Plan(), None, None, 1)  # ours around one device


@pytest.mark.parametrize(
    ("change", "wrapped", "layout", "said"),
    [
        ({"world_size": 1}, None, LAYOUT, "2 ranks were asked for, 1 trained"),
        ({"num_nodes": 2}, None, LAYOUT, "4 ranks were asked for, 2 trained"),
        ({}, wrapper(static_graph=False), LAYOUT, "static_graph=False, asked for True"),
        ({}, wrapper(gradient_as_bucket_view=False), LAYOUT, "gradient_as_bucket_view=False, asked for True"),
        ({}, None, Layout(LAYOUT.bucket_bytes, False), "not formed its buckets in gradient-ready order"),
        ({}, None, Layout((3 * MIB, 2 * MIB, 2 * MIB), True), "the buckets hold 7340032 bytes, the gradients 8388608"),
        ({}, None, Layout((8 * MIB,), True), "bucket 0 has 8 MiB where its capacity is 2 MiB"),
        ({}, None, Layout((1 * MIB, 2 * MIB, 2 * MIB, 3 * MIB), True), "bucket 0 has 1 MiB where its capacity is 2"),
        ({"plan": replace(GOOD.plan, bucket_cap_mb=2000)}, None, LAYOUT, "bucket 0 has 3 MiB where its capacity is"),
        ({"plan": replace(GOOD.plan, bucket_cap_mb=None)}, None, LAYOUT, "bucket 1 has 2 MiB where its capacity is 25"),
        ({"transports": ["SHM/direct/direct"]}, None, LAYOUT, "transport p2p was asked for, found: SHM/direct/direct"),
        ({"transports": ["P2P/CUMEM/read", "NET/Socket"]}, None, LAYOUT, "found: P2P/CUMEM/read, NET/Socket"),
        ({"transports": []}, None, LAYOUT, "found: nothing that NCCL's log tells"),
    ],
)
def test_what_did_something_else_is_refused(change: dict[str, Any], wrapped: Any, layout: Layout, said: str) -> None:
    with pytest.raises(RuntimeError, match=r"rung 'bucket_view' did not do what it says.*" + said):
        check(replace(GOOD, **change), wrapped, layout)


def test_a_run_that_was_not_wrapped_is_refused() -> None:
    with pytest.raises(RuntimeError, match="nothing was wrapped, but the plan is: static graph"):
        check_rung(GOOD, GOOD.plan, None, None, 2)


def test_ddp_where_none_was_asked_for_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"no DDP was asked for, 2 rank\(s\) trained under SimpleNamespace"):
        check_rung(replace(GOOD, plan=None), None, wrapper(), LAYOUT, 2)
    with pytest.raises(RuntimeError, match=r"no DDP was asked for, 2 rank\(s\)"):
        check_rung(replace(GOOD, plan=None), None, None, None, 2)


def test_another_plan_than_that_asked_for_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"the plan is static graph.*asked for .*hook bf16 \(is DDPOPT_DISABLE set"):
        check_rung(GOOD, replace(GOOD.plan, hook=HookSpec("bf16")), wrapper(), LAYOUT, 2)


@pytest.mark.parametrize("sent", [all_reduce_bytes_sent(8 * MIB, 2), None])
def test_a_hook_that_saves_no_bytes_is_refused(sent: float | None) -> None:
    record = replace(GOOD, plan=replace(GOOD.plan, hook=HookSpec("bf16")), bytes_sent_per_step=sent)
    with pytest.raises(RuntimeError, match=r"hook bf16 sent (8388608\.0|None) bytes a step, exact gradients are"):
        check(record)
    check(replace(record, bytes_sent_per_step=4.0 * MIB))
    check(replace(record, bytes_sent_per_step=None, world_size=1, transports=[]), devices=1)


def test_all_differences_are_told_at_once() -> None:
    with pytest.raises(RuntimeError, match=r"static_graph=False.*found: SHM"):
        check(replace(GOOD, transports=["SHM/direct/direct"]), wrapper(static_graph=False))
