"""Repositories of a folder under an address of https, as a site with mirrors has them: by git's own configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

ADDRESS = "https://git.example"


def render_config(mirror: str) -> str:
    return f'[url "{mirror}/"]\n\tinsteadOf = {ADDRESS}/\n'


def mirror_folder(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """``https://git.example/<name>`` is then the repository ``<name>`` of the folder."""
    home.mkdir(parents=True, exist_ok=True)
    (home / ".gitconfig").write_text(render_config(folder.as_uri()))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "file")
    return ADDRESS
