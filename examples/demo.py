"""The main job: trains one ViT under stock DDP and under ours, each in fresh processes, and shows one table.

python examples/demo.py            # on GPUs ViT-L/32 on synthetic data, else a tiny ViT on digits on 2 processes
python examples/demo.py --short    # fewer steps: only to see that it works
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

STRATEGIES = ("ddp", "ddpopt", "ddpopt_bf16", "ddpopt_powersgd")
TRAIN = Path(__file__).with_name("train.py")


def overrides(short: bool) -> list[str]:
    """What this machine trains."""
    if torch.cuda.is_available():
        return ["model=vit_l_32", "data=synthetic", "trainer=auto", f"trainer.max_steps={20 if short else 60}"]
    return ["model=vit_tiny", "data=digits", "trainer=cpu", f"trainer.max_steps={20 if short else 300}"]


def run(strategy: str, settings: list[str], folder: Path) -> dict[str, Any]:
    result = folder / f"{strategy}.json"
    command = [sys.executable, str(TRAIN), f"strategy={strategy}", *settings, f"result={result}"]
    subprocess.run([*command, f"hydra.run.dir={folder / strategy}"], check=True)
    figures: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return figures


def table(rows: list[dict[str, Any]]) -> Table:
    stock = rows[0]
    shown = Table(title=f"{stock['world_size']} processes on {stock['device']}, {stock['steps_timed']} steps timed")
    shown.add_column("strategy")
    for name in ("steps/s", "p10 to p90", "against ddp", "loss", "accuracy", "peak MiB", "buckets", "sent/step"):
        shown.add_column(name, justify="right")
    shown.add_column("parameters")
    for row in rows:
        sent = row.get("bytes_sent_per_step")
        shown.add_row(
            row["strategy"],
            f"{row['steps_per_s']:.2f}",
            f"{row['steps_per_s_p10']:.2f} to {row['steps_per_s_p90']:.2f}",
            "" if row is stock else f"{100 * (row['steps_per_s'] / stock['steps_per_s'] - 1):+.1f} %",
            f"{row['loss']:.4f}",
            f"{100 * row['accuracy']:.1f} %",
            f"{row['peak_memory_mib']:.0f}",
            str(row.get("buckets", "not read")),
            "not read" if sent is None else f"{sent / 2**20:.3f} MiB",
            "" if row is stock else "as ddp, bit for bit" if row["parameters"] == stock["parameters"] else "differ",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer steps: only to see that it works")
    short = parser.parse_args().short
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for strategy in STRATEGIES:
            console.rule(strategy)
            rows.append(run(strategy, overrides(short), Path(folder)))
    console.print(table(rows))
    console.print(
        "One run each, so differences of a few percent between exact strategies are noise. bf16 and PowerSGD change"
        " the gradients: compare loss and accuracy too."
    )


if __name__ == "__main__":
    main()
