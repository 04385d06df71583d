"""A hub on loopback for the tests of ``prepare``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prepare_examples import HubServer, fill_hub, serve_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    with serve_hub() as server:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        fill_hub(server)
        yield server
