"""The article's study on this machine: every rung as a job of its own under torchrun, then the report.

python examples/ladder.py            # on GPUs ViT-L/32 over every transport, else a tiny ViT on digits on 2 processes
python examples/ladder.py --short    # one run of each rung: how it looks, not for claims; CPU: 5 minutes
python examples/ladder.py --devices 2,4,8 --transports p2p,net workload=bf16_adamw compile=true

Repeats are the outermost loop, so that every rung meets the same drift. If a job fails the others still run, and the
exit status tells. Records are kept as runs finish: Ctrl-C loses only the running one.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import torch

TRAIN = Path(__file__).with_name("train.py")
ALONE = ["single", "ddp_1gpu"]
TOGETHER = ["ddp", "static_graph", "bucket_view", "bf16", "powersgd", "ddp_default", "ddpopt"]
SWEEPS = ["bucket_sweep", "accumulate"]
PORTS_A_SWEEP = 64
VERDICT_FILE = "ddpopt_verdict.json"
DDPOPT = [sys.executable, "-m", "lightning_ddpopt.cli"]


def sweeps(arguments: argparse.Namespace, num_gpus: int) -> Iterator[list[str]]:
    """Overrides of each sweep of one repeat."""
    is_alone = num_gpus == 1 and arguments.num_nodes == 1
    if arguments.num_nodes == 1:
        yield _experiments(arguments, [*ALONE, "ddpopt"] if is_alone else ALONE)
    if is_alone:
        return
    axes: dict[str, list[str]] = {}  # of rungs that are sweeps; left out: those of the experiment
    if num_gpus == 0:  # the tiny ViT has 2 MiB of gradients and 1280 images to train on
        axes["bucket_sweep"] = ["strategy.bucket_cap_mb=0.25,2000", "strategy.comm_hook=none,bf16"]
        axes["accumulate"] = ["effective_batch_size=64", "trainer.accumulate_grad_batches=1,4"]
    elif arguments.short:
        axes["bucket_sweep"] = ["strategy.bucket_cap_mb=25,2000"]
        axes["accumulate"] = ["trainer.accumulate_grad_batches=1,4"]
    for transport in arguments.transports.split(","):
        where = [f"transport={transport}"] + ([f"trainer.devices={arguments.devices}"] if arguments.devices else [])
        for rungs in (TOGETHER, *([rung] for rung in SWEEPS)):
            chosen = _experiments(arguments, rungs)
            yield chosen and [*where, *chosen, *axes.get(rungs[0], [])]


def _experiments(arguments: argparse.Namespace, rungs: list[str]) -> list[str]:
    chosen = [rung for rung in rungs if rung in arguments.rungs]
    return [f"experiment={','.join(chosen)}"] if chosen else []


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse what would fail in every run, or run something else than was asked for."""
    if unknown := sorted(set(arguments.rungs) - {*ALONE, *TOGETHER, *SWEEPS}):
        parser.error(f"--rungs: {unknown[0]!r} is none of {', '.join([*ALONE, *TOGETHER, *SWEEPS])}")
    if unknown := sorted(set(arguments.transports.split(",")) - {"auto", "p2p", "shm", "net"}):
        parser.error(f"--transports: {unknown[0]!r} is none of auto, p2p, shm, net")
    if not all(count.isdigit() and int(count) > 0 for count in arguments.devices.split(",") if arguments.devices):
        parser.error(f"--devices: {arguments.devices!r} must be numbers of at least 1, as 2,4,8")
    if arguments.num_nodes < 1 or arguments.repeats < 1:
        parser.error("--num-nodes and --repeats must be at least 1")
    port = arguments.rendezvous.rpartition(":")[2]
    if (arguments.num_nodes > 1) != (port.isdigit() and ":" in arguments.rendezvous):
        parser.error("several machines need both --num-nodes and --rendezvous HOST:PORT, one machine neither")


