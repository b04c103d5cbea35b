"""Each finding fires on its fault, with the figures, and on no trace without it."""

import ast
import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from test_analysis import unpacked

from lightning_ddpopt import DDPOptStrategy
from lightning_ddpopt.profiling.analysis import analyze
from lightning_ddpopt.profiling.figures import Analysis, Collective, Figures, RankAnalysis, Timeline, mean_of
from lightning_ddpopt.profiling.findings import RULES, as_dict, findings
from lightning_ddpopt.profiling.traces import load

MIB = 2**20
HEALTHY = Figures(
    step_ms=100, data_wait_ms=2, forward_ms=30, backward_ms=62, optimizer_ms=5, other_ms=1, compute_ms=95,
    backward_compute_ms=60, communication_ms=33, hidden_ms=29, exposed_ms=4, wire_ms=30, wait_ms=3, exposed_wire_ms=3,
    idle_ms=3, longest_idle_ms=1, gradient_copies=0, gradient_copy_ms=0, gradient_copy_bytes=0, host_copy_ms=1,
    host_copy_bytes=MIB, blocking_copies=0, blocked_ms=0, backwards=1, exchanges=1, early_exchanges=0,
    reductions=10, collectives=10,
)  # fmt: skip
BUCKET = Collective(0, "AllReduce", 0, "none", 32 * MIB, 32 * MIB, 3, 3, 0.4, 2.7, 0.3, 12.4)
NO_TIMELINE = Timeline("Batch 1", (0, 100), (), (), (), (), (), ())


STEPS = 10


def rank(
    number: int, figures: Figures, late_ms: float | None, last_steps: int | None, *buckets: Collective
) -> RankAnalysis:
    steps = tuple((f"Batch {step}", figures) for step in range(STEPS))
    share = None if last_steps is None else last_steps / STEPS
    return RankAnalysis(
        number, "nsys", f"rank_{number}.sqlite", figures, steps, buckets or (BUCKET,) * 10, late_ms, share, last_steps,
        NO_TIMELINE,
    )  # fmt: skip


def of(*ranks: RankAnalysis, **more: Any) -> Analysis:
    given = {
        "world_size": len(ranks),
        "is_cpu": False,
        "is_ddp": True,
        "straggler": 1,
        "notes": (),
        "compared_steps": STEPS,
    }
    return Analysis(ranks, mean_of([one.mean for one in ranks]), **(given | more))


def changed(buckets: tuple[Collective, ...] = (), **figures: Any) -> Analysis:
    """Two ranks that only differ from the healthy ones in some figures."""
    made = replace(HEALTHY, **figures)
    return of(rank(0, made, 0.3, 4, *buckets), rank(1, made, 0.4, 6, *buckets))


def alone(world_size: int | None, **figures: Any) -> Analysis:
    made = replace(HEALTHY, wire_ms=None, wait_ms=None, exposed_wire_ms=None, **figures)
    return of(rank(0, made, None, None), world_size=world_size, straggler=None)


def straggling(last_steps: int, exposed_ms: float, data_wait_ms: float = 2, steps: int = STEPS) -> Analysis:
    waiting = replace(HEALTHY, exposed_ms=exposed_ms, communication_ms=29 + exposed_ms)
    late = replace(HEALTHY, data_wait_ms=data_wait_ms)
    return of(rank(0, waiting, 0.2, steps - last_steps), rank(1, late, 4.2, last_steps), compared_steps=steps)


