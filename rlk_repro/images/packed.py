"""Pack a ready environment for a machine without a network, and unpack it there.

It travels as archives that several cores write and read at once, and the folder `tool`: this package and what it
imports, to run `create` with. Torch and NVIDIA's libraries, half of an environment, may stay behind: `create` then
links those that the machine's Python has, if their versions are the environment's.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import venv
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from isal import igzip

from rlk_repro.base import proc
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing, Problem, SpecError
from rlk_repro.base.files import load_json, sha256_file, write_bytes, write_json
from rlk_repro.bundle.checksums import CHECKSUMS, render_checksums
from rlk_repro.images.build import timed
from rlk_repro.images.record import parse_record
from rlk_repro.probes.code import normalise

FILE: Final = "packed.json"
RECORD: Final = "provenance.json"
ARCHIVE_BYTES: Final = 160 * 2**20
"""An archive ends after so many bytes of files, so that 16 cores have work; one file of 0.4 GiB is larger."""
REUSED: Final = ("torch", "triton", "cuda-toolkit")
LIBRARIES: Final = "nvidia"
"""The folder of NVIDIA's libraries: packages with files in it are the machine's own, as torch is."""
LEFT_OUT: Final[Mapping[str, tuple[str, ...]]] = {
    "compilers: extensions travel compiled": (
        *("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvcc", "nvidia-nvvm"),
    ),
    "kernels of models and GPUs that no shipped run has, and what only they need": (
        *("cuda-python", "cuda-tile", "flashinfer-cubin", "humming-kernels", "nvidia-cutlass-dsl*", "quack-kernels"),
        *("tilelang", "tokenspeed-*", "z3-solver"),
    ),
    "pictures, video and sound: rollouts are text": ("av", "pynvvideocodec", "torchaudio", "torchcodec"),
    "agents, sandboxes, profilers and loaders that no shipped run starts": (
        *("e2b", "e2b-dockerfile-utils", "fastsafetensors", "lxml", "memray", "openai-agents", "textual"),
    ),
}
"""Packages that no process of a shipped run imports, by the reason."""
_NOT_PACKED: Final = ("lib64", "pyvenv.cfg", "config/*", "steps.json", "*-packages.json", "bin/python*")
"""What belongs to one machine or to the build, or lists packages that stay behind."""


def export(folder: Path, target: Path, *, reuse_torch: bool = False) -> None:
    """Write the archives, the tool and checksums into a new folder; ``reuse_torch`` leaves out the reused packages."""
    if not (folder / RECORD).is_file():
        raise EnvironmentMissing(Problem(str(folder), "is not finished", hint=f"rlk-repro env create {folder}"))
    if target.exists():
        raise SpecError(Problem(str(target), "is there already", expected="a new folder"))
    site = next(folder.glob("lib/python3.*/site-packages"))
    installed = {normalise(found.name): found for found in metadata.distributions(path=[str(site)])}
    patterns = [pattern for group in LEFT_OUT.values() for pattern in group]
    left_out = {name for name in installed if any(fnmatchcase(name, pattern) for pattern in patterns)}
    libraries = {name for name, found in installed.items() if LIBRARIES in _list_tops(found)}
    reused = ({*libraries, *REUSED} & installed.keys()) - left_out if reuse_torch else set()
    target.mkdir(parents=True)
    skipped = site / LIBRARIES if reuse_torch else None
    groups = _group(_choose(folder, skipped, [installed[name] for name in left_out | reused]))
    archives = {f"env-{number:02}.tar.gz": group for number, group in enumerate(groups)}
    what = f"{len(installed) - len(left_out | reused)} of {len(installed)} packages into {len(archives)} archives"
    with timed("archives", what), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: _pack(folder, target / name, archives[name]), archives))
    for name in _list_needs(installed, "rlk-repro"):
        _copy(installed[name], target / "tool")
    value = {
        "python": site.parent.name.removeprefix("python"),
        "folder": str(folder),
        "reused": {name: installed[name].version for name in sorted(reused)},
        "left_out": sorted(left_out),
        "archives": {name: sha256_file(target / name) for name in archives},
    }
    write_json(target / FILE, value)
    files = sorted(path for path in target.rglob("*") if path.is_file())
    digests = {path.relative_to(target).as_posix(): sha256_file(path) for path in files}
    write_bytes(target / CHECKSUMS, render_checksums(digests))


def create(folder: Path, bundle: Path) -> None:
    """Unpack an environment; this process's Python and its torch, triton and NVIDIA libraries become its own.

    Raises:
        EnvironmentMissing: the folder holds no environment; or this Python, or a package to reuse, has another
            version than the packed environment's.
        CheckFailed: an archive is not the one that was packed.
    """
    if not (bundle / FILE).is_file():
        hint = "rlk-repro env export DIR -o FOLDER writes one"
        raise EnvironmentMissing(Problem(str(bundle), "holds no packed environment", expected=FILE, hint=hint))
    value = load_json(bundle / FILE)
    reused = _find_reused(value, bundle)
    site = folder / "lib" / f"python{value['python']}" / "site-packages"
    with timed("archives", "unpacking"), ThreadPoolExecutor(os.cpu_count()) as pool:
        venv.create(folder, symlinks=True)
        list(pool.map(lambda name: _unpack(folder, bundle / name, value["archives"][name]), value["archives"]))
    for found in reused.values():
        for top in _list_tops(found):
            (site / top).unlink(missing_ok=True)
            (site / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    _relocate(folder, site, value["folder"])
    argv = [str(folder / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(site), str(folder / "src")]
    with timed("modules", f"compiling; links to this machine's packages: {', '.join(reused) or 'none'}"):
        proc.run(argv, timeout_s=600.0)  # it fails, because some packages hold templates that are not yet Python
    _write_record(folder / RECORD, value, {name: found.version for name, found in reused.items()})


def _list_tops(distribution: metadata.Distribution) -> set[str]:
    """Return what a package has in site-packages: folders, and single modules."""
    return {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}


def _choose(folder: Path, skipped: Path | None, dropped: Iterable[metadata.Distribution]) -> Iterator[Path]:
    """Yield the environment's files but those in ``skipped`` and those of packages that stay behind.

    Of folders, it yields only those of the sources.
    """
    files = {os.path.normpath(str(file.locate())) for found in dropped for file in found.files or ()}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_dir() and not path.is_symlink() and name.parts[0] != "src":  # git needs even its empty folders
            continue
        if skipped in path.parents or "__pycache__" in name.parts or str(path) in files:
            continue
        if not any(fnmatchcase(str(name), pattern) for pattern in _NOT_PACKED):
            yield path


def _group(paths: Iterable[Path]) -> list[list[Path]]:
    groups: list[list[Path]] = []
    size = ARCHIVE_BYTES
    for path in paths:
        if size >= ARCHIVE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.lstat().st_size
    return groups


def _pack(folder: Path, target: Path, paths: Iterable[Path]) -> None:
    # an environment is 1.1 GB so; xz needs 0.85 GB and 17 times as long
    writer = igzip.IGzipFile(target, "wb", 3)  # type: ignore[no-untyped-call]
    with writer as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for path in paths:
            archive.add(path, path.relative_to(folder).as_posix(), recursive=False)


def _unpack(folder: Path, archive: Path, expected: str) -> None:
    got = sha256_file(archive) if archive.is_file() else "no file"
    if got != expected:
        raise CheckFailed(Problem(str(archive), "is not the archive that was packed", got=got, expected=expected))
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            # tarfile fails where another archive's thread makes the same folder
            (folder / member.name).parent.mkdir(parents=True, exist_ok=True)
            members.extract(member, folder, filter="data")


def _find_reused(value: Mapping[str, Any], bundle: Path) -> dict[str, metadata.Distribution]:
    """Return the packages to link; a version's part behind ``+``, such as ``+cu130``, does not count."""
    here = ".".join(map(str, sys.version_info[:2]))
    hint = f"PYTHONPATH={bundle}/tool PYTHON -m rlk_repro env create … with the machine's Python that has torch"
    problems, reused = [], {}
    if here != value["python"]:
        problems.append(Problem(sys.executable, "is another version of Python", got=here, expected=value["python"]))
    for name, version in value["reused"].items():
        found = next(iter(metadata.distributions(name=name)), None)
        got = found.version if found else "absent"
        if found is None or got.partition("+")[0] != version.partition("+")[0]:
            problems.append(Problem(f"package {name}", "cannot be reused", got=got, expected=version, hint=hint))
        else:
            reused[name] = found
    if problems:
        raise EnvironmentMissing(*problems)
    return reused


