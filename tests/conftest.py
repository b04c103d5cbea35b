"""Fixtures that all rooms of tests share."""

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()
