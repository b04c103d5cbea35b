"""The callback's window and ranges, on the CPU with a recorder in the place of NVTX, and with torch.profiler."""

import gc
import gzip
import json
import logging
import re
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy
from ranks import Ranks
from scenarios import Messages, Mlp, data, state_of, trainer

from lightning_ddpopt import DDPOptStrategy, NsysCallback, NVTXProfiler
from lightning_ddpopt.profiling import capture, nvtx

ONE_STEP = ["Batch", "get batch", "/", "forward", "/", "backward", "bucket", "/", "/", "optimizer step", "/", "/"]


class Recorder:
    """Ranges as text: a name as it opens, a slash as it closes."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def push(self, name: str, colour: int) -> None:
        assert colour == nvtx.COLOURS[re.sub(r"^(Batch|bucket) .*", r"\1", name)]
        self.events.append(name)

    def pop(self) -> None:
        self.events.append("/")


def record(
    callback: dict[str, Any],
    strategy: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    fits: int = 1,
    **arguments: Any,
) -> dict[str, Any]:
    recorder, messages = Recorder(), Messages()
    capture.NvtxRanges = lambda: recorder  # type: ignore[assignment,misc]
    try:
        made = DDPStrategy() if strategy is None else DDPOptStrategy(**strategy)
        nsys = NsysCallback(**callback)
        fitter = trainer(made, callbacks=[nsys], **({"max_steps": 8} | arguments))
        model = Mlp(**(module or {}))
        for fit in range(1, fits + 1):
            fitter.fit_loop.epoch_loop.max_steps = fitter.max_steps if fits == 1 else 8 * fit
            fitter.fit(model, data(), data() if arguments.get("limit_val_batches") else None)
        return {"events": recorder.events, "messages": messages.texts, "state": state_of(model), "open": nsys._window}
    finally:
        messages.close()


def shown(events: list[str]) -> list[str]:
    """Without numbers: `Batch 3` is `Batch`, `bucket 0 17000 bytes none` is `bucket`."""
    return ["Batch" if e.startswith("Batch") else "bucket" if e.startswith("bucket") else e for e in events]


@pytest.mark.parametrize("strategy", [None, {}, {"static_graph": True, "comm_hook": "bf16"}])
def test_the_ranges_of_a_window(two_ranks: Ranks, strategy: dict[str, Any] | None) -> None:
    for result in two_ranks(record, {"warmup_steps": 4, "profile_steps": 2}, strategy):
        assert shown(result["events"]) == ["capture", *ONE_STEP, *ONE_STEP, "/"]
        assert [event for event in result["events"] if event.startswith("Batch")] == ["Batch 4", "Batch 5"]
        hook = "bf16" if strategy and strategy.get("comm_hook") else "none"
        parameters = sum(
            array.size for name, array in result["state"].items() if "running" not in name and "num" not in name
        )
        assert f"bucket 0 {4 * parameters} bytes {hook}" in result["events"]
        assert result["open"] is None


def test_each_bucket_has_a_range(two_ranks: Ranks) -> None:
    (result, _) = two_ranks(record, {"warmup_steps": 4, "profile_steps": 1}, {"bucket_cap_mb": 0.01})
    buckets = [event.split() for event in result["events"] if event.startswith("bucket")]
    assert [int(words[1]) for words in buckets] == list(range(len(buckets)))
    assert len(buckets) > 1
    assert result["events"].index("backward") < result["events"].index(" ".join(buckets[0]))


def test_accumulation_has_several_micro_batches_in_a_step(two_ranks: Ranks) -> None:
    for result in two_ranks(record, {"warmup_steps": 4, "profile_steps": 1}, {}, accumulate_grad_batches=2):
        assert [event for event in shown(result["events"]) if event != "/"] == [
            *("capture", "Batch", "get batch", "forward", "backward"),
            *("get batch", "forward", "backward", "bucket", "optimizer step"),
        ]


def test_manual_optimisation(two_ranks: Ranks) -> None:
    for result in two_ranks(record, {"warmup_steps": 4, "profile_steps": 2}, {}, {"accumulate": 1}):
        assert shown(result["events"]) == ["capture", *ONE_STEP, *ONE_STEP, "/"]


def test_validation_has_its_own_range(two_ranks: Ranks) -> None:
    arguments = {"limit_val_batches": 1, "val_check_interval": 5, "num_sanity_val_steps": 1}
    for result in two_ranks(record, {"warmup_steps": 4, "profile_steps": 2}, {}, **arguments):
        found = shown(result["events"])
        assert found.count("validation") == 1, "that within the window, not the sanity check's"
        place = found.index("validation")
        assert found[place - 1 : place + 2] == ["/", "validation", "/"]
        assert found.count("/") == sum(event != "/" for event in found)


def test_the_window_is_on_the_chosen_ranks(two_ranks: Ranks) -> None:
    results = two_ranks(record, {"warmup_steps": 1, "profile_steps": 2, "ranks": [1]}, {})
    assert [bool(result["events"]) for result in results] == [False, True]


class Timed(Recorder):
    first_batch_s = 0.0

    def push(self, name: str, colour: int) -> None:
        super().push(name, colour)
        if name.startswith("Batch") and not self.first_batch_s:
            self.first_batch_s = time.time()


def starts_late() -> float:
    """When the first step begins on a rank; rank 1's profiler takes a second to start."""
    recorder = Timed()

    def start() -> Timed:
        time.sleep(torch.distributed.get_rank())
        return recorder

    capture.NvtxRanges = start  # type: ignore[assignment,misc]
    trainer(DDPOptStrategy(), max_steps=4, callbacks=[NsysCallback(1, 1)]).fit(Mlp(), data())
    return recorder.first_batch_s


