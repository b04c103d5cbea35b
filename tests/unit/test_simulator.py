"""The simulator against torch's own bucket assignment, against brute force, and against cases done by hand."""

import pytest
import torch
import torch.distributed as dist
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddpopt.tuning.link import Link
from lightning_ddpopt.tuning.simulator import Interference, bucket_bytes, buckets_of, fit_interference, simulate
from lightning_ddpopt.tuning.timeline import Gradient, Timeline

MIB = 2**20
PROPORTIONAL = Link((1000,), (1.0,))  # 1 ms for 1000 bytes


def timeline(*gradients: tuple[int, float], forward_ms: float = 0.0, rest_ms: float = 0.0) -> Timeline:
    """Gradients of (bytes, ready in ms); backward ends with the last one."""
    made = tuple(Gradient(str(i), size, ready) for i, (size, ready) in enumerate(gradients))
    return Timeline(made, forward_ms, max(ready for _, ready in gradients), rest_ms)


def test_the_articles_layouts() -> None:
    with torch.device("meta"):
        parameters = list(torchvision.models.vit_l_32(weights=None).parameters())[::-1]
    gradients = [Gradient(str(i), 4 * p.numel(), 0.0) for i, p in enumerate(parameters)]
    counts = {cap: len(buckets_of(gradients, cap)) for cap in (1, 2, 5, 10, 25, 50, 100, 200, 400, 800, 2000, None)}
    golden = {1: 99, 2: 99, 5: 74, 10: 74, 25: 37, 50: 20, 100: 11, 200: 6, 400: 3, 800: 2, 2000: 1, None: 38}
    assert counts == golden


dtypes = st.sampled_from([torch.float32, torch.float16, torch.float64])


@settings(deadline=None, max_examples=200)
@given(
    tensors=st.lists(st.tuples(st.integers(0, 40), dtypes), min_size=1, max_size=30),
    limits=st.lists(st.integers(1, 300), min_size=1, max_size=4),
)
def test_buckets_are_torchs(tensors: list[tuple[int, torch.dtype]], limits: list[int]) -> None:
    made = [torch.empty(count, dtype=dtype) for count, dtype in tensors]
    expected, _ = dist._compute_bucket_assignment_by_size(made, limits, [False] * len(made), list(range(len(made))))
    gradients = [
        Gradient(str(i), t.numel() * t.element_size(), 0.0, str(t.dtype).removeprefix("torch."))
        for i, t in enumerate(made)
    ]
    ours = buckets_of(gradients, [limit / MIB for limit in limits])
    assert sorted(ours) == sorted(tuple(bucket) for bucket in expected)
    open_at_the_end = len({dtype for _, dtype in tensors})  # whose order among several types is torch's hash order
    if open_at_the_end == 1:
        assert ours == tuple(tuple(bucket) for bucket in expected)


