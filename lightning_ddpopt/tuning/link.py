"""The cost of an all-reduce by payload, measured on the training's own process group. Imports torch to measure only."""

import itertools
import logging
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

log = logging.getLogger(__name__)

SMALLEST_BYTES = 64 * 1024
MOST_REPETITIONS = 5
IN_FLIGHT, IN_FLIGHT_BYTES = 4, 256 * 1024
"""On CPUs so many all-reduces of up to so many bytes are launched at once, as DDP launches them."""


@dataclass(frozen=True)
class Link:
    """Cost of one all-reduce by payload: straight between measured points, never one line for all.

    Args:
        payload_bytes: payloads, ascending.
        cost_ms: the cost of each in ms, not descending.

    Raises:
        ValueError: no points, or points out of order.

    """

    payload_bytes: tuple[int, ...]
    cost_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        same_length = len(self.payload_bytes) == len(self.cost_ms) > 0
        if not same_length or not all(0 < cost < math.inf for cost in self.cost_ms) or self.payload_bytes[0] <= 0:
            raise ValueError(f"no link: payloads {self.payload_bytes} bytes, costs {self.cost_ms} ms")
        payloads_ascend = all(a < b for a, b in itertools.pairwise(self.payload_bytes))
        if not payloads_ascend or any(a > b for a, b in itertools.pairwise(self.cost_ms)):
            raise ValueError("no link: payloads must ascend, and costs must not descend")

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> "Link":
        """The link through measured points (bytes, ms), in any order.

        Where a larger payload was measured as cheaper (NCCL changes its algorithm there, or noise), both get their
        mean: isotonic regression by pooling adjacent violators (Barlow et al., 1972).

        """
        by_payload: dict[int, list[float]] = {}
        for payload, cost in points:
            by_payload.setdefault(payload, []).append(cost)
        pools: list[tuple[float, int]] = []  # mean cost, number of points
        for payload in sorted(by_payload):
            pools.append((statistics.median(by_payload[payload]), 1))
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (cost, count), (earlier, earlier_count) = pools.pop(), pools.pop()
                both = count + earlier_count
                pools.append(((cost * count + earlier * earlier_count) / both, both))
        costs = [cost for cost, count in pools for _ in range(count)]
        return cls(tuple(sorted(by_payload)), tuple(costs))

    def with_point(self, payload_bytes: int, cost_ms: float) -> "Link":
        """This link with one more measured point."""
        return Link.of([*zip(self.payload_bytes, self.cost_ms, strict=True), (payload_bytes, cost_ms)])

    def cost(self, payload_bytes: float) -> float:
        """Cost in ms. Below the smallest point that of the smallest; above the largest the last slope goes on."""
        payloads, costs = self.payload_bytes, self.cost_ms
        if payload_bytes <= payloads[0]:
            return costs[0]
        if len(payloads) == 1:
            return costs[0] * payload_bytes / payloads[0]
        right = min(bisect_left(payloads, payload_bytes), len(payloads) - 1)
        left = right - 1
        slope = (costs[right] - costs[left]) / (payloads[right] - payloads[left])
        return costs[left] + slope * (payload_bytes - payloads[left])

    def busbw_gbps(self, payload_bytes: float, world_size: int) -> float:
        """Bus bandwidth in 1e9 bytes/s: 2 (n - 1) / n times payload over time, as nccl-tests define it."""
        return 2 * (world_size - 1) / world_size * payload_bytes / self.cost(payload_bytes) / 1e6

    def to_dict(self) -> dict[str, Any]:
        """Plain lists of numbers; the inverse of :meth:`from_dict`."""
        return {"payload_bytes": list(self.payload_bytes), "cost_ms": list(self.cost_ms)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Link":
        """Build a link from :meth:`to_dict`'s output."""
        return cls(tuple(data["payload_bytes"]), tuple(data["cost_ms"]))


def measure_link(
    group: "dist.ProcessGroup",
    device: "torch.device",
    largest_bytes: int,
    budget_s: float,
    smallest_bytes: int = SMALLEST_BYTES,
) -> Link:
    """Measure all-reduces of fp32 sums. Collective: every rank of ``group`` must call it alike.

    Payloads grow by factors of four. Each runs to warm up, and up to five times timed; of each run the time of the
    rank that came last counts, since it did not wait. Payloads that the budget does not cover are extrapolated. On CPUs
    a run of small ones is several at once, and costs the mean: one at a time, most of it is the wait for a thread.

    Args:
        group: the process group.
        device: this rank's.
        largest_bytes: the largest payload. On a GPU no more than a quarter of the free memory is taken.
        budget_s: wall time in seconds; the smallest payload is measured whatever it takes.
        smallest_bytes: the smallest payload.

    Raises:
        MemoryError: some rank has no room for the largest payload; raised on all of them.

    """
    import torch
    import torch.distributed as dist

    def agree(values: list[float], op: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, op=op, group=group)
        return [float(value) for value in tensor.tolist()]

    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        (allowed,) = agree([free / 4], dist.ReduceOp.MIN)
        largest_bytes = min(largest_bytes, int(allowed))
    steps = itertools.takewhile(lambda size: size < largest_bytes, (smallest_bytes * 4**k for k in itertools.count()))
    payloads = [*steps, max(largest_bytes, smallest_bytes)]
    whole: torch.Tensor | None = None
    try:
        whole = _allocate(payloads[-1], device)
    except Exception as error:  # on this rank; none may go on alone
        log.debug("no buffer to measure the link with", exc_info=error)
    if agree([float(whole is not None)], dist.ReduceOp.MIN) != [1.0]:
        raise MemoryError(f"no {payloads[-1]} bytes for measuring the all-reduce on some rank")
    assert whole is not None
    points: list[tuple[int, float]] = []
    spent_ms = 0.0
    for payload in payloads:
        in_flight = IN_FLIGHT if device.type == "cpu" and payload <= IN_FLIGHT_BYTES else 1
        left_ms = 1000 * budget_s - spent_ms
        if points and left_ms < 2 * in_flight * points[-1][1] * payload / points[-1][0]:
            break
        buffer = whole[: max(1, payload // 4)].zero_()
        warm_ms = agree(_timed(buffer, in_flight, 1 if points or in_flight > 1 else 3, group), dist.ReduceOp.MAX)
        spent_ms += in_flight * sum(warm_ms)
        repetitions = int((1000 * budget_s - spent_ms) / (in_flight * max(warm_ms[-1], 1e-6)))
        times_ms = _timed(buffer, in_flight, max(1, min(MOST_REPETITIONS, repetitions)), group)
        least = agree(times_ms, dist.ReduceOp.MIN)
        spent_ms += in_flight * sum(agree(times_ms, dist.ReduceOp.MAX))
        points.append((payload, max(statistics.median(least), 1e-6)))
    return Link.of(points)


def _allocate(payload_bytes: int, device: "torch.device") -> "torch.Tensor":
    import torch

    return torch.empty(max(1, payload_bytes // 4), dtype=torch.float32, device=device)


def _timed(buffer: "torch.Tensor", in_flight: int, repetitions: int, group: "dist.ProcessGroup") -> list[float]:
    """Time in ms of each of ``repetitions`` runs of ``in_flight`` all-reduces, divided by these."""
    import torch
    import torch.distributed as dist

    if buffer.device.type != "cuda":
        buffers = [buffer, *(torch.zeros_like(buffer) for _ in range(in_flight - 1))]
        times_ms = []
        for _ in range(repetitions):
            started = time.perf_counter()
            for work in [dist.all_reduce(one, group=group, async_op=True) for one in buffers]:
                work.wait()
            times_ms.append(1000 * (time.perf_counter() - started) / in_flight)
        return times_ms
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
    marks[0].record()
    for end in marks[1:]:
        dist.all_reduce(buffer, group=group)
        end.record()
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]