def rendezvous(arguments: argparse.Namespace, sweep: int) -> list[str]:
    """Where the nodes of a sweep meet: no two sweeps at one port, as a node may start its next one earlier."""
    if arguments.num_nodes == 1:
        return []
    host, _, port = arguments.rendezvous.rpartition(":")
    return [
        f"trainer.num_nodes={arguments.num_nodes}",
        f"hydra.launcher.rdzv_endpoint={host}:{int(port) + sweep * PORTS_A_SWEEP}",
    ]


def main() -> int:
    """Run the sweeps, and show the records of all."""
    num_gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one repeat over the transport that NCCL chooses")
    rungs = [*ALONE, *TOGETHER, *SWEEPS]
    parser.add_argument("--rungs", default=",".join(rungs), help="only these: %(default)s")
    parser.add_argument("--repeats", type=int, help="5; with --short 1")
    parser.add_argument("--devices", default="", help="per machine, for the rungs of several ranks: 2,4,8; else all")
    parser.add_argument("--transports", help="of auto, p2p, shm, net; else the last three on GPUs, auto with --short")
    parser.add_argument("--num-nodes", type=int, default=1, help="machines; start the same command on each")
    parser.add_argument("--rendezvous", default="", help="with several machines: HOST:PORT of one of them")
    parser.add_argument("--out", type=Path, help="folder for records, logs and report; else below multirun/")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for every run")
    arguments = parser.parse_intermixed_args()
    arguments.rungs = arguments.rungs.split(",")
    if arguments.repeats is None:
        arguments.repeats = 1 if arguments.short else 5
    if arguments.transports is None:
        is_one_node = arguments.num_nodes == 1  # over several, no transport but the network reaches all
        arguments.transports = "p2p,shm,net" if num_gpus > 1 and is_one_node and not arguments.short else "auto"
    check(parser, arguments)
    planned = list(filter(None, sweeps(arguments, num_gpus)))
    if not planned:
        parser.error(
            f"none of {', '.join(arguments.rungs)} runs on {num_gpus} GPU and {arguments.num_nodes} machine(s)"
        )
    if arguments.num_nodes > 1:
        last = int(arguments.rendezvous.rpartition(":")[2]) + arguments.repeats * len(planned) * PORTS_A_SWEEP
        if last > 65535:
            parser.error(f"--rendezvous: ports up to {last} would be needed, and there are 65535: begin at a lower one")
    out = (arguments.out or Path("multirun", f"ladder_{datetime.now():%Y-%m-%d_%H-%M-%S}")).absolute()
    if num_gpus:  # there is no accuracy on random labels
        machine = ["model=vit_l_32", "data=synthetic", "trainer.limit_val_batches=0"]
    else:  # more steps than a claim needs, so that the accuracy on the digits says something
        machine = ["trainer=cpu", "data=digits", "measure.steps=80"]

    # Unwinds as Ctrl-C does: the running sweep ends, and with it its ranks.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    failed = 0
    for repeat in range(arguments.repeats):
        for number, overrides in enumerate(planned):
            folder = out / f"repeat_{repeat}" / f"sweep_{number}"
            settings = [f"repeat={repeat}", "hydra.sweep.dir='" + str(folder).replace("'", "\\'") + "'"]
            meeting = rendezvous(arguments, repeat * len(planned) + number)
            command = [*settings, *machine, *overrides, *meeting, *arguments.overrides]
            failed += subprocess.run([sys.executable, str(TRAIN), "-m", *command], check=False).returncode != 0
    if any(out.rglob("record.jsonl")):  # of several machines, the one with rank 0 has them
        report = [*DDPOPT, "report", str(out)]
        files = [f"--markdown={out / 'report.md'}", f"--png={out / 'report.png'}"]
        failed += subprocess.run([*report, *files], check=False).returncode != 0
        for file in sorted(out.rglob(VERDICT_FILE))[:1]:
            show = [*DDPOPT, "verdict", str(file), f"--png={out / 'verdict.png'}"]
            failed += subprocess.run(show, check=False).returncode != 0
            print("ddpopt tunes in more warm-up steps than the other rungs have: its loss, accuracy and parameters are"
                  " of a longer training.")  # fmt: skip
        print(f"records, logs, report and the tuner's verdicts: {out}")
    if failed:
        print(f"{failed} sweeps had failed jobs; their output says which, and why", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