@pytest.mark.parametrize(
    ("gradients", "buckets", "interference", "step_ms", "exposed_ms", "reductions"),
    [
        # 10 ms of backward, both reductions under it but for the last bucket's
        ([(1000, 2.0), (1000, 10.0)], ((0,), (1,)), Interference(), 11.0, 1.0, [(2, 3), (10, 11)]),
        ([(1000, 2.0), (1000, 10.0)], ((0, 1),), Interference(), 12.0, 2.0, [(10, 12)]),
        # the second bucket is ready while the first is under way, and waits
        ([(5000, 1.0), (1000, 2.0)], ((0,), (1,)), Interference(), 7.0, 5.0, [(1, 6), (6, 7)]),
        # backward goes at half its speed from 2 to 6 ms, and does the other 6 ms of work after it
        ([(4000, 2.0), (1000, 10.0)], ((0,), (1,)), Interference(1.0, 0.0), 13.0, 1.0, [(2, 6), (12, 13)]),
        # the first reduction takes three times as long beside backward, the last one after it does not
        ([(1000, 2.0), (1000, 10.0)], ((0,), (1,)), Interference(0.0, 2.0), 11.0, 1.0, [(2, 5), (10, 11)]),
        # the first one: 4 ms beside the last 4 of backward, a third of its 6, and the other two thirds after it
        (
            [(6000, 6.0), (1000, 10.0)],
            ((0,), (1,)),
            Interference(0.0, 2.0),
            10 + 14 / 3 + 1,
            17 / 3,
            [(6, 44 / 3), (44 / 3, 47 / 3)],
        ),
        # both slowed: 6 ms of wall time for 3 of work and 2 of a reduction
        ([(2000, 2.0), (1000, 10.0)], ((0,), (1,)), Interference(1.0, 2.0), 14.0, 1.0, [(2, 8), (13, 14)]),
        # launched in order, although the second one is ready first
        ([(1000, 5.0), (1000, 1.0)], ((0,), (1,)), Interference(), 7.0, 2.0, [(5, 6), (6, 7)]),
    ],
)
def test_by_hand(
    gradients: list[tuple[int, float]],
    buckets: tuple[tuple[int, ...], ...],
    interference: Interference,
    step_ms: float,
    exposed_ms: float,
    reductions: list[tuple[float, float]],
) -> None:
    result = simulate(timeline(*gradients, forward_ms=3, rest_ms=2), buckets, PROPORTIONAL, interference)
    assert result.step_ms == pytest.approx(step_ms + 5)
    assert result.exposed_ms == pytest.approx(exposed_ms)
    assert [pytest.approx(pair) for pair in reductions] == list(result.reductions)


def step_by_brute_force(
    line: Timeline, buckets: tuple[tuple[int, ...], ...], link: Link, fit: Interference, tick_ms: float
) -> tuple[float, float]:
    """Ends of backward and of the last reduction, by advancing a clock in small ticks."""
    costs = [link.cost(sum(line.gradients[i].payload_bytes for i in bucket)) for bucket in buckets]
    now = work = running = 0.0
    queue: list[float] = []
    launched = 0
    backward_end = last_end = None
    while backward_end is None or launched < len(buckets) or queue or running > 0:
        while launched < len(buckets) and all(line.gradients[i].ready_ms <= work + 1e-9 for i in buckets[launched]):
            queue.append(costs[launched])
            launched += 1
        if running <= 0 and queue:
            running += queue.pop(0)
        if backward_end is None and work >= line.backward_ms - 1e-9:
            backward_end = now
        now += tick_ms
        work += tick_ms / (1 + fit.backward_slowdown) if running > 0 else tick_ms
        if running > 0:
            running -= tick_ms / (1 + fit.communication_slowdown) if backward_end is None else tick_ms
            last_end = now
    assert last_end is not None
    return backward_end, last_end


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    gaps=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    cut=st.integers(0, 31),
    slowdown=st.sampled_from([0.0, 0.5, 2.0]),
    communication=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_against_brute_force(
    sizes: list[int], gaps: list[int], cut: int, slowdown: float, communication: float
) -> None:
    ready = [float(sum(gaps[: i + 1])) for i in range(len(sizes))]
    line = timeline(*((1000 * size, at) for size, at in zip(sizes, ready, strict=True)))
    buckets, filling = [], []
    for index in range(len(sizes)):
        filling.append(index)
        if cut >> index & 1 or index == len(sizes) - 1:
            buckets.append(tuple(filling))
            filling = []
    fit, tick_ms = Interference(slowdown, communication), 0.005
    backward_end, last_end = step_by_brute_force(line, tuple(buckets), PROPORTIONAL, fit, tick_ms)
    result = simulate(line, tuple(buckets), PROPORTIONAL, fit)
    tolerance = 4 * tick_ms * (1 + slowdown) * (1 + communication) * len(sizes)
    assert result.backward_ms == pytest.approx(backward_end, abs=tolerance)
    assert result.reductions[-1][1] == pytest.approx(last_end, abs=tolerance)
    assert result.step_ms == pytest.approx(max(backward_end, last_end), abs=tolerance)


