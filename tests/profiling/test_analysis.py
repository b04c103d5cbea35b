"""Figures of made reports, worked out by hand in microseconds, and of committed traces, against SQL."""

import gzip
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_reports import AUTOGRAD, DTOD, MAIN, MEMCPY, PAGEABLE, PINNED, Report

from lightning_ddpopt.profiling.analysis import analyze
from lightning_ddpopt.profiling.figures import Analysis, Figures
from lightning_ddpopt.profiling.findings import findings
from lightning_ddpopt.profiling.tables import step_table
from lightning_ddpopt.profiling.traces import load

TRACES = Path(__file__).parents[1] / "data" / "traces"


def analysis_of(tmp_path: Path, *reports: Report, without: Sequence[str] = ()) -> Analysis:
    files = [report.write(tmp_path / f"rank{rank}.sqlite", without) for rank, report in enumerate(reports)]
    return analyze(load(files))


def us(figures: Figures, *names: str) -> list[float]:
    return [pytest.approx(1000 * getattr(figures, f"{name}_ms"), abs=1e-9) for name in names]


PARTS = ("step", "data_wait", "forward", "backward", "optimizer", "other")


def unpacked(tmp_path: Path, pattern: str) -> list[Path]:
    """Committed traces, with those of nsys uncompressed."""
    found = []
    for path in sorted(TRACES.glob(pattern)):
        if path.name.endswith(".sqlite.gz"):
            (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
            path = tmp_path / path.stem
        found.append(path)
    assert found
    return found


# made reports


def test_parts_of_a_step(tmp_path: Path) -> None:
    report = Report()
    report.step(3, 0)
    report.step(4, 100)
    analysis = analysis_of(tmp_path, report)
    (first, figures), (second, last) = analysis.ranks[0].steps
    assert (first, second) == ("Batch 3", "Batch 4")
    assert us(figures, *PARTS) == [100, 10, 20, 60, 5, 5]
    assert us(last, *PARTS) == [100, 10, 20, 60, 5, 5]
    assert us(figures, "communication", "hidden", "exposed") == [40, 20, 20]
    assert us(figures, "compute", "backward_compute", "host_copy") == [69, 40, 4]
    # 0 to 5 before the copy, 9 to 10, and 95 to 100
    assert us(figures, "idle", "longest_idle") == [11, 5]
    assert figures.host_copy_bytes == 1000
    assert (figures.wire_ms, figures.wait_ms, analysis.world_size, analysis.straggler) == (None, None, None, None)
    assert (figures.collectives, figures.exchanges, figures.backwards) == (1, 1, 1)
    assert analysis.mean == analysis.ranks[0].mean == figures


def test_a_step_of_the_device_may_lie_behind_its_range_on_the_host(tmp_path: Path) -> None:
    """The host launches two steps in 20 us each; the device takes 100 us for the first, 90 for the second."""
    report = Report()
    for number, at in enumerate((0, 20)):
        report.span(f"Batch {number}", at, at + 20)
        report.span("forward", at, at + 5)
        report.span("optimizer step", at + 15, at + 20)
    for launch, begin, reduced in ((0, 0, 95), (20, 100, 188)):
        report.kernel(begin, begin + 30, launch + 1, MAIN)
        report.kernel(begin + 30, begin + 70, launch + 8)
        report.all_reduce(begin + 40, reduced, launch + 9)
        report.kernel(reduced, reduced + 5, launch + 16, MAIN)
    (_, first), (_, second) = analysis_of(tmp_path, report).ranks[0].steps
    assert us(first, *PARTS) == [100, 0, 30, 65, 5, 0]
    assert us(second, *PARTS) == [93, 0, 30, 58, 5, 0]
    assert us(first, "exposed") == [25]
    assert us(second, "exposed") == [18]


def test_backward_is_what_the_autograd_thread_launches_with_or_without_a_range_there(tmp_path: Path) -> None:
    found = []
    for is_marked in (False, True):
        report = Report()
        report.step(0, 0)
        if is_marked:
            report.span("backward", 27, 60, AUTOGRAD)
        found.append(analysis_of(tmp_path, report).mean)
    assert found[0] == found[1]
    assert us(found[1], "backward", "backward_compute") == [60, 40]


def test_buckets_name_the_collectives_launched_in_them(tmp_path: Path) -> None:
    report = Report()
    report.step(0, 0, all_reduce=None)
    for index, (hook, size_bytes) in enumerate((("none", 4000), ("bf16", 8000), ("bf16", 8000))):
        start = 40 + 10 * index
        report.all_reduce(start, start + 8, start - 6)
        if index < 2:
            report.span(f"bucket {index} {size_bytes} bytes {hook}", start - 7, start - 5, AUTOGRAD)
    other = Report()
    other.tables, other._strings = report.tables, report._strings
    collectives = analysis_of(tmp_path, report, other).ranks[0].collectives
    assert [(one.bucket, one.hook, one.bucket_bytes, one.payload_bytes) for one in collectives] == [
        (0, "none", 4000, 4000),
        (1, "bf16", 8000, None),  # what the hook made of it is not in the trace
        (None, None, None, None),
    ]
    assert collectives[0].busbw_gb_per_s == pytest.approx(4000 / 8000)
    assert collectives[1].busbw_gb_per_s is None


def test_payload_and_world_size_that_nccl_tells(tmp_path: Path) -> None:
    report = Report()
    report.step(0, 0)
    report.span("ncclCommInitRank", -50, -40, json='{"NCCL communicator ID": 7, "No. of ranks": 8, "Rank": 0}')
    report.span("ncclAllReduce", 44, 46, AUTOGRAD, json='{"Message size [bytes]": 80000, "Reduction operation": 0}')
    analysis = analysis_of(tmp_path, report)
    (collective,) = analysis.ranks[0].collectives
    assert (analysis.world_size, collective.payload_bytes) == (8, 80000)
    assert collective.busbw_gb_per_s == pytest.approx(80000 / 40000 * 1.75)


def test_waiting_is_told_from_transfer_with_clocks_that_differ(tmp_path: Path) -> None:
    """Rank 1 comes 30 us later into a collective that both leave at 90; it takes the others' 10 us for its transfer."""
    early, late = Report(), Report(offset_us=1_000_000)
    for number, at in enumerate((0, 100)):
        early.step(number, at, all_reduce=(50, 90))
        late.step(number, at, all_reduce=(80, 90))
    analysis = analysis_of(tmp_path, early, late)
    first, second = analysis.ranks
    assert us(first.mean, "communication", "wire", "wait", "exposed", "exposed_wire") == [40, 10, 30, 20, 10]
    assert us(second.mean, "communication", "wire", "wait", "exposed", "exposed_wire") == [10, 10, 0, 10, 10]
    assert (first.late_ms, second.late_ms) == (0, pytest.approx(0.030))
    assert (first.last_share, second.last_share, analysis.straggler) == (0, 1, 1)
    assert analysis.world_size == 2
    assert any("taken as the 2 that were given" in note for note in analysis.notes)
    assert first.timeline.span == second.timeline.span == (0, pytest.approx(0.1))
    assert first.timeline.wait == ((pytest.approx(0.050), pytest.approx(0.080)),)


def test_ranks_that_started_to_record_at_different_times(tmp_path: Path) -> None:
    """A window that opened earlier on rank 0: it waits in its first step alone, which counts on no rank."""
    early, late = Report(), Report()
    early.step(0, 0, all_reduce=(50, 490), length=500)
    late.step(0, 0, all_reduce=(480, 490), length=500)
    for report in (early, late):
        report.step(1, 500, all_reduce=(50, 90))
    analysis = analysis_of(tmp_path, early, late)
    notes = [note for note in analysis.notes if "did not start together" in note]
    assert len(notes) == 1
    assert notes[0].startswith("Rank 0 waits 0.4 ms in Batch 0, the first step, and at most 0.0 ms in a later one")
    assert "All ranks' means are without this step" in notes[0]
    for rank in analysis.ranks:
        assert us(rank.mean, "step", "communication", "wait") == [100, 40, 0]
        assert (rank.left_out, rank.meant_steps, [name for name, _ in rank.steps]) == (
            ("Batch 0",), 1, ["Batch 0", "Batch 1"])  # fmt: skip
        assert (rank.timeline.step, rank.late_ms) == ("Batch 1", 0)
        assert [one.calls for one in rank.collectives] == [1]


def test_the_only_step_is_kept_though_the_ranks_may_have_started_at_different_times(tmp_path: Path) -> None:
    early, late = Report(), Report()
    early.step(0, 0, all_reduce=(50, 490), length=500)
    late.step(0, 0, all_reduce=(480, 490), length=500)
    analysis = analysis_of(tmp_path, early, late)
    assert us(analysis.ranks[0].mean, "step", "wait") == [500, 430]
    (note,) = [note for note in analysis.notes if "did not start together" in note]
    assert note.startswith("Rank 0 waits 0.4 ms in Batch 0, its only step: perhaps")
    assert "The step is kept" in note


def test_traces_that_were_recorded_at_different_times_are_not_aligned(tmp_path: Path) -> None:
    """Their collectives fit each other; the times at which they were recorded do not."""
    for later_us, is_aligned in ((0, True), (50, True), (300, False)):
        analysis = analysis_of(tmp_path, *(session(rank, rank * later_us) for rank in (0, 1)))
        assert (analysis.mean.wire_ms is not None) == is_aligned
        assert any("recorded at different times" in note for note in analysis.notes) == (not is_aligned)
    untold = Report(offset_us=10_000)
    untold.step(0, 0)
    assert analysis_of(tmp_path, session(0, 0), untold).mean.wire_ms is not None


def session(rank: int, start_us: float) -> Report:
    """One step of a session that began then; its clock counts from there."""
    report = Report()
    report.step(0, 100, all_reduce=(50 + rank, 90))
    report.session(1_790_000_000_000_000 + start_us)
    return report


@pytest.mark.parametrize(("base_s", "is_aligned"), [(1_790_857_026, True), (1_790_857_086, False)])
def test_times_of_kineto_count_from_its_base(tmp_path: Path, base_s: int, is_aligned: bool) -> None:
    events = [
        event("user_annotation", "ProfilerStep#0", 0, 100),
        *launched(1, 7, 2, "gemm", 10, 20),
        *launched(2, 30, 2, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 50, 25),
    ]
    files = [
        kineto(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2},
               baseTimeNanoseconds=base * 1_000_000_000)
        for rank, base in enumerate((1_790_857_026, base_s))
    ]  # fmt: skip
    assert (analyze(load(files)).mean.wire_ms is not None) == is_aligned


