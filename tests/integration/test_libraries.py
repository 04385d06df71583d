"""Libraries are recorded as loaded; what cannot be learnt says why."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlk_repro.integration.measure import libraries
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


def test_a_torch_that_refuses_to_name_cudnn_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch did where Transformer Engine had loaded the older cuDNN of the machine's CUDA."""
    refusal = "cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0) but found (9, 14, 0)"

    def refuse() -> int:
        raise RuntimeError(refusal)

    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    library = tmp_path / "libcudnn.so.9.14.0"
    library.write_bytes(b"cudnn")
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 42                         {library}\n")
    found = loaded_libraries(maps)
    assert found["cudnn"] == {"unknown": refusal}
    assert found["cudnn_file"] == [{"path": library.name, "sha256": hashlib.sha256(b"cudnn").hexdigest()}]


def test_a_module_is_asked_only_if_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extension = tmp_path / "_C.so"
    extension.write_bytes(b"kernels")
    module = ModuleType("rl_engine._C")
    module.__file__ = str(extension)
    monkeypatch.setitem(sys.modules, "rl_engine._C", module)
    monkeypatch.setitem(sys.modules, "x", ModuleType("x"))
    found = libraries._find_file("rl_engine._C")
    assert found == {"path": "_C.so", "sha256": hashlib.sha256(b"kernels").hexdigest()}
    assert libraries._name_file("/home/ada/venv/lib/python3.11/site-packages/rl_engine/_C.so") == (
        "site-packages/rl_engine/_C.so"
    )
    assert libraries._find_file("absent") == {"unknown": "not loaded"}
    assert libraries._find_file("x") == {"unknown": "the module has no file"}
    assert libraries._find_version("x") == {"unknown": "the module reports no version"}
    assert libraries._find_blas("nothing") == {"unknown": "torch's build configuration names no BLAS"}
    assert libraries._find_blas("BLAS_INFO=mkl, BUILD_TYPE=Release") == "mkl"