def _relocate(folder: Path, site: Path, before: str) -> None:
    """Replace the folder where the environment was made, in scripts and in files that name its sources."""
    files = [*folder.glob("bin/*"), *site.glob("*.pth"), *site.glob("__editable__*")]
    for path in [*files, *site.glob("*.dist-info/direct_url.json")]:
        data = b"" if path.is_symlink() else path.read_bytes()
        if before.encode() in data:
            path.write_bytes(data.replace(before.encode(), str(folder).encode()))


def _write_record(path: Path, value: Mapping[str, Any], reused: Mapping[str, str]) -> None:
    """State in the record which packages are the machine's own, and which are absent."""
    record = parse_record(path.read_bytes(), str(path))
    before = record.code["packages"]
    assert isinstance(before, Mapping)
    packages = {name: version for name, version in before.items() if name not in value["left_out"]} | dict(reused)
    build = {**record.build, "reused": dict(reused), "left_out": list(value["left_out"])}
    write_json(path, replace(record, code={**record.code, "packages": packages}, build=build).to_json())


def _list_needs(installed: Mapping[str, metadata.Distribution], name: str) -> set[str]:
    """Return a package and what it needs, without what extras need."""
    needs, waiting = {name}, [name]
    while waiting:
        texts = [text for text in installed[waiting.pop()].requires or () if "extra ==" not in text]
        names = {normalise(re.split(r"[^A-Za-z0-9._-]", text)[0]) for text in texts}
        new = (names & installed.keys()) - needs
        needs |= new
        waiting += new
    return needs


def _copy(distribution: metadata.Distribution, target: Path) -> None:
    for file in distribution.files or ():
        if not {"..", "__pycache__"} & {*file.parts}:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(file.locate()), target / file)