def test_the_rank_that_is_late_in_a_step_and_the_one_that_is_late_in_its_collectives(tmp_path: Path) -> None:
    """Rank 0 comes last to two of three collectives in each step, by 1 us; rank 1 to one, by 20."""
    reports = [Report(), Report()]
    for rank, report in enumerate(reports):
        for number in range(6):
            at = 200 * number
            report.step(number, at, all_reduce=(50 + 20 * rank, 90))
            for start in (100, 120):
                report.all_reduce(at + start - rank, at + start + 10, at + start - 40)
    first, second = analysis_of(tmp_path, *reports).ranks
    assert (first.last_share, second.last_share) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert (first.last_steps, second.last_steps) == (0, 6)
    assert analysis_of(tmp_path, *reports).compared_steps == 6


def test_two_optimizers_in_a_step(tmp_path: Path) -> None:
    """Each backward pass ends with a reduction, copies of gradients and the step of its own optimizer."""
    report = Report()
    report.span("Batch 0", 0, 200)
    for at in (0, 100):
        if at == 0:
            report.span("forward", at + 1, at + 20)
        report.kernel(at + 2, at + 20, at + 2, MAIN)
        report.kernel(at + 25, at + 60, at + 25)
        report.all_reduce(at + 45, at + 80, at + 50)
        report.copy(at + 80, at + 82, at + 66, DTOD, 1000, AUTOGRAD)
        report.span("optimizer step", at + 84, at + 95)
        report.kernel(at + 85, at + 90, at + 85, MAIN)
    figures = analysis_of(tmp_path, report).mean
    assert (figures.backwards, figures.exchanges, figures.early_exchanges) == (2, 2, 0)
    assert (figures.gradient_copies, figures.gradient_copy_bytes) == (2, 2000)


