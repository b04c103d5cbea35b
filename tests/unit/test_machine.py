"""What NCCL's log tells, and what a record keeps of the environment."""

import os
from pathlib import Path

import pytest
import torch

from lightning_ddpopt.machine.environment import device_name, exchange_variables, hardware, versions
from lightning_ddpopt.machine.transport import is_transport, transports_in, transports_of_this_process

# Lines as NCCL 2.28.9 writes them, on two H200s and on one.
P2P = "gpu:59:83 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
SHM = "gpu:59:83 [0] NCCL INFO Channel 01 : 0[0] -> 1[1] via SHM/direct/direct\n"
NET = (
    "gpu:59:83 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0\n"
    "gpu:59:83 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/1/GDRDMA\n"
)
OTHER = (
    "gpu:59:83 [0] NCCL INFO NET/Plugin: Using Socket via configuration\ngpu:59:83 [0] NCCL INFO Channel 00/02 : 0 1\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (P2P, ["P2P/CUMEM/read"]),
        (SHM, ["SHM/direct/direct"]),
        (NET, ["NET/Socket", "NET/Socket/GDRDMA"]),
        (P2P + NET + P2P, ["NET/Socket", "NET/Socket/GDRDMA", "P2P/CUMEM/read"]),
        (OTHER, []),
        ("", []),
    ],
)
def test_the_log_names_the_transports(text: str, expected: list[str]) -> None:
    assert transports_in(text) == expected


def test_kinds_of_transport() -> None:
    assert is_transport("P2P/CUMEM/read", "p2p")
    assert is_transport("NET/Socket", "net")
    assert not is_transport("SHM/direct/direct", "p2p")


def test_this_process_reads_its_own_log(tmp_path: Path) -> None:
    environment = {"NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.%p.log")}
    (tmp_path / f"nccl.host.{os.getpid()}.log").write_text(SHM)
    (tmp_path / f"nccl.host.{os.getpid() + 1}.log").write_text(P2P)
    assert transports_of_this_process(environment) == ["SHM/direct/direct"]


def test_a_log_of_all_processes_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "nccl.log").write_text(P2P)
    assert transports_of_this_process({"NCCL_DEBUG_FILE": str(tmp_path / "nccl.log")}) == []
    assert transports_of_this_process({}) == []


def test_variables_without_names_of_the_machine() -> None:
    given = {
        "NCCL_P2P_DISABLE": "1",
        "NCCL_DEBUG_FILE": "/home/me/log",
        "NCCL_HOSTID": "me",
        "OMP_NUM_THREADS": "1",
        "HOME": "/home/me",
        "DDPOPT_DISABLE": "1",
        "DDPOPT_JOB": "/tmp/x",
        "NCCL_DEBUG": "INFO",
    }
    assert exchange_variables(given) == {"DDPOPT_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def test_versions_and_devices() -> None:
    assert versions()["torch"] == torch.__version__
    assert {"python", "lightning", "lightning_ddpopt"} <= set(versions())
    assert device_name(torch.device("cpu")) == "CPU"
    assert hardware().startswith(f"{os.cpu_count()} CPU cores, ")