SMALL = tuple(replace(BUCKET, position=index, payload_bytes=MIB // 2) for index in range(40))
EXPOSED = {"exposed_ms": 12, "hidden_ms": 21, "exposed_wire_ms": 11}
BATCH_NORM = tuple(replace(BUCKET, bucket=None, hook=None, bucket_bytes=None, payload_bytes=2048) for _ in range(40))
NO_PARTS: dict[str, None] = dict.fromkeys(("data_wait_ms", "forward_ms", "backward_ms", "optimizer_ms", "other_ms"))
NO_COLLECTIVE = {"reductions": 0, "collectives": 0, "exchanges": 0, "communication_ms": 0, "exposed_ms": 0}
SLOW = {"communication_ms": 90, "wire_ms": 88, "exposed_ms": 40, "exposed_wire_ms": 38, "hidden_ms": 50}


def hooked(name: str) -> tuple[Collective, ...]:
    return (replace(BUCKET, hook=name),) * 10


FAULTS: list[tuple[Analysis, list[str], str, str]] = (
    [
        (changed(reductions=1, collectives=1, communication_ms=30, hidden_ms=1, exposed_ms=29, exposed_wire_ms=26),
         ["one_bucket"], "29.0 of 30.0 ms of communication are exposed, of which 26.0 ms are transfer, 26 %",
         "DDPOptStrategy(bucket_cap_mb=10)."),
        (changed((replace(BUCKET, bucket_bytes=336 * MIB),), reductions=1, exposed_ms=33, exposed_wire_ms=30),
         ["one_bucket"], "30 %", "DDPOptStrategy(bucket_cap_mb=10); try 25, 50, 100 too"),
        (changed((replace(BUCKET, bucket_bytes=9 * MIB),), reductions=1, exposed_ms=33, exposed_wire_ms=30),
         ["one_bucket"], "30 %", "DDPOptStrategy(bucket_cap_mb=2)."),
        (changed(SMALL, reductions=40, collectives=40, **EXPOSED), ["small_buckets", "exposed_communication"],
         "40 of 40 all-reduces carry less than 1 MiB", "DDPOptStrategy(bucket_cap_mb=25); try 50, 100 too"),
        (changed(SMALL[:30], reductions=30, **EXPOSED), ["small_buckets", "exposed_communication"], "30 of 30",
         "bucket_cap_mb=25"),
        (changed(**SLOW), ["slow_transport"],
         "Transfer alone takes 88.0 ms of a step, and backward has only 60.0 ms of compute to hide it under, at a bus"
         " bandwidth of 12.4 GB/s", 'comm_hook="bf16"'),
        (changed(hooked("bf16"), **SLOW), ["slow_transport"], "38 %", 'DDPOptStrategy(comm_hook="powersgd")'),
        (changed(hooked("powersgd"), **SLOW), ["slow_transport"], "38 %", "Larger batches"),
        (changed((replace(BUCKET, busbw_gb_per_s=0.0123),), **SLOW), ["slow_transport"], "bandwidth of 0.012 GB/s",
         "bf16"),
        (changed((replace(BUCKET, busbw_gb_per_s=0),), **SLOW), ["slow_transport"], "hide it under: no bucket", "bf16"),
        (changed(**EXPOSED), ["exposed_communication"], "11.0 of 30.0 ms of transfer are exposed, 11 %",
         "DDPOptStrategy(bucket_cap_mb=10); try 25, 50, 100 too"),
        (changed(exposed_ms=6, exposed_wire_ms=5), ["exposed_communication"], "5 %", "static_graph=True"),
        (changed(gradient_copies=152, gradient_copy_ms=0.4, gradient_copy_bytes=336 * MIB), ["gradient_copies"],
         "152 device-to-device copies a step of 336.0 MiB", "gradient_as_bucket_view=True"),
        (changed(backwards=4, exchanges=4, early_exchanges=3, reductions=40), ["exchange_in_every_micro_batch"],
         "4 of the 4 backward passes of a step exchange gradients, 3 of them without a step of the optimizer",
         "accumulate_grad_batches"),
        (changed(data_wait_ms=25, idle_ms=26), ["data_wait"],
         "25.0 ms of a step for its batch, or callbacks after the last one, 25 %", "num_workers"),
        (changed(data_wait_ms=10), ["data_wait"], "10 %", "num_workers"),
        (changed(blocking_copies=2, blocked_ms=1.5), ["blocking_copies"], "2 copies a step", "pin_memory=True"),
        (changed(blocking_copies=2, blocked_ms=0.5), ["blocking_copies"], "0.50 ms", "pin_memory=True"),
        (changed(idle_ms=40), ["idle_device"], "40.0 ms of a step, 40 %", "torch.compile"),
        (changed(idle_ms=27), ["idle_device"], "27 %", "torch.compile"),
        (straggling(9, 24), ["straggler"],
         "Rank 1 comes last to the collectives in 9 of 10 steps, 4.2 ms after the first rank in the mean; the others"
         " wait 21.0 ms", "Rank 1's own work"),
        (straggling(9, 20, data_wait_ms=22), ["straggler", "data_wait"], "17.0 ms", "num_workers"),
        (straggling(5, 24, steps=5), ["straggler"], "in 5 of 5 steps", "Rank 1's own work"),
        (straggling(16, 24, steps=20), ["straggler"], "in 16 of 20 steps", "Rank 1's own work"),
        (straggling(9, 8), ["straggler"], "wait 5.0 ms of a step for it, not under compute, 5 %", "Rank 1's own work"),
        (alone(8, communication_ms=70, exposed_ms=20), ["communication_of_some_ranks"],
         "70.0 ms of a step", "all ranks"),
        (replace(changed(**SLOW), world_size=8), ["communication_of_some_ranks"], "90.0 ms of a step", "all ranks"),
        (alone(1, reductions=0, collectives=0, exchanges=0, communication_ms=0, exposed_ms=0, gradient_copies=99,
               gradient_copy_bytes=MIB), ["ddp_on_one_device"], "copies 99 gradients, 1.0 MiB", "world size 1"),
        (alone(None, reductions=0, collectives=0, exchanges=0, communication_ms=0, exposed_ms=0), ["ddp_on_one_device"],
         "there is one rank", "world size 1"),
    ]
)  # fmt: skip


@pytest.mark.parametrize(("analysis", "rules", "evidence", "remedy"), FAULTS)
def test_a_fault_is_found_with_its_figures(analysis: Analysis, rules: list[str], evidence: str, remedy: str) -> None:
    found = findings(analysis)
    assert [one.rule for one in found] == rules
    assert evidence in found[0].evidence
    assert remedy in found[0].remedy


@pytest.mark.parametrize(
    "analysis",
    [
        changed(),
        changed(
            reductions=1, collectives=1, communication_ms=30, hidden_ms=28, exposed_ms=2, exposed_wire_ms=2
        ),  # hidden all the same
        changed(
            reductions=1, collectives=1, communication_ms=3, hidden_ms=0, exposed_ms=3, exposed_wire_ms=3, wire_ms=3
        ),  # too little
        changed(
            reductions=1, collectives=1, communication_ms=30, hidden_ms=0, exposed_ms=30, wire_ms=2, exposed_wire_ms=2
        ),  # waiting
        changed(SMALL, reductions=40, collectives=40),  # small, and hidden
        changed(communication_ms=90, wire_ms=30, wait_ms=60),  # long for its waiting, not for its transfer
        replace(changed(**EXPOSED), world_size=8),  # perhaps it waits for a rank that was not given
        changed(SMALL[:29], reductions=40, exposed_ms=4.9, exposed_wire_ms=4.9),
        changed((BUCKET,) * 10 + BATCH_NORM, collectives=50, reductions=10),
        changed(wire_ms=60, exposed_wire_ms=4.9),
        changed(backward_compute_ms=0, wire_ms=30, exposed_ms=30, exposed_wire_ms=30, **NO_PARTS),  # not told
        changed(backwards=4, exchanges=1),
        changed(backwards=2, exchanges=2),  # each with a step of its optimizer
        changed(reductions=10, collectives=12),  # two broadcasts of buffers
        changed(gradient_copies=3, gradient_copy_ms=0.1, gradient_copy_bytes=MIB),  # what PowerSGD does not compress
        changed(data_wait_ms=9),
        changed(blocking_copies=1, blocked_ms=0.1),
        changed(idle_ms=26, data_wait_ms=9),
        straggling(6, 24),  # now this rank, now that
        straggling(8, 24),  # as two equal ranks do once in ten runs
        straggling(4, 24, steps=4),
        straggling(4, 24, steps=5),
        straggling(15, 24, steps=20),
        straggling(9, 7),  # the others wait under compute
        alone(8),
        alone(None),
        replace(
            alone(1, reductions=0, collectives=0, exchanges=0, communication_ms=0, exposed_ms=0), is_ddp=False
        ),  # no DDP
        alone(
            8, reductions=0, collectives=0, exchanges=0, communication_ms=0, exposed_ms=0
        ),  # a window without reductions
        changed(idle_ms=None, gradient_copies=None, blocking_copies=None, blocked_ms=None),  # a CPU
    ],
)
def test_without_the_fault_nothing_is_found(analysis: Analysis) -> None:
    assert findings(analysis) == []


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("cap2000_rank?.sqlite.gz", {"one_bucket", "idle_device"}),
        ("cap2000_rank?.json.gz", {"one_bucket", "idle_device"}),
        ("cap25_rank?.sqlite.gz", {"exposed_communication"}),
        ("noview_rank?.sqlite.gz", {"gradient_copies", "idle_device"}),
        ("noview_rank?.json.gz", {"gradient_copies", "idle_device"}),
        ("noview_rank1.sqlite.gz", {"gradient_copies", "communication_of_some_ranks"}),
        ("gloo_rank?.json.gz", {"slow_transport", "data_wait"}),
    ],
)
def test_committed_traces(tmp_path: Path, name: str, rules: set[str]) -> None:
    found = findings(analyze(load(unpacked(tmp_path, name))))
    assert {one.rule for one in found} == rules