def test_what_batch_norm_reduces_in_backward_is_no_exchange_of_gradients(tmp_path: Path) -> None:
    report = Report()
    report.step(0, 0, all_reduce=None)
    report.span("bucket 0 4000 bytes none", 39, 41, AUTOGRAD)
    for start, launch in ((40, 35), (50, 40), (60, 45)):
        report.all_reduce(start, start + 8, launch)
    figures = analysis_of(tmp_path, report).mean
    assert (figures.reductions, figures.exchanges, figures.collectives) == (1, 1, 3)


def plain_loop(steps: int = 2) -> list[dict[str, Any]]:
    """A loop on one thread of a CPU, as torch.profiler shows it: autograd runs there too, in nodes with names."""
    events = []
    for number in range(steps):
        at = 100 * number
        events += [
            event("user_annotation", f"ProfilerStep#{number}", at, 99),
            event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 1, 9),
            event("cpu_op", "aten::stack", at + 2, 6),
            event("cpu_op", "aten::linear", at + 12, 8),
            event("cpu_op", "aten::addmm", at + 13, 6),
            event("cpu_op", "aten::mean", at + 21, 4),
            event("cpu_op", "autograd::engine::evaluate_function: MeanBackward0", at + 30, 10),
            event("cpu_op", "MeanBackward0", at + 31, 8),
            event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 42, 28),
            event("cpu_op", "aten::mm", at + 44, 20),
            event("user_annotation", "Optimizer.step#SGD.step", at + 75, 20),
            event("cpu_op", "aten::_foreach_add_", at + 80, 10),
        ]
    return events


