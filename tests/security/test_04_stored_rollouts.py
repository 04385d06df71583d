"""Stored rollouts are a stranger's pickles: what they name is never run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro import proc

REPOSITORY = Path(__file__).parents[2]


class Runs:
    """Pickled as a call of ``os.system``."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("flag", ["--load-debug-rollout-data", "--load-forge-rollout-data"])
@pytest.mark.parametrize("infected", [0, 1])
def test_code_in_a_stored_rollout_is_named_and_not_run(tmp_path: Path, flag: str, infected: int) -> None:
    (tmp_path / "vime").mkdir()
    (tmp_path / "vime" / "__init__.py").touch()
    # as vime's own loading does
    loading = "import sys, torch\n[torch.load(f'{i}.pt', weights_only=False) for i in range(2)]\n"
    (tmp_path / "train.py").write_text(loading)
    samples = [{"rollout_routed_experts": torch.tensor([[[0, 1]]])}]
    for number in range(2):
        extra = {"metadata": Runs(f"touch {tmp_path}/pwned")} if number == infected else {}
        torch.save({"samples": samples, **extra}, tmp_path / f"{number}.pt")
    argv = [sys.executable, "-m", "rlk_repro.integration.start_vime", "--num-rollout", "2", flag, "{rollout_id}.pt"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = proc.run([*argv, "--use-rollout-routing-replay"], cwd=tmp_path, env=environment, timeout_s=120)
    assert not (tmp_path / "pwned").exists()
    assert done.returncode == 1
    assert f"{infected}.pt: is no stored rollout of plain data" in done.stderr
    assert "posix.system" in done.stderr
