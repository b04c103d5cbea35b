"""Ours and stock at one, some and all GPUs of this machine, over each transport: one call, in a bounded time.

    python benchmarks/scaling.py --out benchmarks/records/DATE_scaling            # all of it in 9 minutes
    python benchmarks/scaling.py --out FOLDER --counts 8 --transports net --minutes 9   # a part, for more repeats

1. one GPU: no DDP, stock `ddp`, and ours (`compare_stock.py`).
2. for all of the GPUs and half of them, over P2P, SHM and NET: the tuner, the article's rungs, the grid of capacities,
   and the tuned plan beside Lightning's `ddp` (`tuner.py --rungs`). Each gets a share of the time, NET the largest, and
   begins nothing that would exceed it. The table says how many repeats there were. A claim needs five: on eight GPUs
   over NET, where a step takes half a second and more, that is a call of its own.
3. `pytest tests/gpu/test_many_ranks.py`, with `--tests`.

What fails, runs out of time or took another transport is named at the end, and makes the exit status 1. All that was
printed and all raw lines are kept in the folder, and the table as `scaling.md` beside the article's figures.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
TRANSPORTS = {  # as conf/transport has them
    "p2p": {},
    "shm": {"NCCL_P2P_DISABLE": "1"},
    "net": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "FI_EFA_ENABLE_SHM_TRANSFER": "0"},
}
WEIGHTS = {"p2p": 1.5, "shm": 1.5, "net": 3.0}
START_S = 25.0
"""What a job takes beside its repeats: starting processes and the model."""
SHORTEST_S = START_S + 10.0
ALONE_S, TESTS_S = 120.0, 120.0
TORCHRUN_S = 40.0
"""torchrun gives its ranks 30 s to end before it kills them."""
ARTICLE = {  # one of eight GPUs against one alone: A100 on NVLink is P2P here, L40S on PCIe as slow as NET
    ("p2p", "ddp"): "0.92",
    ("p2p", "bf16"): "below ddp",
    ("net", "ddp"): "0.16",
    ("net", "bf16"): "0.26",
    ("net", "powersgd"): "0.84",
}
NAMES = {
    "ddp_default": "ddp_default: torch's capacity",
    "ddp": "ddp: one bucket",
    "ddp (claim)": "Lightning's ddp, 30 steps a repeat",
    "tuned (claim)": "ddpopt, 30 steps a repeat",
}


def run(command: list[str], seconds: float, log: Path, variables: dict[str, str]) -> str:
    """Run, with all output kept in ``log``; an empty string, or what went wrong. Nothing is left running."""
    with log.open("w", encoding="utf-8") as out:
        environment = {**os.environ, **variables}
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"ran out of its {seconds:.0f} s; see {log.name}"
        finally:  # Ctrl-C and SIGTERM too
            end(process)
    return f"exit status {status}; see {log.name}" if status else ""


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the process to end, so that it ends its ranks; they are in sessions of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(TORCHRUN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def torchrun(count: int, script: str, *arguments: str) -> list[str]:
    """The command of one job."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    return [sys.executable, *launch, str(HERE / script), *arguments]


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a record; none where there is no file."""
    if file.exists():
        with file.open(encoding="utf-8") as text:
            yield from map(json.loads, text)


def alone_ms(file: Path) -> dict[str, float]:
    """Variant -> step time on one GPU, medians of medians."""
    medians: dict[str, list[float]] = {}
    for line in lines_of(file):
        if "variant" in line:
            medians.setdefault(line["variant"], []).append(statistics.median(line["steps_ms_by_rank"][0]))
    return {variant: statistics.median(values) for variant, values in medians.items()}


def rows_of(file: Path) -> dict[str, list[float]]:
    """Rung, best capacity of the grid, or claim -> a median for each repeat, of the rank that waited most."""
    rungs: dict[str, list[float]] = {}
    grid: dict[str, list[float]] = {}
    for line in lines_of(file):
        if line.get("part") == "rungs":
            rungs.setdefault(line["name"], []).append(statistics.median(line["slowest_ms"]))
        elif line.get("part") == "grid":
            grid.setdefault(line["name"], []).append(statistics.median(line["slowest_ms"]))
        elif line.get("part") == "claim":
            rungs.setdefault(f"{line['variant']} (claim)", []).append(statistics.median(line["slowest_ms"]))
    if grid:
        best = min(grid, key=lambda name: statistics.median(grid[name]))
        rungs[f"best of the grid of {len(grid)}, capacity {best}"] = grid[best]
    return rungs


def table(out: Path, counts: list[int], transports: list[str], batch: int) -> str:
    """Markdown: a row for each rung, by GPU count and transport."""
    alone = alone_ms(out / "alone.jsonl")
    single = alone.get("single")
    text = [
        "| GPUs | transport | rung | ms a step | repeats | images/s | of one GPU's throughput a GPU | article, 8 GPUs |"
    ]
    text.append("|---|---|---|---|---|---|---|---|")
    for variant, step_ms in alone.items():
        share = f"{single / step_ms:.3f}" if single else ""
        text.append(f"| 1 | | {variant} | {step_ms:.2f} | | {1000 * batch / step_ms:.0f} | {share} | |")
    for count in counts:
        for transport in transports:
            for name, values in rows_of(out / f"{count}_ranks_{transport}.jsonl").items():
                step_ms = statistics.median(values)
                spread = f"{step_ms:.2f} ({min(values):.2f} to {max(values):.2f})"
                images = 1000 * batch * count / step_ms
                share = f"{single / step_ms:.3f}" if single else ""
                seen = ARTICLE.get((transport, name), "") if count == 8 else ""
                what = f"| {count} | {transport} | {NAMES.get(name, name)} | {spread} | {len(values)} |"
                text.append(f"{what} {images:.0f} | {share} | {seen} |")
    return "\n".join(text)


def measure(arguments: argparse.Namespace, count: int, transport: str, seconds: float) -> str:
    """Everything at one GPU count over one transport; an empty string, or what went wrong."""
    if seconds < SHORTEST_S:
        return "no time left"
    name = f"{count}_ranks_{transport}"
    asked = ["--transport", transport] if transport in TRANSPORTS else []
    command = torchrun(count, "tuner.py", "--rungs", *asked, "--workload", arguments.workload,
                       "--batch", str(arguments.batch), "--device", arguments.device, "--commit", arguments.commit,
                       "--seconds", f"{seconds - START_S:.0f}", "--note", f"{count} ranks, transport {transport}",
                       "--out", str(arguments.out / f"{name}.jsonl"))  # fmt: skip
    with tempfile.TemporaryDirectory() as logs:  # of NCCL, which tell the transport in fact
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": f"{logs}/%h.%p.log"}
        return run(command, seconds + 10, arguments.out / f"{name}.log", TRANSPORTS.get(transport, {}) | log)


def main() -> int:
    """Run the jobs one after the other, and show the table."""
    num_gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the record")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--counts", help="GPU counts of two and more, as 4,8; else half of this machine's, and all")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="of %(default)s")
    parser.add_argument("--workload", default="vit_l_32", help="a torchvision model; on CPUs see tuner.py")
    parser.add_argument("--batch", type=int, default=32, help="samples per rank")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if num_gpus else "cpu")
    parser.add_argument("--tests", action="store_true", help="tests/gpu/test_many_ranks.py too, at the end")
    parser.add_argument("--commit", default="", help="of this package, for the record")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.counts.split(",")] if arguments.counts else [num_gpus, num_gpus // 2]
    counts = sorted({count for count in counts if count > 1}, reverse=True)
    transports = arguments.transports.split(",")
    if unknown := sorted(set(transports) - set(TRANSPORTS)):
        parser.error(f"--transports: {unknown[0]!r} is none of {', '.join(TRANSPORTS)}")
    if arguments.device == "cuda" and max(counts, default=0) > num_gpus:
        parser.error(f"--counts: {max(counts)} ranks need as many GPUs, and there are {num_gpus}")
    if arguments.device == "cpu":
        transports = ["gloo"]
        if not counts:
            parser.error("--counts: on CPUs give a number of two or more ranks")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds as Ctrl-C does
    deadline = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    for earlier in (*arguments.out.glob("*_ranks_*.jsonl"), arguments.out / "alone.jsonl"):
        earlier.unlink(missing_ok=True)  # it would stand in this table
    problems: dict[str, str] = {}
    if arguments.device == "cuda":
        command = torchrun(1, "compare_stock.py", "--model", arguments.workload, "--batch", str(arguments.batch),
                           "--repeats", "3", "--variants", "single", "ddpopt",
                           "--out", str(arguments.out / "alone.jsonl"))  # fmt: skip
        problems["one GPU"] = run(command, ALONE_S, arguments.out / "alone.log", {})
    jobs = [(count, transport) for count in counts for transport in transports]
    weights = [WEIGHTS.get(transport, 1.0) for _, transport in jobs]
    for index, (count, transport) in enumerate(jobs):
        left_s = deadline - time.monotonic() - (TESTS_S if arguments.tests else 0.0)
        problem = measure(arguments, count, transport, left_s * weights[index] / sum(weights[index:]))
        problems[f"{count} ranks over {transport}"] = problem
        print(f"{count} ranks over {transport}: {problem or 'done'}", flush=True)
    if arguments.tests:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(HERE.parent / "tests/gpu/test_many_ranks.py")]
        problems["tests"] = run(command, max(10.0, deadline - time.monotonic()), arguments.out / "tests.log", {})
    text = table(arguments.out, counts, transports, arguments.batch)
    (arguments.out / "scaling.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    failed = {name: problem for name, problem in problems.items() if problem}
    for name, problem in failed.items():
        print(f"{name}: {problem}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