def test_a_plain_loop_on_a_cpu(tmp_path: Path) -> None:
    analysis = analyze(load([kineto(tmp_path / "trace.json", plain_loop())]))
    for _, figures in analysis.ranks[0].steps:
        assert us(figures, *PARTS)[1:5] == [12, 13, 55, 10]
        assert us(figures, "backward_compute") == [38]
    assert findings(analysis) == [finding for finding in findings(analysis) if finding.rule == "data_wait"]


@pytest.mark.parametrize("with_forward", [True, False])
def test_a_step_without_backward_has_no_parts(tmp_path: Path, with_forward: bool) -> None:
    """Operators that nothing names, and gloo's collectives: what waits for what cannot be told."""
    files = []
    for rank in (0, 1):
        events = [one for one in plain_loop(6) if not one["name"].startswith(("autograd", "enumerate"))]
        for number in range(6):
            at = 100 * number
            events.append(event("user_annotation", "gloo:all_reduce", at + 40 + rank, 30 - rank, 9))
            if with_forward:
                events.append(event("user_annotation", "DistributedDataParallel.forward", at + 11, 15))
        told = {"rank": rank, "world_size": 2}
        files.append(kineto(tmp_path / f"rank{rank}.json", events, distributedInfo=told))
    analysis = analyze(load(files))
    mean = analysis.mean
    assert (mean.forward_ms, mean.backward_ms, mean.optimizer_ms, mean.other_ms) == (None,) * 4
    assert (mean.data_wait_ms is None) == (not with_forward)
    assert mean.wire_ms == pytest.approx(0.029)
    assert {name for name, _, _ in analysis.ranks[0].timeline.phases} <= {"data wait"}
    assert any("without a backward pass" in note for note in analysis.notes)
    assert not {"slow_transport", "data_wait"} & {finding.rule for finding in findings(analysis)} - {
        "data_wait" if with_forward else ""}  # fmt: skip
    assert line_of(step_table(analysis).rows[0]) == ["0", "6", "0.10", *(["0.01"] if with_forward else [])]


def line_of(row: Sequence[str]) -> list[str]:
    return [cell for cell in row if cell]


def test_ranks_with_other_collectives_are_not_aligned(tmp_path: Path) -> None:
    one, two = Report(), Report()
    one.step(0, 0)
    two.step(0, 0)
    two.all_reduce(91, 92, 46)
    analysis = analysis_of(tmp_path, one, two)
    assert (analysis.mean.wire_ms, analysis.mean.wait_ms, analysis.straggler) == (None, None, None)
    assert any("wire and wait cannot be told" in note for note in analysis.notes)


def test_one_rank_of_two_in_one_report(tmp_path: Path) -> None:
    """nsys around torchrun: one report, two processes, two devices."""
    report, other = Report(process=90 * 2**24, device=1), Report(process=80 * 2**24, device=0)
    report.step(0, 0, all_reduce=(50, 90))
    other.step(0, 0, all_reduce=(70, 90))
    report.add(other)
    analysis = analysis_of(tmp_path, report)
    assert [rank.rank for rank in analysis.ranks] == [0, 1]
    assert [rank.mean.communication_ms for rank in analysis.ranks] == [pytest.approx(0.020), pytest.approx(0.040)]
    assert analysis.straggler == 0


