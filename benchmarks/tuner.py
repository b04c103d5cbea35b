"""The tuner against the exhaustive grid of bucket capacities, and against Lightning's stock `ddp`, in one run.

One process per GPU, or per host on CPUs, under torchrun:

    torchrun --nproc-per-node 2 benchmarks/tuner.py --workload vit_l_32 --batch 32 --out record.jsonl

1. tune: one fit with `DDPOptStrategy()`; its verdict.
2. grid: every capacity that gives a layout of its own, torch's default and the verdict's plan; with `--rungs` also the
   article's rungs, before. Each repeat is one fit in which every plan is wrapped anew for a block: three steps are left
   out and the next ones timed. Every other repeat runs them in the opposite order.
3. claim: one fit each of stock `ddp` and of the verdict's plan, interleaved.

A step is timed from before the forward to after the optimizer step, by CUDA events or a clock. `steps_ms` are those
of the rank that waited least, `slowest_ms` of the one that waited most. Inputs lie on the device. Rungs, claim and grid
take turns. With `--seconds` nothing is begun that would end later; the summary says how many repeats there were, and a
part without any makes the run fail. Lines: the environment, the verdict, then one per block.
"""

import argparse
import datetime
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import lightning as L  # noqa: N812
import torch
import torch.distributed as dist
import torchvision
from compare_stock import Steps
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from lightning_ddpopt import DDPOptStrategy, HookSpec, Plan
from lightning_ddpopt.clock import mark, milliseconds
from lightning_ddpopt.machine.environment import device_name, exchange_variables, hardware, versions
from lightning_ddpopt.machine.transport import is_transport, transports_of_this_process
from lightning_ddpopt.tuning.proposals import grid
from lightning_ddpopt.tuning.simulator import bucket_bytes, buckets_of, simulate
from lightning_ddpopt.tuning.verdict import Verdict

LEFT_OUT, CLAIM_LEFT_OUT = 3, 12
ONE_BUCKET = 2000
Lines: TypeAlias = list[dict[str, Any]]


