"""Our ranges on the GPU's rows, in a report that a real nsys wrote on an H200: counted by SQL, and by `analyze`."""

import gzip
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_ddpopt.profiling.analysis import analyze
from lightning_ddpopt.profiling.traces import load

TRACES = Path(__file__).parents[1] / "data" / "traces"
PROJECTED = """
SELECT n.globalTid, COALESCE(n.text, t.value) AS name, COUNT(k.start), SUM(s.value LIKE 'nccl%'), MIN(k.start),
    MAX(k.end)
FROM NVTX_EVENTS n LEFT JOIN StringIds t ON t.id = n.textId
JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.globalTid = n.globalTid AND r.start >= n.start AND r.end <= n.end
JOIN CUPTI_ACTIVITY_KIND_KERNEL k ON k.correlationId = r.correlationId
JOIN StringIds s ON s.id = k.shortName
WHERE name LIKE ? GROUP BY n.start ORDER BY n.start
"""


@pytest.fixture(params=[0, 1])
def report(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"callback_rank{request.param}.sqlite"
    path.write_bytes(gzip.decompress((TRACES / f"{path.name}.gz").read_bytes()))
    return path


@pytest.fixture
def sql(report: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(report)
    yield connection
    connection.close()


def test_backward_covers_all_its_kernels(sql: sqlite3.Connection) -> None:
    forward, backward, optimizer = (sql.execute(PROJECTED, (n,)).fetchall() for n in ("forward", "backward", "opti%"))
    assert len(forward) == len(backward) == len(optimizer) == 3
    for before, during, after in zip(forward, backward, optimizer, strict=True):
        assert before[0] == after[0] != during[0], "on autograd's thread"
        assert [row[2] for row in (before, during, after)] == [396, 1335, 16], "kernels, in each step"
        assert [row[3] for row in (before, during, after)] == [0, 11, 0], "reductions"
        assert before[5] <= during[4], "one after the other on the device"
        assert during[5] <= after[4]
    (all_kernels,) = sql.execute("SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    assert all_kernels - 3 * (396 + 1335 + 16) == 6, "two in each `get batch`: Lightning's broadcast of SIGTERM"


def test_every_bucket_range_covers_its_reduction(sql: sqlite3.Connection) -> None:
    buckets = sql.execute(PROJECTED, ("bucket %",)).fetchall()
    assert [row[3] for row in buckets] == 33 * [1]
    assert [int(row[1].split()[1]) for row in buckets] == 3 * list(range(11))
    assert sum(int(row[1].split()[2]) for row in buckets[:11]) == 4 * 306_535_400, "the gradients of ViT-L/32"


def test_analyze_tells_buckets_and_parts(report: Path) -> None:
    (rank,) = analyze(load([report])).ranks
    assert rank.mean.forward_ms == pytest.approx(67, abs=1)
    assert rank.mean.backward_ms == pytest.approx(704.6, abs=1)
    assert rank.mean.optimizer_ms == pytest.approx(0.97, abs=0.02)
    assert rank.mean.gradient_copies == 0
