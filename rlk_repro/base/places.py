"""Replace this machine's folders by names such as ``{run_dir}``, ``{python}`` and ``~`` in records.

The names make records of two machines comparable and hide a user's home folder.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

RUN_DIR: Final = "{run_dir}"
PYTHON: Final = "{python}"
PREFIX: Final = "{prefix}"
PACKAGES: Final = "{packages}"
HOME: Final = "~"

_PACKAGES: Final = Path(__file__).resolve().parent.parent.parent
_CHECKOUTS: Final = ("VIME_SRC", "MEGATRON_SRC", "RLK_SRC", "RLK_COMMITS")
# These folders are the same on every machine, so they are not replaced.
_SHARED: Final = frozenset({"/", "/usr", "/usr/local"})


def hide_places(text: str, run_dir: Path | None = None) -> str:
    return make_hider(run_dir)(text.encode(errors="surrogatepass")).decode(errors="surrogatepass")


def make_hider(run_dir: Path | None = None) -> Callable[[bytes], bytes]:
    """Return a function that replaces folders in bytes as ``hide_places`` does in text."""
    names = {
        os.fsencode(path): name.encode()
        for path, name in _list_places(run_dir)
        if path.startswith("/") and path not in _SHARED
    }
    longest_first = sorted(names, key=len, reverse=True)
    pattern = re.compile(rb"(%s)(?![\w.-])" % b"|".join(map(re.escape, longest_first)))
    return lambda data: pattern.sub(lambda match: names[match[1]], data)


def _list_places(run_dir: Path | None) -> Iterator[tuple[str, str]]:
    """If a folder is listed twice, its later name counts."""
    yield sys.executable, PYTHON
    places = [
        (os.path.expanduser("~"), HOME),  # noqa: PTH111  (Path.home raises an error if no home is known)
        (sys.base_prefix, PREFIX),
        (sys.prefix, PREFIX),
        (str(_PACKAGES), PACKAGES),
    ]
    places += [(os.environ[name], f"{{{name.lower()}}}") for name in _CHECKOUTS if os.environ.get(name)]
    if run_dir is not None:
        places.append((str(run_dir.absolute()), RUN_DIR))
    for path, name in places:
        yield os.path.realpath(path), name
        yield path, name