class Trained(L.LightningModule):
    """A network on inputs that lie on the device.

    Args:
        net: the network.
        inputs: of one batch.
        labels: classes, or None: the mean square of the output is the loss.

    """

    def __init__(self, net: nn.Module, inputs: Tensor, labels: Tensor | None) -> None:
        super().__init__()
        self.net, self.inputs, self.labels = net, inputs, labels

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(self.inputs)
        return outputs.square().mean() if self.labels is None else nn.functional.cross_entropy(outputs, self.labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Gpt(nn.Module):
    """A small decoder-only transformer that predicts the next token.

    Args:
        depth, width: layers, and the size of each token's vector; heads have 64.
        tokens, context: size of the vocabulary, and tokens of a sequence.

    """

    def __init__(self, depth: int, width: int, tokens: int = 8192, context: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of (batch, tokens of the vocabulary, position), as cross_entropy takes them."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        outputs = self.layers(self.embedding(tokens) + self.position, mask=mask, is_causal=True)
        return self.head(outputs).transpose(1, 2)  # type: ignore[no-any-return]


class Clock(L.Callback):
    """Marks each step; changes to the next plan of a schedule at the start of its block.

    Args:
        schedule: plans in the order in which they run; None: one plan throughout.
        steps: steps of each block.

    """

    def __init__(self, schedule: list[Plan] | None = None, steps: int = 0) -> None:
        self.schedule, self.steps = schedule, steps
        self.marks: list[tuple[Any, Any]] = []
        self._start: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.schedule and batch_idx % self.steps == 0 and batch_idx // self.steps < len(self.schedule):
            assert isinstance(trainer.strategy, DDPOptStrategy)
            trainer.strategy.change_plan(self.schedule[batch_idx // self.steps])

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.marks.append((self._start, mark(trainer.strategy.root_device)))

    def begin(self, device: torch.device) -> None:
        """The forward begins."""
        self._start = mark(device)

    def steps_ms(self) -> list[float]:
        """The time of each step in ms."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [milliseconds(start, end) for start, end in self.marks]


def workload(name: str, batch: int, device: torch.device) -> Trained:
    """The named network with one batch of inputs."""
    torch.manual_seed(0)
    if name.startswith("mlp_"):  # mlp_DEPTHxWIDTH
        depth, width = map(int, name.removeprefix("mlp_").split("x"))
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        return Trained(nn.Sequential(*layers), torch.randn(batch, width, device=device), None)
    if name.startswith("gpt_"):  # gpt_DEPTHxWIDTH
        gpt = Gpt(*map(int, name.removeprefix("gpt_").split("x")))
        tokens = torch.randint(0, 8192, (batch, 513), device=device)
        return Trained(gpt, tokens[:, :-1], tokens[:, 1:])
    if name == "vit_tiny":  # that of conf/model/vit_tiny.yaml
        net: nn.Module = VisionTransformer(8, 2, 4, 4, 128, 256, num_classes=10)
        images, classes = torch.randn(batch, 3, 8, 8, device=device), 10
    else:
        net = torchvision.models.get_model(name, weights=None)
        images, classes = torch.randn(batch, 3, 224, 224, device=device), 1000
    return Trained(net, images, torch.randint(0, classes, (batch,), device=device))


@dataclass(frozen=True)
class Times:
    """Of each step in ms: on the rank that waited least, and on the one that waited most."""

    least: list[float]
    slowest: list[float]

    def line(self, steps: slice) -> dict[str, Any]:
        """These steps, as a part of a line of the record."""
        return {"steps_ms": self.least[steps], "slowest_ms": self.slowest[steps]}


class Deadline:
    """When the last repeat must have ended; rank 0's clock counts.

    Args:
        seconds: from now; 0: never.

    """

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + (seconds or float("inf"))

    def allows(self, seconds: float) -> bool:
        """Whether so much can still be done; the same on all ranks."""
        answer = [time.monotonic() + seconds <= self.at]
        dist.broadcast_object_list(answer)
        return answer[0]


def fit(strategy: Strategy, module: Trained, steps: int, clock: Clock) -> Times:
    """Train."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = L.Trainer(
        accelerator="gpu" if module.inputs.device.type == "cuda" else "cpu",
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local,
        strategy=strategy,
        callbacks=[clock],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    handle = module.net.register_forward_pre_hook(lambda *_: clock.begin(trainer.strategy.root_device))
    trainer.fit(module, torch.utils.data.DataLoader(Steps(steps)))
    handle.remove()
    own = clock.steps_ms()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    by_step = list(zip(*gathered, strict=True))
    return Times([round(min(times), 3) for times in by_step], [round(max(times), 3) for times in by_step])


def plans_of_the_grid(verdict: Verdict) -> list[Plan]:
    """The verdict's plan, the default, and one for each other layout of a single capacity."""
    assert verdict.timeline is not None
    default = verdict.default
    by_layout: dict[Any, Plan] = {}
    capacities: list[Any] = [verdict.plan.bucket_cap_mb, None, *grid(verdict.timeline)]
    for capacity in capacities:
        plan = Plan(default.static_graph, default.gradient_as_bucket_view, capacity, default.hook)
        by_layout.setdefault(buckets_of(verdict.timeline.gradients, capacity), plan)
    return list(by_layout.values())


def rungs(verdict: Verdict) -> dict[str, Plan]:
    """The article's rungs of several ranks (see conf/experiment), and compression in the buckets that were found."""
    powersgd = HookSpec("powersgd", {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2})
    return {
        "ddp_default": Plan(gradient_as_bucket_view=False),
        "ddp": Plan(gradient_as_bucket_view=False, bucket_cap_mb=ONE_BUCKET),
        "static_graph": Plan(static_graph=True, gradient_as_bucket_view=False, bucket_cap_mb=ONE_BUCKET),
        "bucket_view": Plan(static_graph=True, bucket_cap_mb=ONE_BUCKET),
        "bf16": Plan(static_graph=True, bucket_cap_mb=ONE_BUCKET, hook=HookSpec("bf16")),
        "powersgd": Plan(static_graph=True, bucket_cap_mb=ONE_BUCKET, hook=powersgd),
        "ddpopt": verdict.plan,
        "ddpopt bf16": replace(verdict.plan, hook=HookSpec("bf16")),
    }


def run_blocks(part: str, plans: dict[str, Plan], module: Trained, verdict: Verdict, repeat: int, steps: int) -> Lines:
    """One fit with a block of each plan."""
    assert verdict.timeline is not None
    order = list(plans) if repeat % 2 == 0 else list(plans)[::-1]
    block = LEFT_OUT + steps
    schedule = [plans[name] for name in order]
    strategy = DDPOptStrategy(plan=schedule[0], gradient_check_steps=0)
    times = fit(strategy, module, block * len(schedule), Clock(schedule, block))
    lines = []
    for index, (name, plan) in enumerate(zip(order, schedule, strict=True)):
        buckets = buckets_of(verdict.timeline.gradients, plan.bucket_cap_mb)
        predicted = None
        is_exact = plan.hook == verdict.default.hook
        if is_exact and verdict.link is not None and verdict.interference is not None:
            predicted = round(simulate(verdict.timeline, buckets, verdict.link, verdict.interference).step_ms, 3)
        sizes = list(bucket_bytes(verdict.timeline.gradients, buckets))
        lines.append(
            {"part": part, "name": name, "repeat": repeat, "plan": plan.to_dict(), "buckets": sizes}
            | {"predicted_ms": predicted}
            | times.line(slice(block * index + LEFT_OUT, block * (index + 1)))
        )
    return lines


def run_claim(verdict: Verdict, module: Trained, repeat: int, steps: int) -> Lines:
    """One fit of stock `ddp`, and one of the verdict's plan."""
    lines = []
    for variant in ("ddp", "tuned"):
        strategy = DDPStrategy() if variant == "ddp" else DDPOptStrategy(plan=verdict.plan, gradient_check_steps=0)
        times = fit(strategy, module, CLAIM_LEFT_OUT + steps, Clock())
        lines.append({"part": "claim", "variant": variant, "repeat": repeat} | times.line(slice(CLAIM_LEFT_OUT, None)))
    return lines


def transports_of_all_ranks() -> list[str]:
    """What NCCL's logs name; none where there are none."""
    named: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(named, transports_of_this_process())
    return sorted({transport for transports in named for transport in transports})


def ranks_of(values: list[float]) -> list[float]:
    """Rank of each value, 1 for the smallest; equal values share theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def summary_of_rungs(lines: Lines) -> list[str]:
    """Each rung beside stock `ddp` in one bucket, the article's first."""
    medians: dict[str, list[float]] = {}
    for line in lines:
        if line["part"] == "rungs":
            medians.setdefault(line["name"], []).append(statistics.median(line["steps_ms"]))
    if not medians:
        return []
    text = [f"{'rung':>22}{'median ms':>11}{'min':>9}{'max':>9}{'speed, ddp = 1':>16}   {len(medians['ddp'])} repeats"]
    for name, values in medians.items():
        middle = statistics.median(values)
        speed = statistics.median(ddp / value for ddp, value in zip(medians["ddp"], values, strict=True))
        text.append(f"{name:>22}{middle:11.2f}{min(values):9.2f}{max(values):9.2f}{speed:16.3f}")
    return text


def summary(verdict: Verdict, lines: Lines) -> str:
    """The rungs, the grid with predictions, what the tuner recovered of its gap, and the claim."""
    text = [*summary_of_rungs(lines), *summary_of_the_grid(verdict, lines), *summary_of_the_claim(lines)]
    text.append(
        f"tuning: {verdict.steps} steps, {verdict.seconds:.2f} s, cost {verdict.cost_s:.2f} s; {verdict.reason}"
    )
    return "\n".join(text)


def summary_of_the_grid(verdict: Verdict, lines: Lines) -> list[str]:
    """Each capacity, and what the tuner recovered of the gap between the default and the best."""
    rows: dict[str, Lines] = {}
    for line in lines:
        if line["part"] == "grid":
            rows.setdefault(json.dumps(line["plan"]), []).append(line)
    if not rows:
        return []
    medians = {key: statistics.median(s for line in part for s in line["steps_ms"]) for key, part in rows.items()}
    predicted = {key: part[0]["predicted_ms"] for key, part in rows.items()}
    default = json.dumps(verdict.default.to_dict())
    tuned = json.dumps(verdict.plan.to_dict())
    repeats = len(next(iter(rows.values())))
    text = [f"{'capacity':>22}{'buckets':>9}{'median ms':>11}{'predicted':>11}   {repeats} repeats"]
    for key, part in rows.items():
        cap = part[0]["plan"]["bucket_cap_mb"]
        name = f"list of {len(cap)}" if isinstance(cap, list) else "torch's default" if cap is None else f"{cap:g}"
        marks = " default" * (key == default) + " tuned" * (key == tuned)
        text.append(f"{name:>22}{len(part[0]['buckets']):>9}{medians[key]:11.2f}{predicted[key] or 0:11.2f}{marks}")
    best = min(medians.values())
    gap = medians[default] - best
    text.append(f"gap of the default to the best: {gap:.2f} ms, {100 * gap / best:.1f} % of the best")
    if tuned in medians and gap > 0:
        text.append(f"recovered: {100 * (medians[default] - medians[tuned]) / gap:.0f} %")
    if all(predicted.values()) and len(medians) > 2:
        correlation = statistics.correlation(ranks_of(list(predicted.values())), ranks_of(list(medians.values())))
        text.append(f"rank correlation of predicted and measured: {correlation:.2f}")
        winner = min(medians, key=lambda key: medians[key])
        gains = predicted[default] - predicted[winner], medians[default] - medians[winner]
        text.append(f"gain of the grid's best: predicted {gains[0]:.2f} ms, measured {gains[1]:.2f} ms")
    return text


def summary_of_the_claim(lines: Lines) -> list[str]:
    """Lightning's stock `ddp` and the verdict's plan, and their paired difference."""
    text = []
    claims: dict[str, list[float]] = {}
    for line in lines:
        if line["part"] == "claim":
            claims.setdefault(line["variant"], []).append(statistics.median(line["steps_ms"]))
    if claims:
        paired = [tuned_ms - ddp_ms for ddp_ms, tuned_ms in zip(claims["ddp"], claims["tuned"], strict=True)]
        for name, values in (*claims.items(), ("tuned - ddp, paired", paired)):
            middle = statistics.median(values)
            text.append(f"{name:>22}: {middle:.2f} ms ({min(values):.2f} to {max(values):.2f}), {len(values)} repeats")
    return text


def environment(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What is needed to repeat the run."""
    return {
        "date": datetime.date.today().isoformat(),
        "arguments": {key: str(value) for key, value in (vars(arguments) | {"out": arguments.out.name}).items()},
        "commit": arguments.commit,
        "device": device_name(device),
        "hardware": hardware(),
        "world_size": int(os.environ["WORLD_SIZE"]),
        "backend": dist.get_backend(),
        "note": arguments.note,
        "versions": versions(),
        "variables": exchange_variables(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--workload", default="vit_l_32", help="mlp_DEPTHxWIDTH, gpt_DEPTHxWIDTH, vit_tiny, or a torchvision model"
    )
    parser.add_argument("--batch", type=int, default=32, help="samples per rank")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--grid-steps", type=int, default=6, help="timed steps of each block of the grid; 0: no grid")
    parser.add_argument("--claim-steps", type=int, default=30, help="timed steps of each fit of the claim; 0: no claim")
    parser.add_argument("--transport", choices=("p2p", "shm", "net"), help="fail if NCCL's log names another one")
    parser.add_argument("--rungs", action="store_true", help="the article's rungs too, before the grid")
    parser.add_argument("--seconds", type=float, default=0, help="begin no repeat that would end later; 0: no limit")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--note", default="", help="what else a reader must know, such as the wire between hosts")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    arguments = parser.parse_args()
    deadline = Deadline(arguments.seconds)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(arguments.threads)
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    module = workload(arguments.workload, arguments.batch, device)

    lines: Lines = []

    def keep(new: Lines) -> None:
        """Append to the record what is done, so that a run cut short leaves it."""
        lines.extend(line for line in new if "part" in line)
        if dist.get_rank() == 0:
            with arguments.out.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(line) + "\n" for line in new)

    if dist.get_rank() == 0:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.unlink(missing_ok=True)
    keep([{"environment": environment(arguments, device)}])
    strategy = DDPOptStrategy(tuning={"cache": False})
    times = fit(strategy, module, 72, Clock())
    verdict = strategy.verdict
    assert verdict is not None, "tuning did not end in 72 steps"
    transports = transports_of_all_ranks()
    keep([{"part": "tune", "verdict": verdict.to_dict(), "transports": transports} | times.line(slice(None))])
    if arguments.transport and not (transports and all(is_transport(one, arguments.transport) for one in transports)):
        named = ", ".join(transports) or "nothing (NCCL_DEBUG=INFO NCCL_DEBUG_FILE=DIR/%h.%p.log)"
        raise SystemExit(f"transport {arguments.transport} was asked for, and NCCL's log names {named}")
    # What a repeat of each part does, how many steps it takes, and how often it was done.
    parts: dict[str, tuple[Callable[[int], Lines], int]] = {}
    block = LEFT_OUT + arguments.grid_steps
    if arguments.rungs:
        chosen = rungs(verdict)
        do_rungs = partial(run_blocks, "rungs", chosen, module, verdict, steps=arguments.grid_steps)
        parts["rungs"] = do_rungs, len(chosen) * block
    if arguments.claim_steps:
        do_claim = partial(run_claim, verdict, module, steps=arguments.claim_steps)
        parts["claim"] = do_claim, 2 * (CLAIM_LEFT_OUT + arguments.claim_steps)
    if arguments.grid_steps:
        plans = {str(plan.bucket_cap_mb): plan for plan in plans_of_the_grid(verdict)}
        do_grid = partial(run_blocks, "grid", plans, module, verdict, steps=arguments.grid_steps)
        parts["grid"] = do_grid, len(plans) * block
    step_s = statistics.median(times.slowest) / 1000
    took_s = {name: 1.2 * steps * step_s for name, (_, steps) in parts.items()}
    repeats = dict.fromkeys(parts, 0)
    for repeat in range(arguments.repeats):
        for name, (part, _) in parts.items():
            if deadline.allows(took_s[name]):
                began = time.monotonic()
                keep(part(repeat))
                took_s[name] = time.monotonic() - began
                repeats[name] += 1
    if dist.get_rank() == 0:
        print(f"== {arguments.workload} batch {arguments.batch} {arguments.note}")
        print(summary(verdict, lines))
    dist.destroy_process_group()
    if missing := [name for name, count in repeats.items() if not count]:
        raise SystemExit(f"no time for {' and '.join(missing)}: allow more than --seconds {arguments.seconds:g}")


if __name__ == "__main__":
    main()