def test_profilers_wait_for_each_other(two_ranks: Ranks) -> None:
    first, second = two_ranks(starts_late)
    assert abs(first - second) < 0.5


def test_every_fit_has_a_window_and_the_second_has_its_buckets(two_ranks: Ranks) -> None:
    for result in two_ranks(record, {"warmup_steps": 4, "profile_steps": 1}, {}, fits=2):
        assert shown(result["events"]) == 2 * ["capture", *ONE_STEP, "/"]
        assert [event for event in result["events"] if event.startswith("Batch")] == ["Batch 4", "Batch 12"]


@pytest.mark.parametrize(("max_steps", "recorded"), [(2, 0), (4, 1)])
def test_a_run_that_ends_early_says_so(two_ranks: Ranks, max_steps: int, recorded: int) -> None:
    for result in two_ranks(record, {"warmup_steps": 3, "profile_steps": 5}, {}, max_steps=max_steps):
        said = [text for text in result["messages"] if "training ended" in text]
        assert len(said) == 1
        assert f"after {max_steps} optimizer steps, and only {recorded} of the 5 steps after the first 3" in said[0]
        assert result["events"].count("/") == sum(event != "/" for event in result["events"])


def test_profiling_changes_no_bit(two_ranks: Ranks) -> None:
    profiled = two_ranks(record, {"warmup_steps": 1, "profile_steps": 5}, {"bucket_cap_mb": 0.01})
    plain = two_ranks(record, {"warmup_steps": 1, "profile_steps": 5, "ranks": []}, {"bucket_cap_mb": 0.01})
    for one, other in zip(profiled, plain, strict=True):
        assert all((array == other["state"][name]).all() for name, array in one["state"].items())


def test_without_cuda_it_says_what_is_missing(two_ranks: Ranks) -> None:
    for result in two_ranks(record, {"warmup_steps": 1, "profile_steps": 1}, {}):
        assert sum("without CUDA nsys records the ranges" in text for text in result["messages"]) == 1