@settings(deadline=None, max_examples=60)
@given(
    gradients=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 50)), min_size=1, max_size=20),
    cap=st.floats(0.01, 4),
    slowdown=st.floats(0, 3),
)
def test_what_always_holds(gradients: list[tuple[int, float]], cap: float, slowdown: float) -> None:
    line = timeline(*gradients, forward_ms=2, rest_ms=1)
    buckets = buckets_of(line.gradients, cap)
    calm = simulate(line, buckets, PROPORTIONAL)
    slowed = simulate(line, buckets, PROPORTIONAL, Interference(slowdown))
    assert calm.step_ms <= slowed.step_ms + 1e-6
    assert calm.exposed_ms >= 0
    assert calm.step_ms >= line.compute_ms - 1e-9
    whole = simulate(line, buckets_of(line.gradients, 1000.0), PROPORTIONAL, Interference(slowdown))
    assert whole.exposed_ms == pytest.approx(PROPORTIONAL.cost(line.total_bytes))
    assert whole.backward_ms == pytest.approx(line.backward_ms)
    starts = [start for start, _ in slowed.reductions]
    assert starts == sorted(starts)
    assert sum(bucket_bytes(line.gradients, buckets)) == line.total_bytes


@pytest.mark.parametrize("slowdown", [0.0, 0.3, 1.5])
@pytest.mark.parametrize("communication", [0.0, 0.5, 1.9])
def test_the_fit_finds_what_was_planted(slowdown: float, communication: float) -> None:
    """Here each reduction takes longer than the next bucket, so that the exposed time tells how long."""
    line = timeline(*((12000, 4.0 * i + 4) for i in range(8)))
    buckets = tuple((2 * i, 2 * i + 1) for i in range(4))
    seen = simulate(line, buckets, PROPORTIONAL, Interference(slowdown, communication))
    fit = fit_interference(
        line, buckets, PROPORTIONAL, measured_backward_ms=seen.backward_ms, measured_exposed_ms=seen.exposed_ms
    )
    assert fit.communication_slowdown == pytest.approx(communication, abs=1e-3)
    assert fit.backward_slowdown == pytest.approx(slowdown, abs=1e-3)


@pytest.mark.parametrize("noise", [0.93, 1.0, 1.001, 1.07])
def test_the_fit_where_all_is_hidden_makes_nothing_of_noise(noise: float) -> None:
    """No reduction waits: the exposed time is the last one's, and its noise says nothing of the others."""
    line = timeline(*((2000, 4.0 * i + 4) for i in range(8)))
    buckets = tuple((2 * i, 2 * i + 1) for i in range(4))
    seen = simulate(line, buckets, PROPORTIONAL, Interference(0.3))
    exposed_ms = noise * seen.exposed_ms
    fit = fit_interference(
        line, buckets, PROPORTIONAL, measured_backward_ms=seen.backward_ms, measured_exposed_ms=exposed_ms
    )
    assert fit.communication_slowdown == 0.0
    assert fit.backward_slowdown == pytest.approx(0.3, abs=1e-3)


def test_an_exposed_time_that_no_slowdown_explains() -> None:
    line = timeline((1000, 10.0), (1000, 20.0))
    fit = fit_interference(
        line, ((0,), (1,)), PROPORTIONAL, measured_backward_ms=20.2, measured_exposed_ms=9.0
    )  # of a reduction of 1 ms after backward
    assert fit.communication_slowdown == 0.0
    assert fit.backward_slowdown == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Timeline((), 1, 1, 1),
        lambda: timeline((5, -1.0)),
        lambda: Timeline((Gradient("a", 4, 3.0),), 1, 2, 1),
        lambda: Gradient("a", -4, 3.0),
    ],
)
def test_no_timeline(make: object) -> None:
    with pytest.raises(ValueError, match=r"no (timeline|gradient)"):
        make()


def test_a_timeline_as_a_dict() -> None:
    line = timeline((3, 1.0), (4, 2.5), forward_ms=1, rest_ms=0.5)
    assert Timeline.from_dict(line.to_dict()) == line
    assert line.total_bytes == 7
    assert line.compute_ms == 4.0