@pytest.mark.parametrize(("exchanges", "backward_us", "data_us"), [(1, 90, 5), (2, 95, 0)])
def test_gradient_accumulation(tmp_path: Path, exchanges: int, backward_us: float, data_us: float) -> None:
    """Two micro-batches: forward 10, backward 40, a gap of 5 in which a first exchange would be exposed."""
    report = Report()
    report.span("Batch 0", 0, 125)
    for micro_batch, at in enumerate((0, 55)):
        report.span("forward", at, at + 5)
        report.kernel(at, at + 10, at + 1, MAIN)
        report.kernel(at + 10, at + 50, at + 11)
        report.copy(at + 20, at + 21, at + 12, DTOD, 64, AUTOGRAD)  # an activation
        if micro_batch or exchanges == 2:
            report.all_reduce(at + 45, at + 55 + 5 * micro_batch, at + 20)
    report.span("optimizer step", 115, 120)
    report.kernel(115, 120, 116, MAIN)
    figures = analysis_of(tmp_path, report).mean
    assert (figures.backwards, figures.exchanges, figures.gradient_copies) == (2, exchanges, 0)
    assert figures.early_exchanges == exchanges - 1
    assert us(figures, *PARTS) == [125, data_us, 20, backward_us, 5, 5]


def test_copies_of_gradients_are_those_after_the_last_reduction_was_launched(tmp_path: Path) -> None:
    report = Report()
    report.step(0, 0)
    report.copy(40, 44, 41, DTOD, 4_915_200, AUTOGRAD)  # an activation: before
    report.copy(70, 71, 46, DTOD, 3000, AUTOGRAD)
    report.copy(71, 73, 47, DTOD, 5000, AUTOGRAD)
    report.copy(95, 96, 85, DTOD, 7, MAIN)  # the optimizer's
    figures = analysis_of(tmp_path, report).mean
    assert (figures.gradient_copies, figures.gradient_copy_bytes) == (2, 8000)
    assert us(figures, "gradient_copy") == [3]


def test_copies_of_gradients_without_any_reduction_follow_the_last_kernel(tmp_path: Path) -> None:
    """DDP around one device."""
    report = Report()
    report.step(0, 0, all_reduce=None)
    report.copy(20, 24, 27.5, DTOD, 4_915_200, AUTOGRAD)
    report.copy(70, 71, 46, DTOD, 3000, AUTOGRAD)
    analysis = analysis_of(tmp_path, report)
    assert (analysis.mean.gradient_copies, analysis.mean.gradient_copy_bytes) == (1, 3000)
    assert not analysis.is_ddp
    report.span("bucket 0 3000 bytes none", 44, 45, AUTOGRAD)
    assert analysis_of(tmp_path, report).is_ddp


@pytest.mark.parametrize(
    ("memory", "then", "blocking", "blocked_us"),
    [
        (PINNED, [], 0, 0),
        (PINNED, [("cudaStreamSynchronize_v3020", 3, 9.5)], 1, 7.5),
        (PINNED, [("cudaEventRecord", 3, 4), ("cudaStreamSynchronize_v3020", 4, 9.5)], 1, 7.5),
        (PINNED, [("cudaEventSynchronize_v3020", 3, 4)], 0, 0),  # DDP reads its timers
        (PINNED, [("cudaStreamSynchronize_v3020", 11, 12)], 0, 0),  # after forward was launched
        (PAGEABLE, [], 1, 0.5),
    ],
)
def test_copies_that_block(
    tmp_path: Path, memory: int, then: list[tuple[str, float, float]], blocking: int, blocked_us: float
) -> None:
    report = Report()
    report.step(0, 0)
    report.tables[MEMCPY][0]["srcKind"] = memory
    for name, start, end in then:
        report.call(name, start, end)
    figures = analysis_of(tmp_path, report).mean
    assert figures.blocking_copies == blocking
    assert us(figures, "blocked") == [blocked_us]


