"""Libraries are recorded as loaded; what cannot be learnt says why."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from rlk_repro.integration.measure.libraries import loaded_libraries


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
