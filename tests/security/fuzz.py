"""Run structured fuzzing: ``python -m tests.security.fuzz --seconds 600 --seed 1`` (``make fuzz``).

Bundles are mutated in their bytes, JSON values, lines and structure and sealed again; authors' YAML, ``--set`` values
and files of ``prepare`` are mutated, too.  Seed and number determine each case.  A case that ends in a traceback,
takes too much time or memory, leaves files, starts a program or writes outside is reduced and kept, and the command
that shows it is printed.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import lzma
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import yaml

from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.resources import data_dir
from rlk_repro.bundle.checksums import CHECKSUMS, render_checksums
from tests import ROOT
from tests.security import corpus
from tests.security.hostile import EVIDENCE, OTHERS, fit_hashes, list_files, make_honest, pack
from tests.security.sandbox import Sandbox

NUM_MUTATIONS: Final = (1, 2, 5, 15, 40)
ODD_TEXT: Final = "\ud800\x1b[2J\u202e\x00\r\n <b>|`' \u00e9"
VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1, 2**63, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320, "", "x", "x" * 999, ODD_TEXT, "../x",
    "/etc/passwd", "no", "NaN", "1e999", "[1]*400000000", "((((", [], {}, [[]], [None], {"": {}}, {"unknown": "x"},
    {"unknown": 1}, ["x", 1], [{"a": 1}] * 50, "2026-11-20T13:00:00Z", "9" * 400, "\u0661",
)  # fmt: skip
RAW: Final = ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 900, '"\\ud800"', "'", "{", "\ufeff", "tru",
              '{"a":1,"a":2}')  # fmt: skip
PLAN: Final = "plan.json"
MARK: Final = "\u0001raw\u0001"
FILE: Final = "file.yaml"
MOST_FOUND: Final = 10
READERS: Final = corpus.READERS + corpus.JUDGES
OF_ENGINES: Final = (("agreement",), ("report", "-o", "{out}"), ("diff", "{other}"), ("index", "-o", "{out}"))
OF_FOLDERS: Final = (("status",), ("logs",), ("report", "-o", "{out}"), ("verify",), ("diff", "{other}"),
                     ("collect",), ("index", "-o", "{out}"))  # fmt: skip
VIME: Final = (*corpus.SITE, "--stack", "2026-07")
WITHOUT_JSON: Final = frozenset({"index", "prepare-file", "logs"})

Files = dict[str, bytes]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Files to put into a folder, an archive or one file, and words for the command line."""

    argv: tuple[str, ...]
    files: Files
    is_archive: bool = False


Kind = Callable[[Random, Sequence[float]], Case]


def main() -> int:
    arguments = _parse()
    scratch = Path(tempfile.mkdtemp(prefix="rlk-repro-fuzz-"))
    arguments.keep.mkdir(parents=True, exist_ok=True)
    sandbox = Sandbox(scratch / "box")
    end = time.monotonic() + arguments.seconds
    number, num_found = arguments.first, 0
    ends: Counter[int] = Counter()
    print(f"seed {arguments.seed}, {arguments.seconds} s", flush=True)
    try:
        while time.monotonic() < end and num_found < MOST_FOUND:
            num_found += try_case(sandbox, arguments.seed, number, arguments.keep)
            ends[sandbox.last_code] += 1
            number += 1
    finally:
        sandbox.close()
        shutil.rmtree(scratch)
    codes = ", ".join(f"{number} times {code}" for code, number in sorted(ends.items()))
    print(f"{number - arguments.first} cases of seed {arguments.seed}: {num_found} found; exit codes: {codes}")
    return 1 if num_found else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the first case")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), metavar="DIR", help="for inputs of findings")
    return parser.parse_args()


