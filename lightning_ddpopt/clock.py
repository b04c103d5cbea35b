"""Moments in a step, on the device where there is one, without making the host wait."""

import time
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """Now: an event in the device's current stream, on CPU the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Time between two marks in ms; on a GPU both must have passed."""
    return 1000 * (end - start) if isinstance(start, float) else float(start.elapsed_time(end))
