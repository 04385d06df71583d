"""Ray authenticates by token in every job, and the token stays where it is needed."""

from __future__ import annotations

from importlib import metadata

import pytest

from rlk_repro.agent.ray.launch import RaySeat, render_env, render_start, require_tokens
from rlk_repro.base.errors import EnvironmentMissing


def test_a_ray_that_ignores_tokens_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "2.51.1")
    with pytest.raises(EnvironmentMissing, match="python module ray: has no authentication"):
        require_tokens()


def test_our_own_ray_has_no_dashboard_and_its_token_is_a_file() -> None:
    seat = RaySeat(index=0, node="n0", address="192.0.2.1", head="192.0.2.1:6379", num_gpus=8, first_port=6379,
                has_client=True, store_bytes=1 << 30)  # fmt: skip
    argv = render_start(seat, "/tmp/x")
    assert argv[argv.index("--include-dashboard") + 1] == "false"
    assert not [word for word in argv if "token" in word]
    env = render_env(seat, "/run/dir/.ray-token")
    assert (env["RAY_AUTH_MODE"], env["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/dir/.ray-token")
