"""Check what a file of stored rollouts holds, with a reader that executes nothing.

vime loads these files as pickles, and a pickle may call any function. A file passes if its pickle names only functions
that rebuild tensors and arrays.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, Problem

_BUILTINS: Final = ("builtins", "__builtin__")
CALLED: Final = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("numpy", "dtype"),
        *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        ("_codecs", "encode"),  # pickle protocol 2 stores bytes as a call of _codecs.encode
        *((module, name) for module in _BUILTINS for name in ("bytearray", "complex", "frozenset", "set")),
    }
)
"""The functions that a pickle may call, as module and name; docs/prepare.md lists them."""
NAMED: Final = frozenset(
    {("numpy", "ndarray")}
    | {("torch", f"{kind}Storage") for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half")}
    | {("torch", f"{kind}Storage") for kind in ("Int", "Long", "Short")}
)
"""The names that a pickle may pass to an allowed function but may not call."""
PICKLE: Final = "data.pkl"
PROGRAM: Final = "constants.pkl"
"""The file that marks an archive as a compiled program, which torch runs even where torch refuses pickles."""
_ARCHIVE: Final = b"PK\x03\x04"
_HINT: Final = "docs/prepare.md lists what stored rollouts may hold"
_BROKEN_PICKLE: Final = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RuntimeError),
    *(TypeError, ValueError),
)


class _StandIn(dict[Any, Any]):
    """Stands in for the object that an allowed call in a pickle would make, so that reading executes no code."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __setstate__(self, _: object) -> None:
        return


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CALLED:
            return _StandIn
        if (module, name) in NAMED:
            return None
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, _: object) -> Any:
        return _StandIn()


def check_file(path: Path) -> None:
    """Raise BundleUnreadable for a file that holds objects other than plain data or that torch.save did not write."""
    check_archive(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = {item.filename.partition("/")[2]: item for item in archive.infolist()}
            member = members[PICKLE]
            data = archive.read(member) if member.compress_type == zipfile.ZIP_STORED else b""
    except (OSError, EOFError, LookupError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise _refuse(path, f"cannot be read ({error})") from None
    check_records(path, data, has_program=PROGRAM in members)


def check_archive(path: Path) -> None:
    """Raise BundleUnreadable if a file is not an archive: torch would load such a file as a pickle."""
    with path.open("rb") as stream:
        if stream.read(len(_ARCHIVE)) != _ARCHIVE:
            raise _refuse(path, "is not an archive of torch.save")


def check_records(path: Path, data: bytes, *, has_program: bool) -> None:
    """Check the pickle ``data`` of an archive; ``has_program`` says whether the archive holds a compiled program."""
    if has_program:
        raise _refuse(path, "is a compiled program")
    try:
        _Reader(io.BytesIO(data)).load()
    except _BROKEN_PICKLE as error:
        raise _refuse(path, f"cannot be read as plain data ({error})") from None


def _refuse(path: Path, what: str) -> BundleUnreadable:
    expected = "tensors, arrays and plain values"
    return BundleUnreadable(Problem(f"stored rollout {path.name}", what, expected=expected, hint=_HINT))
