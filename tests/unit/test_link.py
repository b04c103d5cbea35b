"""The cost curve of a link."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddpopt.tuning.link import Link

# busbw in GB/s on 8 A100, with its dip at 16 MiB ("Machine Learning Engineering" open book)
A100 = {2**20: 18.00, 2**21: 36.18, 2**22: 72.33, 2**23: 109.93, 2**24: 106.16, 2**25: 138.49, 2**30: 229.04}


def test_through_the_measured_points() -> None:
    points = [(size, 1.75 * size / busbw / 1e6) for size, busbw in A100.items()]
    link = Link.of(reversed(points))
    assert all(a <= b for a, b in itertools.pairwise(link.cost_ms))
    for size, busbw in A100.items():
        if size > 2**22:  # 1, 2 and 4 MiB take the same 0.102 ms within noise, and share their mean
            assert link.busbw_gbps(size, 8) == pytest.approx(busbw)
    assert link.cost(2**21) == pytest.approx(1.75 * 2**20 / 18e6, rel=0.01)
    between = link.cost(1.5 * 2**24)
    assert between == pytest.approx((link.cost(2**24) + link.cost(2**25)) / 2)


def test_beyond_the_measured_points() -> None:
    link = Link((1000, 2000, 4000), (1.0, 1.5, 4.0))
    assert link.cost(0) == link.cost(1000) == 1.0
    assert link.cost(6000) == pytest.approx(4.0 + 2000 * 2.5 / 2000)
    assert Link((1000,), (2.0,)).cost(3000) == 6.0
    assert link.with_point(8000, 10.0).cost(6000) == pytest.approx(7.0)
    assert Link.from_dict(link.to_dict()) == link


@settings(deadline=None, max_examples=100)
@given(points=st.lists(st.tuples(st.integers(1, 10**9), st.floats(0.001, 1e4)), min_size=1, max_size=12))
def test_the_cost_never_falls(points: list[tuple[int, float]]) -> None:
    link = Link.of(points)
    costs = [link.cost(size) for size in range(0, 2 * max(size for size, _ in points), 10**8)]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(costs))
    assert min(cost for _, cost in points) <= link.cost_ms[0]
    assert link.cost_ms[-1] <= max(cost for _, cost in points) + 1e-9


@pytest.mark.parametrize(
    ("payloads", "costs"),
    [((), ()), ((1,), (1.0, 2.0)), ((2, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)), ((0,), (1.0,)), ((1,), (0.0,))],
)
def test_no_link(payloads: tuple[int, ...], costs: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="no link"):
        Link(payloads, costs)
