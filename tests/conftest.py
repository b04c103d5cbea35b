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


@pytest.fixture(scope="session", autouse=True)
def verdicts_of_this_session_only(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache; processes that tests start inherit the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPOPT_CACHE_DIR", str(tmp_path_factory.mktemp("verdicts")))
        yield
