"""Ranks over NCCL. With one GPU the two ranks are two "nodes" that share it, joined by sockets."""

import os
from collections.abc import Iterator

import pytest
import torch
from ranks import Ranks


def nccl_ranks(world_size: int) -> Ranks:
    if torch.cuda.device_count() >= world_size:
        return Ranks(world_size, "nccl")
    # NCCL refuses two ranks on one GPU of one host; with host identities of their own they are two hosts to it.
    variables = {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")}
    return Ranks(
        world_size,
        "nccl",
        nodes=world_size,
        rank_environment=lambda rank: variables | {"NCCL_HOSTID": f"host{rank}"},
    )


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