def test_what_the_window_cuts_is_left_out_and_said(tmp_path: Path) -> None:
    report = Report()
    report.kernel(-5, 3, -6)  # of a step before the window
    report.step(7, 0)
    report.step(8, 100)
    report.span("Batch 9", 200, None)
    report.kernel(205, 210, 204, MAIN)
    analysis = analysis_of(tmp_path, report)
    (_, first), (_, second) = analysis.ranks[0].steps
    assert us(first, "step", "data_wait") == [97, 7]  # the device is free at 3
    assert us(second, "step") == [100]
    assert "Batch 9 was still open when the trace ended; it is left out." in analysis.notes
    assert "2 of 14 operations were launched outside the steps and are left out." in analysis.notes


def test_a_step_ends_with_its_range_where_the_next_number_is_missing(tmp_path: Path) -> None:
    report = Report()
    report.step(7, 0)
    report.step(9, 1000)
    (_, first), (_, second) = analysis_of(tmp_path, report).ranks[0].steps
    assert us(first, "step") == us(second, "step") == [100]


@pytest.mark.parametrize(
    "missing",
    [
        ["NVTX_EVENTS.textId"],
        ["NVTX_EVENTS.jsonText", "CUPTI_ACTIVITY_KIND_MEMCPY.srcKind", "CUPTI_ACTIVITY_KIND_MEMCPY.dstKind"],
        ["CUPTI_ACTIVITY_KIND_KERNEL.globalPid", "CUPTI_ACTIVITY_KIND_MEMCPY.globalPid"],
        ["CUPTI_ACTIVITY_KIND_KERNEL.deviceId", "CUPTI_ACTIVITY_KIND_KERNEL.streamId"],
        ["CUPTI_ACTIVITY_KIND_MEMCPY"],
    ],
)
def test_tables_and_columns_that_an_export_lacks(tmp_path: Path, missing: list[str]) -> None:
    report = Report()
    report.step(0, 0)
    for row in report.tables["NVTX_EVENTS"]:  # older than registered strings
        row["text"] = {number: text for text, number in report._strings.items()}[row["textId"]]
    figures = analysis_of(tmp_path, report, without=missing).mean
    assert us(figures, *PARTS) == [100, 10, 20, 60, 5, 5]
    assert us(figures, "communication", "exposed") == [40, 20]
    assert figures.host_copy_bytes == (0 if missing == ["CUPTI_ACTIVITY_KIND_MEMCPY"] else 1000)


