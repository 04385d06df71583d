"""Verification finds and names every change."""

import gzip
import io
import json
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro import plan
from rlk_repro.base.errors import BundleUnreadable, SpecError
from rlk_repro.base.files import sha256_bytes
from rlk_repro.base.findings import MAX_FINDINGS, Finding, Level, has_blocking, limit_findings
from rlk_repro.bundle import verify
from rlk_repro.bundle.checksums import CHECKSUMS, parse_checksums, render_checksums
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.bundle.verify import unpack
from rlk_repro.clusters import api
from rlk_repro.prepare import contents
from rlk_repro.rundir import exits, manifest, results
from rlk_repro.rundir.manifest import Manifest, diff_nodes
from rlk_repro.rundir.paths import RunDir
from tests.support.make_run import LOG, TRIAL, make_run_dir, read_tar, rewrite, verify_bundle, write_as_packed

EMPTY_DIGEST = sha256_bytes(b"")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = make_run_dir(tmp_path)
    seal(run_dir)
    return run_dir


@pytest.fixture
def bundle(run_dir: RunDir) -> Path:
    return pack(run_dir)


def digests(run_dir: RunDir) -> dict[str, str]:
    return parse_checksums(run_dir.checksums.read_bytes())[0]


def verify_or_refuse(bundle: Path) -> list[Finding]:
    """Return the findings; problems of a refusal that name the bundle become blocking findings."""
    try:
        return verify_bundle(bundle)
    except BundleUnreadable as error:
        named = (problem for problem in error.problems if problem.where.startswith(str(bundle)))
        return [Finding(Level.BLOCKING, problem.where, "", problem.what) for problem in named]


def is_found(bundle: Path) -> bool:
    return any(finding.level is Level.BLOCKING and finding.where for finding in verify_or_refuse(bundle))


def test_a_bundle_and_its_folder_have_one_id(run_dir: RunDir, bundle: Path) -> None:
    bundle_id = sha256_bytes(run_dir.checksums.read_bytes())
    for path in (bundle, run_dir.root):
        for expected_id in (None, bundle_id):
            expected = verify.Verification(is_ok=True, bundle_id=bundle_id, findings=())
            assert verify.verify(path, expected_id=expected_id) == expected