class Breaks(Mlp):
    """Raises in the forward, in the backward, with a bucket's range open, or in validation."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 4:
            if self.where == "forward":
                raise KeyError("broken forward")

            def fail(*gradient: Any) -> None:
                raise KeyError(f"broken {self.where}")

            if self.where == "backward":
                self.net[3].weight.register_hook(fail)
            elif self.where == "bucket":  # of its last gradient, after the callback's hooks
                node = torch.autograd.graph.get_gradient_edge(self.net[0].weight).node
                self.kept = node, node.register_prehook(fail)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.where == "validation":
            raise KeyError("broken validation")


def break_in(where: str) -> list[str]:
    recorder = Recorder()
    capture.NvtxRanges = lambda: recorder  # type: ignore[assignment,misc]
    validates = {"val_check_interval": 4, "num_sanity_val_steps": 0} if where == "validation" else {}
    callback = NsysCallback(warmup_steps=3, profile_steps=4)
    fitter = trainer(DDPOptStrategy(), max_steps=8, callbacks=[callback], **validates)
    with pytest.raises(KeyError, match=f"broken {where}"):
        fitter.fit(Breaks(where), data(), data())
    return recorder.events


@pytest.mark.parametrize("where", ["forward", "backward", "bucket", "validation"])
def test_an_exception_closes_all_ranges(two_ranks: Ranks, where: str) -> None:
    for events in two_ranks(break_in, where):
        assert where in " ".join(events)
        assert events.count("/") == sum(event != "/" for event in events)


def kineto(folder: str) -> None:
    callback = NsysCallback(warmup_steps=3, profile_steps=2, profiler="torch", output=f"{folder}/new/trace")
    trainer(DDPOptStrategy(bucket_cap_mb=0.01), max_steps=8, callbacks=[callback]).fit(Mlp(), data())


def test_torch_profiler_writes_a_trace_of_each_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(kineto, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"trace_rank_{r}.json.gz" for r in range(2)]
    trace = json.loads(gzip.decompress((tmp_path / "new" / "trace_rank_1.json.gz").read_bytes()))
    spans = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation"
    }
    assert {"Batch 3", "Batch 4", "get batch", "forward", "backward", "optimizer step"} <= set(spans)
    assert spans["Batch 4"][0] < spans["backward"][0] < spans["backward"][1] < spans["Batch 4"][1]


def one_window_leaves_nothing() -> bool:
    module = Mlp()
    fitter = trainer(DDPOptStrategy(), max_steps=6, callbacks=[NsysCallback(warmup_steps=2, profile_steps=2)])
    fitter.fit(module, data())
    wrapper = weakref.ref(fitter.strategy.model)
    del fitter, module
    gc.collect()
    return wrapper() is None


def test_nothing_is_kept_alive(two_ranks: Ranks) -> None:
    assert two_ranks(one_window_leaves_nothing) == [True, True]


def test_one_rank_without_ddp(one_rank: Ranks) -> None:
    (result,) = one_rank(record, {"warmup_steps": 0, "profile_steps": 1}, {})
    assert [event for event in shown(result["events"]) if event != "/"] == [
        *("capture", "Batch", "get batch", "forward", "backward", "optimizer step")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"profile_steps": 0}, "profile_steps at least 1"),
        ({"ranks": "0"}, "must be 'all' or a list of global ranks"),
        ({"ranks": [-1]}, "must be 'all' or a list of global ranks"),
        ({"ranks": 0}, "must be 'all' or a list of global ranks"),
        ({"profiler": "vtune"}, "must be 'nsys' or 'torch'"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        NsysCallback(**arguments)


def test_the_environment_chooses_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NsysCallback().profiler == "nsys"
    monkeypatch.setenv("DDPOPT_PROFILER", "torch")
    monkeypatch.setenv("DDPOPT_PROFILE_OUTPUT", "a/b")
    assert (NsysCallback().profiler, NsysCallback().output) == ("torch", "a/b")
    assert NsysCallback(profiler="nsys").profiler == "nsys"


class TwoOptimizers(Mlp):
    """Takes turns, as a GAN does."""

    def __init__(self) -> None:
        super().__init__(accumulate=1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.net(batch[0]).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        halves = self.net[:3].parameters(), self.net[3:].parameters()
        return [torch.optim.SGD(half, lr=0.01) for half in halves], []


def gan() -> list[str]:
    recorder = Recorder()
    capture.NvtxRanges = lambda: recorder  # type: ignore[assignment,misc]
    fitter = trainer(DDPStrategy(), max_steps=8, callbacks=[NsysCallback(warmup_steps=2, profile_steps=1)])
    fitter.fit(TwoOptimizers(), data())
    return recorder.events


def test_optimizers_that_take_turns_have_a_forward_each(two_ranks: Ranks) -> None:
    for events in two_ranks(gan):
        assert [event for event in shown(events) if event not in ("/", "bucket")] == [
            *("capture", "Batch", "get batch", "forward", "backward", "optimizer step"),
            *("forward", "backward", "optimizer step", "forward"),
        ]


def refused(profiler: str, folder: str) -> tuple[str, list[str]]:
    messages = Messages()
    callbacks = [NsysCallback(profiler=profiler), NsysCallback(profiler=profiler)]
    with pytest.raises(ValueError, match="two NsysCallbacks") as error:
        trainer(DDPOptStrategy(), max_steps=2, callbacks=callbacks).fit(Mlp(), data())
    theirs = PyTorchProfiler(dirpath=folder, filename="theirs")
    with_profiler = trainer(DDPOptStrategy(), max_steps=3, callbacks=callbacks[:1], profiler=theirs)
    callbacks[0].warmup_steps, callbacks[0].output = 1, "/nowhere/x"
    with_profiler.fit(Mlp(), data())
    messages.close()
    return str(error.value), messages.texts


def test_two_profilers_at_once_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    (error, said), (_, silent) = two_ranks(refused, "torch", str(tmp_path))
    assert "remove one of them" in error
    assert any("the Trainer has a PyTorchProfiler" in text for text in said)
    assert not any("PyTorchProfiler" in text for text in silent)


def test_ranks_that_are_not_there(two_ranks: Ranks) -> None:
    first, second = two_ranks(record, {"warmup_steps": 1, "profile_steps": 1, "ranks": [7]}, {})
    assert any("ranks=[7] are none of this run's 2" in text for text in first["messages"])
    assert first["events"] == second["events"] == []


def test_no_buckets_are_told_of(two_ranks: Ranks) -> None:
    arguments = {"find_unused_parameters": True}
    for result in two_ranks(record, {"warmup_steps": 4, "profile_steps": 1}, arguments):
        assert any("no ranges of buckets" in text for text in result["messages"])


def test_nvtx_that_is_switched_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("nvtx.enabled", lambda: False)
    with caplog.at_level(logging.WARNING):
        capture._warn_of_what_is_missing(uses_cuda=True)
    assert "NVTX_DISABLE is set, so that no range is recorded" in caplog.text


def test_lightnings_actions_are_ranges() -> None:
    profiler, recorder = NVTXProfiler(), Recorder()
    profiler._ranges = recorder  # type: ignore[assignment]
    recorder.push = lambda name, colour: recorder.events.append(name)  # type: ignore[method-assign]
    with profiler.profile("outer"), profiler.profile("inner"):
        pass
    profiler.stop("never started")
    profiler.start("outer")
    profiler.start("left by an exception")
    profiler.stop("outer")
    assert recorder.events == ["outer", "inner", "/", "/", "outer", "left by an exception", "/", "/"]
