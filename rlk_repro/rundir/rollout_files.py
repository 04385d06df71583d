"""Check what a file of stored rollouts holds, with a reader that executes nothing.

vime loads these files as pickles, and a pickle may call any function. A file passes if its pickle holds tensors and
plain values only. Arrays of numpy are no plain values: their pickled state can make numpy use bytes as pointers.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, Problem

CALLED: Final = frozenset({("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")})
"""The functions that a pickle may call, as module and name; docs/prepare.md lists them."""
STORAGES: Final = frozenset(
    ("torch", f"{kind}Storage")
    for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
)
"""The names that a pickle may pass to an allowed function but may not call."""
PICKLE: Final = "data.pkl"
PROGRAM: Final = "constants.pkl"
"""The file that marks an archive as a compiled program, which torch runs even where torch refuses pickles."""
_ARCHIVE: Final = b"PK\x03\x04"
_HINT: Final = "save dicts of tensors, numbers, texts and lists by torch.save"
_BROKEN_PICKLE: Final = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError),
    *(TypeError, ValueError),
)


class _StandIn:
    """Stands in for a tensor or the empty dict of its hooks, so that reading executes no code."""

    def __setstate__(self, _: object) -> None:
        raise pickle.UnpicklingError("it changes a rebuilt object")


def _make_stand_in(*_: object) -> _StandIn:
    return _StandIn()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CALLED:
            return _make_stand_in
        if (module, name) in STORAGES:
            return None
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, _: object) -> Any:
        return _StandIn()


def check_file(path: Path) -> None:
    """Raise BundleUnreadable for a file that holds objects other than plain data or that torch.save did not write."""
    check_archive(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [item.filename.partition("/")[2] for item in archive.infolist()]
            member = archive.infolist()[names.index(PICKLE)]
            data = archive.read(member) if member.compress_type == zipfile.ZIP_STORED else b""
    except (OSError, EOFError, LookupError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise _refuse(path, f"cannot be read ({error})") from None
    check_records(path, data, names)


def check_archive(path: Path) -> None:
    """Raise BundleUnreadable if a file is not an archive: torch would load such a file as a pickle."""
    with path.open("rb") as stream:
        if stream.read(len(_ARCHIVE)) != _ARCHIVE:
            raise _refuse(path, "is not an archive of torch.save")


def check_records(path: Path, data: bytes, names: Iterable[str]) -> None:
    """Check the pickle ``data`` of an archive and the ``names`` of its members, without their common folder."""
    seen = Counter(name.casefold() for name in names)  # torch's reader finds names in any case
    if PROGRAM in seen:
        raise _refuse(path, "is a compiled program")
    if twice := sorted(name for name, number in seen.items() if number > 1):
        raise _refuse(path, f"holds {twice[0]} twice")
    try:
        _Reader(io.BytesIO(data)).load()
    except _BROKEN_PICKLE as error:
        raise _refuse(path, f"cannot be read as plain data ({error})") from None


def _refuse(path: Path, what: str) -> BundleUnreadable:
    expected = "tensors and plain values"
    return BundleUnreadable(Problem(f"stored rollout {path.name}", what, expected=expected, hint=_HINT))