def try_case(sandbox: Sandbox, seed: int, number: int, keep: Path) -> bool:
    """Tell whether this case found a failure; the reduced case then lies in ``keep``."""
    rng = Random(f"{seed}-{number}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    seeds = [rng.random() for _ in range(rng.choice(NUM_MUTATIONS))]
    choice = rng.random()
    found = _find(sandbox, _make(kind, choice, seeds))
    if not found:
        return False
    for item in list(seeds):  # drop each mutation that is not needed
        fewer = [other for other in seeds if other != item]
        if len(seeds) > 1 and _find(sandbox, _make(kind, choice, fewer)):
            seeds = fewer
    case = _make(kind, choice, seeds)
    place = keep / f"{seed}-{number}"
    shutil.rmtree(place, ignore_errors=True)
    argv = _write(case, place)
    print(f"case {number}: {_find(sandbox, case) or found}\n  rlk-repro {' '.join(map(repr, argv))}", flush=True)
    return True


def _make(kind: Kind, choice: float, seeds: Sequence[float]) -> Case:
    rng = Random(choice)
    case = kind(rng, seeds)
    has_json = case.argv[0] not in WITHOUT_JSON and rng.random() < 0.3
    return replace(case, argv=(*case.argv, "--json")) if has_json else case


def _find(sandbox: Sandbox, case: Case) -> str:
    """Return what is wrong with the command's result; empty if nothing is wrong."""
    place = sandbox.scratch / "case"
    shutil.rmtree(place, ignore_errors=True)
    return sandbox.judge(*_write(case, place))[1]


def _write(case: Case, place: Path) -> list[str]:
    """Write the case to disk, and return the command line."""
    place.mkdir(parents=True)
    target = place / "run"
    if case.is_archive:
        target = place / "bundle.tgz"
        target.write_bytes(gzip.compress(pack(case.files), 1, mtime=0))
    else:
        for name, data in case.files.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    words = {
        "{target}": str(target),
        "{other}": str(target),
        "{out}": str(place / "report"),
        "{file}": str(target / FILE),
        "{log}": str(target / "vime.log"),
    }
    return [words.get(word, word) for word in case.argv]


@cache
def read_honest() -> Files:
    with tempfile.TemporaryDirectory() as folder:
        root = make_honest(Path(folder) / "honest").root
        return {name: (root / name).read_bytes() for name in list_files(root) if name not in {"bundle.tgz", CHECKSUMS}}


@cache
def read_agreement() -> Files:
    """Return the files of sealed evidence that compared engines."""
    with tarfile.open(EVIDENCE) as archive:
        found = ((member.name, archive.extractfile(member)) for member in archive if "/ray/" not in member.name)
        return {name: stream.read() for name, stream in found if stream is not None and name != CHECKSUMS}


def _bundle(rng: Random, seeds: Sequence[float]) -> Case:
    files = _folder(rng, seeds).files
    if rng.random() < 0.6:  # verify stops at an unsealed bundle; readers read all of it
        files[CHECKSUMS] = render_checksums({name: sha256_bytes(data) for name, data in files.items()})
    return Case(argv=(*rng.choice(READERS), "{target}"), files=files, is_archive=True)


def _agreement(rng: Random, seeds: Sequence[float]) -> Case:
    """Mutate the records of engines with the contract in them, and rarely another file."""
    files = dict(read_agreement())
    engines = [name for name in sorted(files) if "/engines/" in name]
    for item in seeds:
        own = Random(item)
        name = own.choice(engines)
        if own.random() < 0.1:
            _mutate(files, own)
        elif name in files:
            files[name] = _mutate_lines(files[name], own)
    return Case(argv=(*rng.choice(OF_ENGINES), "{target}"), files=files, is_archive=True)


def _folder(rng: Random, seeds: Sequence[float]) -> Case:
    files = dict(read_honest())
    for item in seeds:
        _mutate(files, Random(item))
    return Case(argv=(*rng.choice(OF_FOLDERS), "{target}"), files=files)


def _authored(rng: Random, seeds: Sequence[float]) -> Case:
    """Mutate a shipped run, stack, hardware file or profile as YAML or as bytes."""
    folder = rng.choice(sorted(corpus.OF_AUTHORS))
    top, _, rest = folder.partition("/")
    data = rng.choice(sorted((data_dir(top) / rest).glob("*.yaml"))).read_bytes()
    argv = rng.choice(corpus.OF_AUTHORS[folder])
    if "--run" in argv and folder == "jobs":
        argv += VIME if b"kind: vime" in data else corpus.SITE
    for item in seeds:
        own = Random(item)
        data = _mutate_yaml(data, own) if own.random() < 0.7 else _mutate_bytes(data, own)
    return Case(argv=argv, files={FILE: data})


def _log(rng: Random, seeds: Sequence[float]) -> Case:
    """Mutate a log of vime, from which ``predict`` reads step times."""
    data = read_honest()[OTHERS["log"]]
    for item in seeds:
        data = _mutate_lines(data, Random(item))
    return Case(argv=("predict", "{log}", "--hardware", "h200", "--vocab", "9"), files={"vime.log": data})


def _setting(rng: Random, seeds: Sequence[float]) -> Case:
    name = rng.choice(("smoke", "qwen3-30b-a3b", "vime-train-only-r3", "operators-smoke", "module-qwen3-4b"))
    data = (data_dir("jobs") / f"{name}.yaml").read_bytes()
    value = yaml.safe_load(data)
    settings = []
    for item in seeds:
        own = Random(item)
        path, current = own.choice(list(_list_paths(value)))
        text = own.choice((str(own.choice(VALUES)), json.dumps(own.choice(VALUES)), _mutate_text(str(current), own)))
        settings += ["--set", f"{path}={text}".replace("\0", "").encode(errors="replace").decode()]
    site = VIME if b"kind: vime" in data else corpus.SITE
    return Case(argv=("submit", "--dry-run", "--run", name, *site, "--exploratory", *settings), files={})


def _rollouts(rng: Random, seeds: Sequence[float]) -> Case:
    """Mutate stored rollouts, the pickle inside them or an archive of them."""
    name = rng.choice(("vime-r3", "vime-tp2"))
    data = lzma.decompress((ROOT / "tests" / "assets" / "rollouts" / f"{name}.pt.xz").read_bytes())
    if rng.random() < 0.3:
        data = pack({"x/0.pt": data[:20_000], "1.pt": b"x"})
    elif rng.random() < 0.7:
        data = _mutate_pickle(data, seeds)
    if data[:2] != b"PK" or rng.random() < 0.3:
        for item in seeds:
            data = _mutate_bytes(data, Random(item))
    return Case(argv=("prepare-file", "{file}"), files={FILE: data})


KINDS: Final[Mapping[Kind, int]] = {
    _bundle: 10, _folder: 3, _agreement: 5, _authored: 4, _setting: 2, _log: 1, _rollouts: 3,
}  # fmt: skip


def _mutate(files: Files, rng: Random) -> None:
    """Mutate one file.  The plan is rarely mutated, because without a valid plan no other file is read."""
    name = rng.choice([name for name in sorted(files) if name != PLAN] or [PLAN])
    kind = rng.random()
    if kind < 0.03:
        _mutate_plan(files, rng)
    elif kind < 0.08:
        _mutate_tree(files, name, rng)
    elif kind < 0.15:
        files[name] = _mutate_bytes(files[name], rng)
    elif name.endswith(".json"):
        files[name] = _mutate_json(files[name], rng)
    elif name.endswith(".yaml"):
        files[name] = _mutate_text(files[name].decode(errors="replace"), rng).encode(errors="replace")
    else:
        files[name] = _mutate_lines(files[name], rng)


def _mutate_tree(files: Files, name: str, rng: Random) -> None:
    data = files.pop(name)
    other = rng.choice(sorted(files))
    new = f"{name.rpartition('/')[0]}/{rng.choice(('00', '1', '9' * 20, 'é', 'a' * 200))}".removeprefix("/")
    choices = [(f"{name}/inner", data), (name, files[other]), (other, data), (new, data), None]
    if change := rng.choice(choices):
        files[change[0]] = change[1]


def _mutate_plan(files: Files, rng: Random) -> None:
    if PLAN not in files:
        return
    files[PLAN] = _mutate_json(files[PLAN], rng)
    with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError):
        record = json.loads(files[PLAN])
        fit_hashes(record)
        files[PLAN] = json.dumps(record).encode()


