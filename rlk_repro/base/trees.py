"""Compute git's hash of a folder's files, which identifies a source tree even where there is no repository.

https://git-scm.com/book/en/v2/Git-Internals-Git-Objects
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, TypeAlias

REPOSITORY: Final = (".git", "__pycache__")
GENERATED: Final = (*REPOSITORY, "*.pyc", "*.so", "*.egg-info")

_Choice: TypeAlias = Callable[[Path], bool]
_Links: TypeAlias = Mapping[Path, str]


def hash_tree(folder: Path, left_out: Iterable[str] = REPOSITORY) -> str:
    patterns = tuple(left_out)
    return _hash_folder(folder, lambda path: not any(fnmatchcase(path.name, pattern) for pattern in patterns)).hex()


def hash_python(package: Path) -> str:
    """Return a hash that is equal for a package in a checkout, an archive and an installation."""
    return _hash_folder(package, lambda path: path.is_dir() or path.suffix == ".py").hex()


def hash_listed(folder: Path, names: Iterable[str], links: Mapping[str, str]) -> str:
    """Return git's hash of the files in ``names`` (paths relative to ``folder``); absent files are left out.

    ``links`` maps each repository inside ``folder`` (a submodule) to its commit; git hashes this commit, not the files.
    """
    linked = {folder / name: digest for name, digest in links.items()}
    listed = {*(folder / name for name in names), *linked}
    folders = {path.parent for path in listed}
    wanted = listed | folders | {parent for path in folders for parent in path.parents}
    return _hash_folder(folder, lambda path: path in wanted, linked).hex()


def _hash_folder(folder: Path, is_wanted: _Choice, links: _Links | None = None) -> bytes:
    entries = [
        entry for path in folder.iterdir() if is_wanted(path) for entry in _tree_entry(path, is_wanted, links or {})
    ]
    return _hash_object("tree", b"".join(line for _, line in sorted(entries)))


def _tree_entry(path: Path, is_wanted: _Choice, links: _Links) -> Iterator[tuple[bytes, bytes]]:
    """Yield the sort key and the bytes of a tree entry.  Git omits empty folders, and sorts a folder as NAME/."""
    name, found = os.fsencode(path.name), path.lstat().st_mode
    if stat.S_ISLNK(found):
        mode, digest = b"120000", _hash_object("blob", os.fsencode(path.readlink()))
    elif stat.S_ISDIR(found) and path in links:
        mode, digest = b"160000", bytes.fromhex(links[path])
    elif stat.S_ISDIR(found):
        mode, digest = b"40000", _hash_folder(path, is_wanted, links)
        if digest == _EMPTY_TREE:
            return
    elif stat.S_ISREG(found):
        mode = b"100755" if found & 0o100 else b"100644"
        digest = _hash_object("blob", path.read_bytes())
    else:  # git does not track pipes and devices, and reading one may never end
        return
    yield name + (b"/" if mode == b"40000" else b""), mode + b" " + name + b"\0" + digest


def _hash_object(kind: str, data: bytes) -> bytes:
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data, usedforsecurity=False).digest()


_EMPTY_TREE: Final = _hash_object("tree", b"")