def test_an_unsealed_run_has_no_id_and_is_blocking(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    expected = Finding(Level.BLOCKING, CHECKSUMS, "a seal", "missing: the run was interrupted or has not finished")
    assert verify_bundle(run_dir.root) == [expected]
    found = verify.verify(pack(run_dir), expected_id="0" * 64)
    no_id = Finding(Level.BLOCKING, "id", "0" * 64, "no id: the bundle was never sealed")
    assert (found.bundle_id, found.findings) == (None, (expected, no_id))


@pytest.mark.parametrize("expected_id", ["", "0" * 12, "0" * 65, "g" * 64, "A" * 64, "0" * 64 + "\n"])
def test_a_malformed_id_is_a_wrong_argument(bundle: Path, expected_id: str) -> None:
    with pytest.raises(SpecError, match=r"--id: not a bundle id, got .*, expected 64 lower-case hex digits"):
        verify.verify(bundle, expected_id=expected_id)


def test_every_changed_byte_of_a_bundle_and_every_bit_of_its_header_and_trailer_is_found(
    bundle: Path, tmp_path: Path
) -> None:
    random_ = random.Random(20261120)
    sound = bundle.read_bytes()
    flips = [(random_.randrange(len(sound)), random_.randrange(1, 256)) for _ in range(400)]
    edges = (*range(16), 20, 47, *range(len(sound) - 9, len(sound)))
    flips += [(position, 1 << bit) for position in edges for bit in range(8)]
    changed = tmp_path / "changed.tgz"
    missed = []
    for position, flip in flips:
        data = bytearray(sound)
        data[position] ^= flip
        changed.write_bytes(data)
        if not is_found(changed):
            missed.append((position, flip))
    assert missed == []


def test_every_truncation_and_every_appended_byte_is_found(bundle: Path, tmp_path: Path) -> None:
    sound = bundle.read_bytes()
    changed = tmp_path / "changed.tgz"
    cuts = (sound[:length] for length in range(0, len(sound), 197))
    for data in (*cuts, sound[:-1], sound + b"\0", sound + sound):
        changed.write_bytes(data)
        assert is_found(changed)


def test_damage_names_the_member_whose_bytes_it_changed(run_dir: RunDir, tmp_path: Path) -> None:
    noise = run_dir.rollouts / "0.bin"
    noise.write_bytes(random.Random(1).randbytes(50_000))
    run_dir.checksums.unlink()
    seal(run_dir)
    sound = pack(run_dir).read_bytes()
    damaged = tmp_path / "damaged.tgz"
    for position in range(20_000, 30_000, 1000):
        data = bytearray(sound)
        data[position] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(BundleUnreadable) as caught:
            verify_bundle(damaged)
        assert f"{damaged}: rollouts/0.bin" in [problem.where for problem in caught.value.problems]


def test_removed_added_and_changed_members_are_all_named_at_once(run_dir: RunDir, bundle: Path, tmp_path: Path) -> None:
    target = tmp_path / "changed.tgz"
    changed = rewrite(bundle, target, removed=("run.yaml", LOG), added={"late.txt": b"", LOG: b"other"})
    sealed = digests(run_dir)
    assert verify_bundle(changed) == [
        Finding(Level.BLOCKING, "late.txt", "no file", "an extra file that SHA256SUMS does not list"),
        Finding(Level.BLOCKING, "run.yaml", f"sha256 {sealed['run.yaml']}", "missing"),
        Finding(Level.BLOCKING, LOG, f"sha256 {sealed[LOG]}", f"sha256 {sha256_bytes(b'other')}"),
    ]


def test_every_byte_of_the_checksums_counts(run_dir: RunDir) -> None:
    random_ = random.Random(3)
    sound = run_dir.checksums.read_bytes()
    for _ in range(100):
        data = bytearray(sound)
        data[random_.randrange(len(data))] ^= random_.randrange(1, 256)
        run_dir.checksums.write_bytes(data)
        assert has_blocking(verify_bundle(run_dir.root))


def test_links_and_pipes_in_a_run_directory_are_findings(run_dir: RunDir) -> None:
    (run_dir.root / "link").symlink_to("run.yaml")
    assert verify_bundle(run_dir.root) == [Finding(Level.BLOCKING, "link", "a regular file", "a symbolic link")]


@pytest.mark.parametrize(
    ("edit", "where", "expected", "found"),
    [
        (lambda lines: [*lines, b"junk\n"], "SHA256SUMS:3", "'<sha256>  <name>'", r"'junk\n'"),
        (lambda lines: [lines[0], lines[1].upper()], "SHA256SUMS:2", "'<sha256>  <name>'", None),
        (lambda lines: [lines[0], lines[1].replace(b"  ", b" *")], "SHA256SUMS:2", "'<sha256>  <name>'", None),
        (lambda lines: [lines[0], lines[1].rstrip()], "SHA256SUMS:2", "'<sha256>  <name>'", None),
        (lambda lines: [*lines, lines[1]], "SHA256SUMS:3", "every name once", "'b' again"),
        (lambda lines: lines[::-1], "SHA256SUMS:2", "names in order", "'a' out of order"),
    ],
)
def test_lines_of_another_form_are_named(
    edit: Callable[[list[bytes]], list[bytes]], where: str, expected: str, found: str | None
) -> None:
    lines = render_checksums({"a": EMPTY_DIGEST, "b": EMPTY_DIGEST}).splitlines(keepends=True)
    _, (finding,) = parse_checksums(b"".join(edit(lines)))
    assert (finding.level, finding.where, finding.expected) == (Level.BLOCKING, where, expected)
    assert found is None or finding.found == found


@given(st.dictionaries(st.text(st.characters(exclude_characters="\0/"), min_size=1), st.just(EMPTY_DIGEST)))
def test_checksums_survive_a_round_trip(listed: dict[str, str]) -> None:
    listed = {name.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape"): d for name, d in listed.items()}
    assert parse_checksums(render_checksums(listed)) == (listed, [])


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_parser_of_checksums(data: bytes) -> None:
    listed, findings = parse_checksums(data)
    assert findings or render_checksums(listed) == data


@pytest.mark.parametrize(
    "name", ["plan.json", "submission.json", "nodes/n0/manifest.json", f"trials/{TRIAL}/exit.json"]
)
def test_our_own_files_must_be_readable_and_not_newer(tmp_path: Path, name: str) -> None:
    newer = "written by a newer version, got 99, expected schema 1 or older\n  hint: upgrade rlk-repro"
    contents: tuple[tuple[bytes, str], ...] = (
        (b'{"schema": 99}', newer),
        (b"{}", "invalid schema number, got None, expected 1 to 1"),
        (b'{"schema": 1, "schema": 1}', "not readable as JSON (key 'schema' is given twice)"),
        (b"[" * 100_000, "not readable as JSON ("),
        (b"\xff", "not readable as JSON ("),
    )
    run_dir = make_run_dir(tmp_path)
    for content, found in contents:
        (run_dir.root / name).write_bytes(content)
        run_dir.checksums.unlink(missing_ok=True)
        seal(run_dir)
        (finding,) = verify_bundle(run_dir.root)
        assert (finding.level, finding.where, finding.expected) == (Level.BLOCKING, name, "JSON of schema 1 or older")
        assert finding.found.startswith(f"{name}: {found}")


def test_the_schema_numbers_are_those_of_the_writers() -> None:
    assert verify._SCHEMAS == {
        "plan.json": plan.SCHEMA,
        "submission.json": api.SCHEMA,
        "prepared.json": contents.SCHEMA,
        "analysis/analysis.json": results.SCHEMA,
        "nodes/*/manifest.json": manifest.SCHEMA,
        "trials/*/exit.json": exits.EXIT_SCHEMA,
    }


def test_a_bundle_repacked_with_plain_tar_verifies(bundle: Path, tmp_path: Path) -> None:
    unpack(bundle, tmp_path / "out")
    again = tmp_path / "again.tgz"
    subprocess.run(["tar", "czf", again, "-C", tmp_path / "out", "."], check=True)
    found = verify_bundle(again)
    assert [(item.level, item.where) for item in found] == [(Level.WARNING, "."), (Level.WARNING, str(again))]
    assert found[0].found == "the owner, mode, time or padding differs; this is the first such member"
    assert found[1].found == "an archive that another tool packed, so only its content is checked"


@pytest.mark.parametrize("folder", ["a run", "runs/a run"])
def test_a_bundle_packed_with_folders_around_it_gets_the_right_command(
    bundle: Path, tmp_path: Path, folder: str
) -> None:
    out = tmp_path / "out"
    unpack(bundle, out / folder)
    again = tmp_path / "again.tgz"
    subprocess.run(["tar", "czf", again, "-C", out, folder], check=True)
    with pytest.raises(BundleUnreadable) as caught:
        verify_bundle(again)
    assert str(caught.value) == (
        f"{again}: holds the run directory inside another folder, "
        f"got '{folder}/plan.json', expected plan.json at the top\n"
        f"  hint: pack its content: tar czf bundle.tgz -C '{folder}/' ."
    )
    with pytest.raises(BundleUnreadable):
        unpack(again, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_other_tar_formats_are_read(run_dir: RunDir, tmp_path: Path, form: int) -> None:
    if form == tarfile.USTAR_FORMAT:
        for name in list(digests(run_dir)):
            if len(name) > 90:
                (run_dir.root / name).unlink()
        run_dir.checksums.unlink()
        seal(run_dir)
    again = tmp_path / "again.tgz"
    with tarfile.open(again, "w:gz", format=form, encoding="utf-8") as archive:
        for name in (*digests(run_dir), CHECKSUMS):
            archive.add(run_dir.root / name, name)
    assert not has_blocking(verify_bundle(again))


def test_one_changed_header_field_in_a_recompressed_bundle_is_named(bundle: Path, tmp_path: Path) -> None:
    tar = bytearray(read_tar(bundle))
    again = tmp_path / "again.tgz"
    start = tar.index(b"run.yaml\0")
    tar[start + 146] ^= 1  # the last digit of mtime
    again.write_bytes(gzip.compress(_with_checksum(tar, start)))
    assert [finding.where for finding in verify_bundle(again)] == [str(again), "run.yaml"]


def test_every_byte_of_a_recompressed_tar_counts(bundle: Path, tmp_path: Path) -> None:
    random_ = random.Random(11)
    sound = read_tar(bundle)
    again = tmp_path / "again.tgz"
    for _ in range(150):
        tar = bytearray(sound)
        tar[random_.randrange(len(tar))] ^= random_.randrange(1, 256)
        again.write_bytes(gzip.compress(tar, 1))
        found = {finding.found for finding in verify_or_refuse(again)}
        assert found - {"an archive that another tool packed, so only its content is checked"}


def test_an_added_empty_folder_is_found(bundle: Path, tmp_path: Path) -> None:
    out = io.BytesIO(read_tar(bundle))
    with tarfile.open(fileobj=out, mode="a") as archive:
        info = tarfile.TarInfo("nodes/empty")
        info.type = tarfile.DIRTYPE
        archive.addfile(info)
    again = write_as_packed(tmp_path / "again.tgz", out.getvalue())
    assert Finding(Level.BLOCKING, "nodes/empty/", "no folder", "an extra folder") in verify_bundle(again)


@pytest.mark.parametrize("form", ["mode", "prefix", "two extensions"])
def test_tools_that_read_archives_differently_find_the_same_files(bundle: Path, tmp_path: Path, form: str) -> None:
    """GNU tar reads another file or mode from such an archive, and anybody can compute the sha256 of the header."""
    tar = read_tar(bundle)
    info = tarfile.TarInfo("nodes/late.txt")
    if form == "mode":
        info.mode = 0o4777
    raw = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if form == "prefix":
        raw[345:350] = b"nodes"
        raw[148:156] = b"%06o\0 " % (sum(raw[:148]) + 8 * 32 + sum(raw[156:]))
    if form == "two extensions":
        pax = tarfile.TarInfo("é" * 80).tobuf(tarfile.PAX_FORMAT)
        raw = bytearray(pax[:-512] + tarfile.TarInfo("nodes/" + "a" * 120).tobuf(tarfile.GNU_FORMAT))
    again = write_as_packed(tmp_path / "again.tgz", bytes(raw) + tar)
    found = "a header or padding that rlk-repro does not write"
    if form == "mode":
        assert Finding(Level.BLOCKING, str(again), "the bytes that were packed", found) in verify_bundle(again)
        return
    with pytest.raises(BundleUnreadable, match="two parts" if form == "prefix" else "too many headers"):
        verify_bundle(again)


def test_findings_survive_as_json_whatever_the_names(run_dir: RunDir) -> None:
    for path in run_dir.scheduler.iterdir():
        if path.is_file():
            path.unlink()
    text = json.dumps([finding.to_json() for finding in verify_bundle(run_dir.root)], ensure_ascii=False)
    assert "not-utf-8" in text
    text.encode()


def _with_checksum(tar: bytearray, start: int) -> bytes:
    """Return the tar with a correct checksum in the header at ``start``."""
    header = tar[start : start + 512]
    header[148:156] = b" " * 8
    tar[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    return bytes(tar)


def test_findings_are_counted_up_to_a_limit_and_the_most_serious_are_listed(run_dir: RunDir) -> None:
    first = Manifest(node="a", sections={"environment": {f"A{number}": 1 for number in range(600)}})
    found = list(diff_nodes([first, *(Manifest(node=f"b{number}", sections={}) for number in range(2000))]))
    assert (len(found), str(found[-1])) == (
        2 * 600 + 1,
        f"blocking: nodes: expected nodes alike, found more than {MAX_FINDINGS} differences up to node b1; "
        "later nodes were not compared",
    )
    alike = Manifest(node="c", sections=first.sections)
    assert list(diff_nodes([first, alike, alike])) == []
    many = [Finding(Level.INFO, f"{number:05}", "", "") for number in range(2 * MAX_FINDINGS)]
    listed = limit_findings([*many, Finding(Level.BLOCKING, "x", "", "")])
    said = f"info: findings: expected at most {MAX_FINDINGS}, found {MAX_FINDINGS + 1} more, not listed"
    assert (len(listed), listed[0].where, str(listed[-1])) == (MAX_FINDINGS + 1, "x", said)
    run_dir.checksums.write_bytes(b"\n" * 2 * MAX_FINDINGS)
    wrong = verify_bundle(run_dir.root)
    assert (len(wrong), wrong[-1].where) == (MAX_FINDINGS + 1, "findings")