def _mutate_pickle(data: bytes, seeds: Sequence[float]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w") as changed:
        for item in archive.infolist():
            content = archive.read(item)
            for seed in seeds if item.filename.endswith("data.pkl") else ():
                content = _mutate_bytes(content, Random(seed))
            changed.writestr(item.filename, content)
    return out.getvalue()


def _mutate_bytes(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 10))):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                changed[place:place] = rng.randbytes(rng.choice((1, 8, 100)))
            case 2:
                del changed[place : place + rng.choice((1, 8, 100, 10_000))]
            case _:
                changed[place:place] = changed[max(0, place - 200) : place]
    return bytes(changed)


def _mutate_json(data: bytes, rng: Random) -> bytes:
    try:
        value = [json.loads(data)]
    except (ValueError, RecursionError):
        return _mutate_bytes(data, rng)
    raw = _change_value(value, rng)
    return json.dumps(value)[1:-1].replace(json.dumps(MARK), raw).encode(errors="surrogatepass")


def _change_value(value: Any, rng: Random) -> str:
    """Change, remove, double, rename or move one value, or return what stands for ``MARK`` and no writer writes."""
    places = list(_list_places(value))
    holder, key = rng.choice(places)
    match rng.randrange(9):
        case 0 | 1:
            holder[key] = rng.choice(VALUES)
        case 7 | 8:
            holder[key] = rng.choice([value for value in VALUES if type(value) is type(holder[key])] or VALUES)
        case 2:
            del holder[key]
        case 3:
            other, other_key = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[other_key]))
        case 4 if isinstance(holder, dict):
            holder[rng.choice((ODD_TEXT, "", "x" * 3000, f"{key}x"))] = holder.pop(key)
        case 5:
            holder[key] = [holder[key]] * rng.choice((1, 2, 300))
        case _:
            holder[key] = MARK
            return rng.choice(RAW)
    return ""


