"""The fixtures of ranks, over NCCL."""

from collections.abc import Iterator

import pytest
from ranks import Ranks, nccl_ranks


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    ranks = nccl_ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = nccl_ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    ranks = nccl_ranks(3)
    yield ranks
    ranks.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
