"""What the model proposes for a trial."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddpopt.tuning.link import Link
from lightning_ddpopt.tuning.proposals import LIST_GAIN, Proposal, _are_alike, _best_cuts, grid, propose
from lightning_ddpopt.tuning.simulator import Interference, bucket_bytes, buckets_of, simulate
from lightning_ddpopt.tuning.timeline import Gradient, Timeline

MIB = 2**20


def even(count: int, mib: float, every_ms: float, dtype: str = "float32") -> Timeline:
    """``count`` gradients of ``mib`` MiB, one every ``every_ms``."""
    made = tuple(Gradient(str(i), int(mib * MIB), every_ms * (i + 1), dtype) for i in range(count))
    return Timeline(made, 10.0, every_ms * count, 1.0)


SLOW = Link.of([(2**16, 0.5), (2**20, 1.0), (2**30, 1000.0)])
FAST = Link.of([(2**16, 0.05), (2**20, 0.055), (2**30, 4.0)])


@pytest.mark.parametrize("link", [SLOW, FAST], ids=["slow", "fast"])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("line", [even(30, 4, 2.0), even(300, 0.5, 0.1), even(5, 60, 10)], ids=["30", "300", "5"])
def test_proposals_are_unlike_each_other_and_the_default(line: Timeline, most: int, link: Link) -> None:
    proposals = propose(line, link, Interference(0.2, 0.1), most=most)
    layouts = [proposal.buckets for proposal in proposals]
    assert 1 <= len(proposals) <= most
    assert len(set(layouts)) == len(layouts)
    assert buckets_of(line.gradients, None) not in layouts
    singles = [proposal for proposal in proposals if not isinstance(proposal.bucket_cap_mb, tuple)]
    assert not any(_are_alike(one, other) for one, other in itertools.combinations(singles, 2))
    for proposal in proposals:
        assert buckets_of(line.gradients, proposal.bucket_cap_mb) == proposal.buckets
        again = simulate(line, proposal.buckets, link, Interference(0.2, 0.1))
        assert (again.step_ms, again.exposed_ms) == (proposal.predicted_ms, proposal.exposed_ms)


def test_the_best_single_capacity_is_the_first() -> None:
    line = even(30, 4, 2.0)
    best = min(grid(line), key=lambda capacity: simulate(line, buckets_of(line.gradients, capacity), SLOW).step_ms)
    singles = [p for p in propose(line, SLOW) if not isinstance(p.bucket_cap_mb, tuple)]
    assert singles[0].buckets == buckets_of(line.gradients, best)


def test_the_grid_has_one_capacity_for_each_layout() -> None:
    line = even(30, 4, 2.0)
    layouts = [buckets_of(line.gradients, capacity) for capacity in grid(line)]
    assert len(set(layouts)) == len(layouts)
    assert {len(layout) for layout in layouts} >= {30, 1}


def test_a_slow_wire_gets_small_buckets_and_a_dear_launch_large_ones() -> None:
    line = even(40, 1, 1.0)
    wire = Link.of([(2**16, 0.06), (2**20, 0.9), (2**26, 57.6)])
    launch = Link.of([(2**16, 8.0), (2**20, 8.1), (2**26, 9.0)])
    assert len(propose(line, wire, most=1)[0].buckets) > 10
    assert len(propose(line, launch, most=1)[0].buckets) <= 4


def test_capacities_of_the_user_are_all_there_is() -> None:
    line = even(30, 4, 2.0)
    caps = {proposal.bucket_cap_mb for proposal in propose(line, SLOW, most=5, capacities=[3, 50, 51, 4000])}
    assert caps == {3, 50, 4000}  # 51 gives the layout of 50


def growing(count: int) -> Timeline:
    """Large gradients early, ever smaller ones late: what a list suits."""
    sizes = [64 >> min(i, 6) for i in range(count)]
    made = tuple(Gradient(str(i), size * MIB, 10.0 * (i + 1)) for i, size in enumerate(sizes))
    return Timeline(made, 10.0, 10.0 * count, 1.0)


def test_a_list_is_proposed_only_for_two_percent() -> None:
    for line in (growing(8), even(30, 4, 2.0), even(12, 30, 8.0)):
        for link in (SLOW, FAST, Link.of([(2**16, 9.0), (2**20, 9.1), (2**28, 90.0)])):
            proposals = propose(line, link)
            singles = [simulate(line, buckets_of(line.gradients, cap), link).step_ms for cap in [None, *grid(line)]]
            lists = [p for p in proposals if isinstance(p.bucket_cap_mb, tuple)]
            assert all(p.predicted_ms <= (1 - LIST_GAIN) * min(singles) for p in lists)
            assert len(lists) <= 1


def test_a_list_where_it_pays() -> None:
    """The last three belong into one bucket, which one capacity for all cannot say."""
    ready = [(20, 0.0), (20, 5.0), (5, 25.0), (20, 45.0), (3, 46.0)]
    made = tuple(Gradient(str(i), mib * MIB, at) for i, (mib, at) in enumerate(ready))
    link = Link.of([(MIB, 4.0), (64 * MIB, 67.0)])  # 3 ms and 1 ms for each MiB
    best = propose(Timeline(made, 1.0, 46.0, 0.0), link)[0]
    assert best.bucket_cap_mb == (20.0, 20.0, 28.0)
    assert best.buckets == ((0,), (1,), (2, 3, 4))
    assert best.predicted_ms == pytest.approx(1 + 46 + 31)
    mixed = Timeline((Gradient("h", MIB, 0.0, "float16"), *made), 1.0, 46.0, 0.0)
    assert not any(isinstance(p.bucket_cap_mb, tuple) for p in propose(mixed, link))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    gaps=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    latency=st.sampled_from([0.1, 2.0, 10.0]),
    slowdown=st.sampled_from([0.0, 1.5]),
)
def test_the_programme_finds_the_best_partition(
    sizes: list[int], gaps: list[int], latency: float, slowdown: float
) -> None:
    ready = list(itertools.accumulate(gaps[: len(sizes)]))
    made = tuple(Gradient(str(i), 1000 * s, float(r)) for i, (s, r) in enumerate(zip(sizes, ready, strict=True)))
    line = Timeline(made, 0.0, float(ready[-1]), 0.0)
    link = Link.of([(1, latency), (1000, latency + 1), (100_000, latency + 50)])

    interference = Interference(0.0, slowdown)

    def step_of(cuts: tuple[int, ...]) -> float:
        ends = [*cuts, len(sizes)]
        buckets = tuple(tuple(range(start, end)) for start, end in itertools.pairwise([0, *ends]))
        return simulate(line, buckets, link, interference).step_ms

    everywhere = range(1, len(sizes))
    best = min(step_of(cuts) for count in range(len(sizes)) for cuts in itertools.combinations(everywhere, count))
    ends_bytes = _best_cuts(line, link, interference, 1.0, 0.0)
    totals = list(itertools.accumulate(1000 * size for size in sizes))
    ours = step_of(tuple(totals.index(end) + 1 for end in ends_bytes[:-1]))
    assert ours == pytest.approx(best)


def test_thousands_of_gradients_are_no_matter() -> None:
    line = even(2000, 0.05, 0.02)
    proposals = propose(line, SLOW, Interference(0.3))
    assert sum(bucket_bytes(line.gradients, proposals[0].buckets)) == line.total_bytes


def test_one_of_several_has_at_most_half_the_buckets_of_the_first() -> None:
    """What a bucket costs beside its reduction is not in the model: the trials must be able to see it."""
    for mib in (0.5, 1, 2):
        line = even(64, mib, 1.0)
        wire = Link.of([(2**16, 0.06 * mib), (2**20, 0.9), (2**26, 57.6)])
        first, *others = propose(line, wire, most=3)
        default_ms = simulate(line, buckets_of(line.gradients, None), wire).step_ms
        few = [p.predicted_ms for p in others if 2 * len(p.buckets) <= len(first.buckets)]
        layouts = [buckets_of(line.gradients, cap) for cap in grid(line)]
        fewer = [simulate(line, one, wire).step_ms for one in layouts if 2 * len(one) <= len(first.buckets)]
        assert min(few) == min(fewer) < default_ms


@pytest.mark.parametrize(
    ("counts", "predicted_ms", "alike"),
    [((3, 4), (100.0, 100.1), False), ((9, 10), (100.0, 100.1), True), ((9, 10), (100.0, 101.0), False)],
)
def test_what_is_alike(counts: tuple[int, int], predicted_ms: tuple[float, float], alike: bool) -> None:
    """24 and 32 MiB of resnet50 are 4 and 3 buckets; they predict the same, and 32 was 2.4 ms faster."""
    one, other = (Proposal(1.0, ((0,),) * n, ms, 0.0) for n, ms in zip(counts, predicted_ms, strict=True))
    assert _are_alike(one, other) is alike
    assert _are_alike(other, one) is alike
