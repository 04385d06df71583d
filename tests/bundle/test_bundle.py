"""Bundles are sealed, packed, unpacked and listed."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlk_repro.base.errors import BundleUnreadable, CheckFailed, SpecError
from rlk_repro.base.files import dump_json, sha256_bytes, write_bytes, write_text
from rlk_repro.base.resources import find_yaml
from rlk_repro.bundle.archive import render_header
from rlk_repro.bundle.checksums import CHECKSUMS, parse_checksums, render_checksums
from rlk_repro.bundle.inspect import inspect_bundle
from rlk_repro.bundle.seal import FolderReader, pack, seal
from rlk_repro.bundle.verify import open_verified, unpack
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.rundir.store import list_run_dirs
from tests.support.make_run import LOG, RUN_ID, TRIAL, make_run_dir, read_tar, verify_bundle

KEYS = ("experiment", "run", "lane", "hardware", "profile", "cluster", "plan_hash", "verdict", "word", "headline",
        "facts", "rlk-repro", "run_id", "status")  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run_dir(tmp_path)


@pytest.fixture
def bundle(run_dir: RunDir) -> Path:
    seal(run_dir)
    return pack(run_dir)


def read_tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def packed_names(run_dir: RunDir) -> set[str]:
    return {name for name in read_tree(run_dir.root) if run_dir.is_packed(name)}


def test_a_stranger_checks_a_bundle_with_tar_and_sha256sum(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stranger"
    folder.mkdir()
    subprocess.run(["tar", "xzf", bundle], cwd=folder, check=True)
    check = [shutil.which("sha256sum") or "sha256sum", "-c", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=folder, check=True, capture_output=True)
    assert done.stderr == b""
    assert done.stdout.count(b": OK\n") == 29


def test_the_checksums_are_those_that_sha256sum_writes(run_dir: RunDir) -> None:
    seal(run_dir)
    names = sorted(packed_names(run_dir) - {CHECKSUMS}, key=os.fsencode)
    theirs = subprocess.run(["sha256sum", "--", *names], cwd=run_dir.root, check=True, capture_output=True).stdout
    assert run_dir.checksums.read_bytes() == theirs


def test_neither_name_nor_time_nor_mode_changes_the_bytes(run_dir: RunDir, bundle: Path, tmp_path: Path) -> None:
    copy = RunDir(tmp_path / "elsewhere" / "another name")
    old_mask = os.umask(0o077)
    try:
        for name, data in reversed(read_tree(run_dir.root).items()):
            path = copy.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            os.utime(path, (1, 1))
            path.chmod(0o755)
        again = pack(copy)
    finally:
        os.umask(old_mask)
    assert again.read_bytes() == bundle.read_bytes()


def test_members_are_sorted_files_without_a_folder_around_owner_or_time(bundle: Path, run_dir: RunDir) -> None:
    with tarfile.open(bundle, encoding="utf-8") as archive:
        members = archive.getmembers()
    names = [member.name for member in members]
    assert names == sorted(packed_names(run_dir), key=os.fsencode)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode, m.type) for m in members} == {
        (0, 0, 0, "", "", 0o644, tarfile.REGTYPE)
    }
    assert bundle.read_bytes()[4:10] == b"\0\0\0\0\0\xff"


def test_opening_takes_a_bundle_or_a_run_directory(run_dir: RunDir, bundle: Path) -> None:
    with open_verified(run_dir.root) as (opened, _):
        assert opened == run_dir
    with open_verified(bundle) as (opened, _):
        assert (opened.root / LOG).read_bytes() == (run_dir.root / LOG).read_bytes()
    assert not opened.root.exists()


def test_a_pipe_is_refused_as_a_bundle(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BundleUnreadable) as caught, open_verified(tmp_path / "pipe"):
        pass
    assert str(caught.value) == f"{tmp_path}/pipe: a device, socket or named pipe, expected a regular file"


@pytest.mark.parametrize("act", [seal, pack])
def test_files_changed_since_sealing_are_named(run_dir: RunDir, act: Callable[[RunDir], object]) -> None:
    seal(run_dir)
    run_dir.run_yaml.unlink()
    (run_dir.root / "late.txt").write_bytes(b"")
    log = run_dir.root / LOG
    log.write_bytes(b"other")
    with pytest.raises(CheckFailed) as caught:
        act(run_dir)
    listed, _ = parse_checksums(run_dir.checksums.read_bytes())
    root, what = run_dir.root, "changed after it was sealed, got"
    assert str(caught.value).splitlines() == [
        f"{root}/late.txt: {what} 'an extra file that SHA256SUMS does not list', expected no file",
        f"{root}/run.yaml: {what} 'missing', expected sha256 {listed['run.yaml']}",
        f"{root}/{LOG}: {what} 'sha256 {sha256_bytes(b'other')}', expected sha256 {listed[LOG]}",
    ]
    assert not run_dir.bundle.exists()


@pytest.mark.parametrize("act", [seal, pack])
def test_links_and_pipes_are_all_named_and_refused(run_dir: RunDir, act: Callable[[RunDir], object]) -> None:
    (run_dir.root / "link").symlink_to("/etc/passwd")
    (run_dir.root / "nodes" / "folder").symlink_to(run_dir.trials)
    os.mkfifo(run_dir.root / "nodes" / "pipe")
    with pytest.raises(CheckFailed) as caught:
        act(run_dir)
    assert sorted(str(caught.value).splitlines()) == [
        f"{run_dir.root}/link: cannot be packed, got 'a symbolic link', expected a regular file",
        f"{run_dir.root}/nodes/folder: cannot be packed, got 'a symbolic link', expected a regular file",
        f"{run_dir.root}/nodes/pipe: cannot be packed, got 'a device, socket or named pipe', expected a regular file",
    ]
    assert not run_dir.is_sealed
    assert not run_dir.bundle.exists()
    assert not list(run_dir.root.glob(".partial-*"))


def test_a_file_that_grows_while_it_is_packed_is_cut_at_its_first_size(run_dir: RunDir) -> None:
    log = run_dir.root / LOG
    before = log.read_bytes()
    reader = FolderReader(run_dir)
    for member in reader:
        if member.name == LOG:
            with log.open("ab") as stream:
                stream.write(b"late line\n")
            assert b"".join(reader.data()) == before


def test_a_large_file_survives_with_the_digest_taken_in_pieces(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / RUN_ID)
    data = os.urandom(3_000_001)
    run_dir.root.mkdir()
    run_dir.run_yaml.write_bytes(data)
    seal(run_dir)
    assert run_dir.checksums.read_bytes() == render_checksums({"run.yaml": sha256_bytes(data)})
    assert unpack(pack(run_dir), tmp_path / "out").run_yaml.read_bytes() == data


def test_zlib_writes_and_reads_the_same_format(
    run_dir: RunDir, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zlib

    from rlk_repro.bundle import gzip_stream

    monkeypatch.setattr(gzip_stream, "deflate", zlib)
    monkeypatch.setattr(gzip_stream, "_DeflateError", zlib.error)
    assert read_tar(pack(run_dir, tmp_path / "zlib.tgz")) == read_tar(bundle)
    assert read_tree(unpack(bundle, tmp_path / "out").root).keys() == packed_names(run_dir)


@given(st.text(st.characters(exclude_characters="\0/"), min_size=1, max_size=300), st.integers(0, 1 << 60))
def test_any_tar_reads_our_headers(name: str, size_bytes: int) -> None:
    path = name.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
    blocks = io.BytesIO(render_header(path, size_bytes))
    with tarfile.open(fileobj=blocks, mode="r|", encoding="utf-8") as archive:
        info = archive.next()
    assert info is not None
    assert (info.name, info.size, info.mtime, info.uid, info.mode) == (path, size_bytes, 0, 0, 0o644)


def test_the_run_id_is_the_recorded_one_whatever_the_folder_is_called(run_dir: RunDir, bundle: Path) -> None:
    renamed = run_dir.root.rename(run_dir.root.with_name("renamed"))
    assert inspect_bundle(renamed).run_id == RUN_ID
    assert inspect_bundle(renamed / bundle.name).run_id == RUN_ID


def test_inspecting_lists_trials_with_status_and_nodes(run_dir: RunDir, bundle: Path) -> None:
    info = inspect_bundle(bundle)
    assert info == inspect_bundle(run_dir.root)
    facts = ("name", "lane", "hardware", "cluster", "plan-hash", "verdict", "headline", "rlk-repro")
    assert list(info.lines()) == [
        f"run {RUN_ID}",
        f"id {sha256_bytes(run_dir.checksums.read_bytes())}",
        "sealed yes",
        *(f"{name} not recorded" for name in facts),
        f"30 files, {info.size_bytes / 1024:.1f} KiB",
        "nodes n0",
        f"trial {TRIAL}: ok",
        "trial 01-p0-enabled: failed",
        "trial 02-p1-enabled: interrupted",
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_inspecting_survives_any_record(tmp_path: Path, record: object) -> None:
    run_dir = RunDir(tmp_path / RUN_ID)
    for path in (run_dir.plan, run_dir.analysis, run_dir.trial(TRIAL).exit):
        write_bytes(path, json.dumps(record).encode(), is_durable=False)
    info = inspect_bundle(run_dir.root)
    assert all(line.isprintable() for line in info.lines())
    dump_json(info.to_json())


# An unreadable path gives an error that names it, in every command that takes a path.

Call = Callable[..., tuple[int, str, str]]
LONG = "x" * 300


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    path = tmp_path / "unreadable.yaml"
    path.symlink_to("/proc/self/mem")
    return path


def test_an_unreadable_run_is_named(call: Call, unreadable: Path) -> None:
    code, _, err = call("submit", "--run", str(unreadable), "--dry-run")
    assert (code, err.endswith("cannot be read (Input/output error)\n")) == (2, True)
    with pytest.raises(SpecError, match=r"--run: x{300}.yaml: cannot be read \(File name too long\)"):
        find_yaml("run", LONG, [Path()])


def test_an_unreadable_runs_root_is_not_an_empty_one(call: Call) -> None:
    assert list_run_dirs() == []
    write_text(runs_root(), "")
    for words, said in (
        (("status",), f"{runs_root()}: cannot be read (Not a directory), expected a folder of run directories"),
        (("status", LONG), "cannot be read (File name too long), expected an id or a path"),
    ):
        code, _, err = call(*words)
        assert (code, said in err) == (2, True)


def test_an_unreadable_bundle_is_named(call: Call, unreadable: Path) -> None:
    for path, reason in ((str(unreadable), "Invalid argument"), (LONG, "File name too long")):
        for words in (("verify", path), ("inspect", path), ("diff", path, path)):
            assert call(*words) == (5, "", f"rlk-repro: {path}: cannot be read ({reason})\n")


def test_a_run_directory_that_cannot_be_listed_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(BundleUnreadable) as caught:
        verify_bundle(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read (Permission denied)"