def kineto(path: Path, events: list[dict[str, Any]], **more: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": events, **more}))
    return path


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def launched(correlation: int, launch: float, tid: int, name: str, ts: float, dur: float, **args: Any) -> list[Any]:
    return [
        event("cuda_runtime", "cudaLaunchKernel", launch, 0.5, tid, correlation=correlation),
        event("kernel", name, ts, dur, 7, correlation=correlation, stream=7, **args),
    ]


def test_forward_and_backward_in_the_optimizers_closure(tmp_path: Path) -> None:
    """Lightning runs them there; the optimizer's own work comes after backward. Bytes are elements times their size."""
    reduced = {"Collective name": "allreduce", "In msg nelems": 100, "dtype": "BFloat16", "Group size": 8}
    events = [
        event("user_annotation", "ProfilerStep#4", 0, 100),
        event("user_annotation", "Optimizer.step#SGD.step", 5, 60),
        event("user_annotation", "DistributedDataParallel.forward", 6, 10),
        *launched(1, 7, 1, "gemm", 10, 20),
        *launched(2, 18, 1, "loss", 30, 2),
        *launched(3, 25, 2, "gemm", 32, 30),
        *launched(4, 30, 2, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", 50, 25, **reduced),
        *launched(5, 60, 1, "sgd", 75, 5),
    ]
    (trace,) = load([kineto(tmp_path / "trace.json", events, distributedInfo={"rank": 3, "world_size": 8})])
    analysis = analyze([trace])
    assert (trace.rank, trace.world_size) == (3, 8)
    assert us(analysis.mean, *PARTS) == [100, 10, 22, 43, 5, 20]
    (collective,) = analysis.ranks[0].collectives
    assert collective.payload_bytes == 200
    assert collective.busbw_gb_per_s == pytest.approx(200 / 25_000 * 1.75)
    assert analysis.ranks[0].steps[0][0] == "ProfilerStep#4"


def test_steps_between_optimizer_steps_where_no_range_marks_them(tmp_path: Path) -> None:
    events = []
    for number, at in enumerate((0, 100, 200)):
        events += [
            *launched(10 * number + 1, at + 11, 1, "gemm", at + 12, 20),
            *launched(10 * number + 2, at + 31, 2, "gemm", at + 32, 40),
            *launched(10 * number + 3, at + 81, 1, "sgd", at + 82, 5),
            event("user_annotation", "Optimizer.step#SGD.step", at + 80, 10),
        ]
    analysis = analyze(load([kineto(tmp_path / "trace.json", events)]))
    # Without a range of forward the first step cannot be told to be whole.
    assert [name for name, _ in analysis.ranks[0].steps] == ["step 0", "step 1"]
    assert us(analysis.mean, *PARTS) == [100, 22, 20, 50, 5, 3]
    assert any("from the end of one optimizer step" in note for note in analysis.notes)


# committed traces


@pytest.mark.parametrize(
    ("name", "wire_ms", "communication_ms", "collectives", "copies", "copied_bytes"),
    [
        ("cap2000", 13.21, (19.10, 13.21), 1, 0, 0),
        ("cap25", 13.31, (13.31, 32.04), 13, 0, 0),
        ("noview", 1.46, (11.06, 1.51), 13, 152, 352_896_928),  # without its first step
    ],
)
def test_nsys_on_two_gpus(
    tmp_path: Path, name: str, wire_ms: float, communication_ms: tuple[float, float], collectives: int, copies: int,
    copied_bytes: int,
) -> None:  # fmt: skip
    analysis = analyze(load(unpacked(tmp_path, f"{name}_rank?.sqlite.gz")))
    assert analysis.mean.wire_ms == pytest.approx(wire_ms, abs=0.01)
    for rank, expected in zip(analysis.ranks, communication_ms, strict=True):
        mean = rank.mean
        assert mean.communication_ms == pytest.approx(expected, abs=0.01)
        assert mean.collectives == collectives
        # 72 activations are copied too, 36 a step.
        assert (mean.gradient_copies, mean.gradient_copy_bytes) == (copies, copied_bytes)
        assert mean.blocking_copies == 0
        assert mean.step_ms == pytest.approx(
            mean.data_wait_ms + mean.forward_ms + mean.backward_ms + mean.optimizer_ms + mean.other_ms
        )
        assert mean.exposed_ms + mean.hidden_ms == pytest.approx(mean.communication_ms)


EXPOSED = """
WITH operations AS (
    SELECT start, end, 0 AS is_nccl FROM CUPTI_ACTIVITY_KIND_MEMCPY
    UNION ALL SELECT start, end, 0 FROM CUPTI_ACTIVITY_KIND_MEMSET
    UNION ALL SELECT start, end, value LIKE 'nccl%' FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds ON id = shortName
), edges AS (SELECT start AS at FROM operations UNION SELECT end FROM operations),
pieces AS (SELECT at, LEAD(at) OVER (ORDER BY at) AS until FROM edges)
SELECT SUM(until - at) FROM pieces
WHERE EXISTS (SELECT 1 FROM operations WHERE is_nccl AND start <= at AND end >= until)
AND NOT EXISTS (SELECT 1 FROM operations WHERE NOT is_nccl AND start <= at AND end >= until)
"""


def test_exposed_communication_against_sql(tmp_path: Path) -> None:
    for path in unpacked(tmp_path, "cap25_rank?.sqlite.gz"):
        connection = sqlite3.connect(path)
        (exposed_ns,) = connection.execute(EXPOSED).fetchone()
        connection.close()
        analysis = analyze(load([path]))
        assert sum(figures.exposed_ms for _, figures in analysis.ranks[0].steps) == pytest.approx(exposed_ns / 1e6)


@pytest.mark.parametrize(
    ("name", "wire_ms", "busbw", "copies"), [("cap2000", 12.97, 27.2, 0), ("noview", 1.50, 230, 152)]
)
def test_kineto_agrees_with_nsys(tmp_path: Path, name: str, wire_ms: float, busbw: float, copies: int) -> None:
    kineto = analyze(load(unpacked(tmp_path, f"{name}_rank?.json.gz")))
    nsys = analyze(load(unpacked(tmp_path, f"{name}_rank?.sqlite.gz")))
    assert kineto.mean.wire_ms == pytest.approx(wire_ms, abs=0.02)
    assert kineto.mean.wire_ms == pytest.approx(nsys.mean.wire_ms, rel=0.04)
    assert kineto.mean.optimizer_ms == pytest.approx(nsys.mean.optimizer_ms, rel=0.04)
    assert kineto.mean.gradient_copies == nsys.mean.gradient_copies == copies
    assert kineto.world_size == 2
    assert sum(one.payload_bytes or 0 for one in kineto.ranks[0].collectives) == 352_896_928
    rates = [one.busbw_gb_per_s or 0 for one in kineto.ranks[0].collectives]
    assert sum(rates) / len(rates) == pytest.approx(busbw, rel=0.05)


def test_gloo_on_the_cpu(tmp_path: Path) -> None:
    analysis = analyze(load(unpacked(tmp_path, "gloo_rank?.json.gz")))
    assert analysis.is_cpu
    assert analysis.mean.idle_ms is analysis.mean.gradient_copies is analysis.mean.blocking_copies is None
    assert any(note.startswith("No GPU took part") for note in analysis.notes)
    # Rank 1 slept 20 ms in `get batch`.
    assert analysis.straggler == 1
    assert analysis.ranks[1].mean.data_wait_ms - analysis.ranks[0].mean.data_wait_ms == pytest.approx(20, abs=1)
    assert analysis.ranks[0].mean.wait_ms == pytest.approx(22, abs=1)
    assert [(one.bucket, one.payload_bytes) for one in analysis.ranks[0].collectives] == [(0, 536_616), (1, 526_336)]


def test_a_validation_belongs_to_no_step(tmp_path: Path) -> None:
    """It comes between two steps, or after the batch of the next one was fetched."""
    report = Report()
    report.step(3, 0)
    report.span("validation", 110, 400)
    report.kernel(120, 390, 115, MAIN)
    report.step(4, 500)
    report.span("Batch 5", 600, 610)
    report.span("validation", 612, 900)
    report.kernel(620, 890, 615, MAIN)
    report.step(5, 1000)
    analysis = analysis_of(tmp_path, report)
    assert [name for name, _ in analysis.ranks[0].steps] == ["Batch 3", "Batch 4", "Batch 5"]
    for _, figures in analysis.ranks[0].steps:
        assert us(figures, *PARTS) == [100, 10, 20, 60, 5, 5]
    assert "Batch 5 was interrupted; what it did before is left out." in analysis.notes


def test_gloos_collectives_and_the_buckets_of_accumulated_gradients(tmp_path: Path) -> None:
    """Bucket ranges in both micro-batches, reductions in the second only; a broadcast before, on gloo's thread too."""
    events = [
        event("user_annotation", "Batch 0", 0, 200),
        event("user_annotation", "gloo:broadcast", 3, 2, 9),
    ]
    for at in (10, 100):
        events += [
            event("user_annotation", "forward", at, 10),
            event("cpu_op", "aten::linear", at + 1, 8),
            event("user_annotation", "backward", at + 20, 50),
            event("cpu_op", "LinearBackward", at + 21, 20),
            event("cpu_op", "aten::mm", at + 22, 5),  # inside
            event("user_annotation", "bucket 0 400 bytes none", at + 30, 1),
            event("user_annotation", "bucket 1 800 bytes none", at + 40, 1),
        ]
    events += [event("user_annotation", "gloo:all_reduce", 145 + index, 30, 8 + index) for index in (0, 1)]
    events += [event("user_annotation", "optimizer step", 180, 10), event("cpu_op", "aten::add_", 181, 8)]
    analysis = analyze(load([kineto(tmp_path / "trace.json", events, distributedInfo={"rank": 0, "world_size": 4})]))
    mean = analysis.mean
    assert (mean.backwards, mean.exchanges, mean.reductions, mean.collectives) == (2, 1, 2, 3)
    assert us(mean, "compute", "communication", "exposed") == [8 + 20 + 8 + 20 + 8, 2 + 31, 2 + 31]
    assert [(one.name, one.bucket, one.payload_bytes) for one in analysis.ranks[0].collectives] == [
        ("Broadcast", None, None),
        ("AllReduce", 0, 400),
        ("AllReduce", 1, 800),
    ]
    assert analysis.ranks[0].collectives[1].busbw_gb_per_s == pytest.approx(400 / 30_000 * 1.5)