CALLABLES = {
    "DDPOptStrategy": DDPOptStrategy,
    "Trainer": lightning.Trainer,
    "DataLoader": torch.utils.data.DataLoader,
    "compile": torch.compile,
    "block_backward_sync": DDPOptStrategy.block_backward_sync,
}


def named_in(remedy: str) -> list[tuple[str, dict[str, str]]]:
    """The calls in a remedy, each with its keyword arguments; an argument outside of a call is of the one before."""
    found: list[tuple[str, dict[str, str]]] = []
    for callee, name, value in re.findall(r'(\w+)\(|(\w+)=("[^"]*"|\w+|…)', remedy):
        if callee:
            found.append((callee, {}))
        else:
            found[-1][1][name] = value
    return found


def wrong_in(remedy: str) -> list[str]:
    """What a remedy names that does not exist, or does not take it."""
    wrong = []
    for callee, arguments in named_in(remedy):
        if callee == "to":  # a method of tensors, which has no signature
            wrong += sorted(set(arguments) - {"non_blocking"})
            continue
        if callee not in CALLABLES:
            wrong.append(callee)
            continue
        wrong += sorted(set(arguments) - set(inspect.signature(CALLABLES[callee]).parameters))
        if callee == "DDPOptStrategy" and not wrong:
            for name, value in arguments.items():
                try:
                    DDPOptStrategy(**{name: ast.literal_eval(value)})
                except ValueError:
                    wrong.append(value)
    return wrong