def _list_places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _list_places(value[key])


def _mutate_lines(data: bytes, rng: Random) -> bytes:
    found = data.split(b"\n")
    place = rng.randrange(len(found))
    match rng.randrange(8):
        case 0:
            del found[place]
        case 1:
            found[place:place] = [found[place]] * rng.choice((1, 50))
        case 2:
            found[place] += found[rng.randrange(len(found))]
        case 3 | 4 | 5 | 6 if found[place].startswith(b"{"):
            found[place] = _mutate_json(found[place], rng)
        case _:
            found[place] = _mutate_text(found[place].decode(errors="replace"), rng).encode(errors="replace")
    return b"\n".join(found)


def _mutate_text(text: str, rng: Random) -> str:
    """Replace a word, number or mark, or cut out a piece."""
    place = rng.randrange(len(text) + 1)
    length = rng.choice((0, 1, 3, 20))
    piece = rng.choice((*RAW, *"{}[]:,'\"#&*!|>%@`\n\t ", *(str(value) for value in VALUES)))
    return text[:place] + (piece if rng.random() < 0.8 else "") + text[place + length :]


def _mutate_yaml(data: bytes, rng: Random) -> bytes:
    with suppress(yaml.YAMLError, ValueError, TypeError, RecursionError, IndexError):
        if rng.random() < 0.7:
            value: Any = yaml.safe_load(data)
            _change_value(value, rng)
            return yaml.safe_dump(value, allow_unicode=True, width=10_000).encode(errors="replace")
    return _mutate_text(data.decode(errors="replace"), rng).encode(errors="replace")


def _list_paths(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items() if isinstance(value, dict) else ():
        path = f"{prefix}.{key}" if prefix else str(key)
        yield path, item
        yield from _list_paths(item, path)


if __name__ == "__main__":
    sys.exit(main())
