"""Which rendered texts lie in the tree, and the digests of all the others.

A person reads a few; tests render all of them in memory and look at each.  What nobody reads cannot change unnoticed
either: ``tests/assets/rendered.sha256`` has the digest of every text, in the form of ``sha256sum``.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests import TESTS

DIGESTS = TESTS / "assets" / "rendered.sha256"
HEADER = "# What `make goldens` rendered last; `rlk-repro submit --run RUN --dry-run` shows such a text.\n"


def write_shown(folder: Path, texts: Mapping[str, str], shown: Iterable[str]) -> None:
    """Put the texts that are shown into their folder, and nothing else."""
    wanted = {name: texts[name] for name in shown}
    for path in folder.iterdir():
        if path.name not in wanted and path.suffix != ".md":
            path.unlink()
    for name, text in wanted.items():
        (folder / name).write_text(text)


def write_digests(texts: Mapping[str, str]) -> None:
    lines = (f"{digest(text)}  {name}\n" for name, text in sorted(texts.items()))
    DIGESTS.write_text(HEADER + "".join(lines))


def read_digests() -> dict[str, str]:
    lines = (line for line in DIGESTS.read_text().splitlines() if not line.startswith("#"))
    return {name: found for found, _, name in (line.partition("  ") for line in lines)}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def find_changed(folder: Path, texts: Mapping[str, str], shown: Iterable[str]) -> Iterator[str]:
    """Each text that is not as it was rendered last, with the difference where the tree holds it."""
    suffix = next(iter(texts)).rpartition(".")[2]
    recorded = {name: found for name, found in read_digests().items() if name.endswith(f".{suffix}")}
    yield from (f"{name}: no such text any more" for name in recorded.keys() - texts.keys())
    yield from (f"{name}: not rendered before" for name in texts.keys() - recorded.keys())
    yield from (f"{name}: changed" for name in recorded.keys() & texts.keys() if recorded[name] != digest(texts[name]))
    held = {path.name: path.read_text() for path in folder.iterdir() if path.suffix == f".{suffix}"}
    yield from (f"{name}: shown and not in {folder.name}, or the reverse" for name in held.keys() ^ {*shown})
    for name in held.keys() & texts.keys():
        yield from difflib.unified_diff(
            held[name].splitlines(), texts[name].splitlines(), name, "rendered", lineterm=""
        )