def test_remedies_name_arguments_that_exist() -> None:
    found = [finding for analysis, *_ in FAULTS for finding in findings(analysis)]
    assert {finding.rule for finding in found} == {rule.__name__ for rule in RULES}
    for finding in found:
        assert wrong_in(finding.remedy) == [], finding.remedy
    assert sum(len(named_in(finding.remedy)) for finding in found) > 30


@pytest.mark.parametrize(
    ("remedy", "wrong"),
    [
        ("DDPOptStrategy(static_graf=True).", ["static_graf"]),
        ('DDPOptStrategy(comm_hook="bf16") or comm_hook="powersdg".', ['"powersdg"']),
        ("Trainer(accumulate_batches=N)", ["accumulate_batches"]),
        ("trainer.strategy.no_such_thing()", ["no_such_thing"]),
    ],
)
def test_a_remedy_that_names_something_else_would_be_seen(remedy: str, wrong: list[str]) -> None:
    assert wrong_in(remedy) == wrong


def test_json_holds_plain_values() -> None:
    made = as_dict(changed(**SLOW))
    assert made["schema"] == 1
    assert made["mean"]["wire_ms"] == 88
    assert made["ranks"][0]["steps"][0]["name"] == "Batch 0"
    assert made["ranks"][0]["collectives"][0]["busbw_gb_per_s"] == 12.4
    assert made["findings"][0]["rule"] == "slow_transport"
