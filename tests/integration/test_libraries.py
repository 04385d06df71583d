"""Libraries are recorded as loaded; what cannot be learnt says why."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base import proc
from rlk_repro.integration.measure.libraries import loaded_libraries, parse_transport, read_transport
from rlk_repro.integration.reward import share_of_even_ids
from rlk_repro.integration.vime import ProfiledSteps
from tests import ROOT


def test_every_fact_is_a_value_or_unknown_with_a_reason() -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert value
            assert "unknown" not in value or value["unknown"]
            for item in value.values():
                check(item)
        else:
            assert value is not None
            assert value != ""

    facts = loaded_libraries()
    check(facts)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"] == torch.__version__
    assert facts["num_threads"] == torch.get_num_threads()


def test_the_collectives_library_is_hashed_where_it_is_mapped(tmp_path: Path) -> None:
    library = tmp_path / "nccl lib" / "libnccl.so.2"
    library.parent.mkdir()
    library.write_bytes(b"nccl")
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 42                         {library}\n"
        f"7f01-7f02 rw-p 00001000 08:01 42                         {library}\n"
        "7f02-7f03 r-xp 00000000 08:01 43                         /usr/lib/libc.so.6\n"
        "7ffd-7ffe rw-p 00000000 00:00 0                          [stack]\n"
    )
    assert loaded_libraries(maps)["nccl_file"] == [
        {"path": "libnccl.so.2", "sha256": hashlib.sha256(b"nccl").hexdigest()}
    ]
    library.unlink()
    assert loaded_libraries(maps)["nccl_file"] == {"unknown": "No such file or directory"}
    maps.write_text("")
    assert loaded_libraries(maps)["nccl_file"] == {"unknown": "not loaded"}


# NCCL's transport, from logs as NCCL writes them.

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


def test_tcp_is_named() -> None:
    assert parse_transport(TCP) == {"network": "Socket", "paths": ["NET/Socket"], "nvls": False, "mnnvl": False}


def test_each_process_reads_the_log_of_its_own(tmp_path: Path) -> None:
    env = {"NCCL_DEBUG_FILE": f"{tmp_path}/.partial-nccl-%h-%p.log"}
    assert read_transport(env) == {"unknown": "NCCL has written no log"}
    assert read_transport({}) == {"unknown": "NCCL_DEBUG_FILE is not set"}
    host = socket.gethostname().partition(".")[0]
    (tmp_path / f".partial-nccl-{host}-{os.getpid()}.log").write_text(TCP)
    assert read_transport(env)["network"] == "Socket"


# Which steps a profiler outside the trainer records.


@pytest.mark.parametrize(
    ("steps", "expected"), [("2:5", [(1, True), (4, False)]), ("1:4", [(0, True), (3, False)]), ("", [])]
)
def test_recording_begins_before_the_first_and_ends_after_the_last(
    steps: str, expected: list[tuple[int, bool]]
) -> None:
    seen: list[tuple[int, bool]] = []
    for rollout_id in range(8):
        profiled = ProfiledSteps(steps, lambda is_on, number=rollout_id: seen.append((number, is_on)))  # type: ignore[misc]
        profiled.end_step(rollout_id)
    assert seen == expected


# The process that runs vime's train.py: which one it finds, what that one is told, and what stops it before.

REPOSITORY = ROOT
SCRIPT = """\
import json, os, sys
import helper
if __name__ == "__main__":
    print(json.dumps({"argv": sys.argv, "first": sys.path[0], "helper": helper.VALUE}))
    sys.exit(int(sys.argv[sys.argv.index("--code") + 1]) if "--code" in sys.argv else 0)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What vime's checkout looks like from outside."""
    folder = tmp_path / "a vime"
    (folder / "vime").mkdir(parents=True)
    (folder / "vime" / "__init__.py").touch()
    (folder / "helper.py").write_text("VALUE = 7\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def start(folder: Path, *argv: str) -> proc.Completed:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    return proc.run([sys.executable, "-m", "rlk_repro.integration.start_vime", *argv], env=env, cwd=folder.parent)


def test_train_py_runs_as_a_script_of_its_own_folder(checkout: Path) -> None:
    done = start(checkout, "--num-rollout", "3")
    assert done.is_ok, done.stderr
    said = json.loads(done.stdout)
    assert said == {"argv": [str(checkout / "train.py"), "--num-rollout", "3"], "first": str(checkout), "helper": 7}
    assert start(checkout, "--code", "9").returncode == 9


def test_a_missing_rollout_stops_it(checkout: Path) -> None:
    template = checkout / "{rollout_id}.pt"
    (checkout / "0.pt").write_bytes(b"x")
    done = start(checkout, "--num-rollout", "2", "--load-forge-rollout-data", str(template))
    assert (done.returncode, done.stdout) == (1, "")
    assert "--load-forge-rollout-data: 1 of 2 stored rollouts are missing or empty" in done.stderr


@pytest.mark.parametrize(("tokens", "length", "reward"), [([1, 2, 4, 5, 6], 4, 0.75), ([1, 2], 0, 0.0), ([2], 1, 1.0)])
def test_the_reward_of_random_weights(tokens: list[int], length: int, reward: float) -> None:
    class Sample:
        def __init__(self) -> None:
            self.tokens, self.response_length = tokens, length

    assert asyncio.run(share_of_even_ids(None, Sample())) == reward
