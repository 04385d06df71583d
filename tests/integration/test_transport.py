"""NCCL's transport, from logs as NCCL writes them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlk_repro.integration.measure.transport import parse_transport, read_transport

HEAD = "n1:41:77 [3] NCCL INFO"
FABRIC = f"""\
{HEAD} NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:192.0.2.1<0>
{HEAD} Using network IB
{HEAD} MNNVL 1 cliqueId 7fc cliqueSize 8 cliqueRank 3
{HEAD} NVLS comm 0x55d nHeads 8
{HEAD} Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/0(3)/GDRDMA
{HEAD} Channel 01/0 : 3[3] -> 8[0] [send] via NET/IB/4/GDRDMA
{HEAD} Channel 00/0 : 3[3] -> 2[2] via P2P/CUMEM/read
"""
TCP = f"""\
{HEAD} NCCL_IB_DISABLE set by environment to 1.
{HEAD} NET/Socket : Using [0]eth0:192.0.2.1<0>
{HEAD} Assigned NET plugin Socket to comm
{HEAD} Using network Socket
{HEAD} MNNVL 0 cliqueId 0
{HEAD} Channel 00/0 : 3[3] -> 8[0] [send] via NET/Socket/0
"""


def test_the_fabric_and_nvlink_s_offloads_are_told_without_numbers_of_devices() -> None:
    assert parse_transport(FABRIC) == {
        "network": "IB", "paths": ["NET/IB/GDRDMA", "P2P/CUMEM/read"], "nvls": True, "mnnvl": True,
    }  # fmt: skip


@pytest.mark.parametrize("plugin", ["AWS Libfabric", "IBext_v8", "OFI"])
def test_a_plugin_has_its_own_name(plugin: str) -> None:
    assert parse_transport(f"{HEAD} Using network {plugin}\n")["network"] == plugin


def test_tcp_is_named() -> None:
    assert parse_transport(TCP) == {"network": "Socket", "paths": ["NET/Socket"], "nvls": False, "mnnvl": False}


def test_each_process_reads_the_log_of_its_own(tmp_path: Path) -> None:
    env = {"NCCL_DEBUG_FILE": f"{tmp_path}/.partial-nccl-%h-%p.log"}
    assert read_transport(env) == {"unknown": "NCCL has written no log"}
    assert read_transport({}) == {"unknown": "NCCL_DEBUG_FILE is not set"}
    host = socket.gethostname().partition(".")[0]
    (tmp_path / f".partial-nccl-{host}-{os.getpid()}.log").write_text(TCP)
    assert read_transport(env)["network"] == "Socket"
