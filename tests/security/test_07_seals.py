"""A seal says what changed, a bundle without one says so everywhere, and no link redirects a write."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.base.files import write_bytes, write_json
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.bundle.verify import verify
from rlk_repro.rundir.paths import RunDir
from tests import ROOT
from tests.support.make_run import Recipe, finish_run, make_run

Call = Callable[..., tuple[int, str, str]]
CAUTION = "The run is not sealed, so its files may have changed."


@pytest.fixture
def unsealed(tmp_path: Path) -> RunDir:
    """Make an honest run whose enabled times were halved and whose seal was removed."""
    run_dir = make_run(tmp_path / "runs" / "id")
    finish_run(run_dir)
    run_dir.checksums.unlink()
    run_dir.bundle.unlink()
    for trial in run_dir.trial_dirs():
        if trial.name.endswith("enabled"):
            half = lambda found: f"'perf/step_time': {float(found[1]) / 2}"  # noqa: E731
            trial.stdout.write_text(re.sub(r"'perf/step_time': ([\d.]+)", half, trial.stdout.read_text()))
    pack(run_dir)
    return run_dir


def test_a_report_of_an_unsealed_run_says_so_and_exits_with_1_by_default(
    call: Call, unsealed: RunDir, tmp_path: Path
) -> None:
    out_dir = tmp_path / "out"
    for source in (unsealed.bundle, unsealed.root):
        code, out, _ = call("report", str(source), "-o", str(out_dir))
        assert (code, "FASTER" in out, CAUTION in " ".join(out.split())) == (1, True, True)
        assert CAUTION in (out_dir / "report.md").read_text().split("\n## ", 1)[0]
        assert CAUTION in (out_dir / "report.html").read_text()
    assert call("report", str(source), "-o", str(out_dir), "--unsealed")[0] == 0
    sealed = str(finish_run(make_run(tmp_path / "sealed")))
    # one unsealed run among several sets the exit code
    code, out, _ = call("report", sealed, str(source), "-o", str(out_dir), "--json")
    assert (code, [CAUTION in item["cautions"] for item in json.loads(out)]) == (1, [False, True])


def test_other_commands_name_or_refuse_an_unsealed_run(call: Call, unsealed: RunDir) -> None:
    source = str(unsealed.bundle)
    code, out, _ = call("diff", source, source)
    assert (code, f"{source}: not sealed" in out) == (1, True)
    assert json.loads(call("diff", source, source, "--json")[1])["unsealed"] == [source, source]
    assert call("diff", source, source, "--unsealed")[0] == 0
    for option in ("--analyze-only", "--dry-run", "--yes"):
        code, _, err = call("replay", source, option)
        assert (code, "bundle: SHA256SUMS: differs from what was sealed" in err) == (1, True)


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_id_of_a_changed_bundle_is_computed_from_its_files_and_printed_first(
    call: Call, tmp_path: Path, *, is_packed: bool
) -> None:
    run_dir = make_run(tmp_path / "made")
    finish_run(run_dir)
    claimed = str(verify(run_dir.root).bundle_id)
    run_dir.checksums.rename(tmp_path / "sums")
    write_bytes(run_dir.run_yaml, b"# another\n")
    honest = seal(run_dir)
    (tmp_path / "sums").rename(run_dir.checksums)
    source = run_dir.root
    if is_packed:
        source = tmp_path / "forged.tgz"
        names = [str(path.relative_to(run_dir.root)) for path in sorted(run_dir.root.rglob("*")) if path.is_file()]
        packed = [name for name in names if run_dir.is_packed(name)]
        subprocess.run(["tar", "czf", str(source), *packed], cwd=run_dir.root, check=True)
    code, out, _ = call("verify", str(source), "--id", claimed)
    first, second, third, *_ = out.splitlines()
    assert (code, first, third) == (1, f"id {honest}", f"  but --id expects {claimed}")
    assert second.endswith(f"the bundle's SHA256SUMS gives another id, {claimed}")


def test_a_bundle_is_signed_and_checked_by_the_documented_commands(tmp_path: Path) -> None:
    """The user's own key signs by ssh-keygen; no code of rlk-repro takes part."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    page = (ROOT / "docs" / "formats.md").read_text()
    section = page.split("## Who sealed it")[1].split("\n### ")[0]
    sign, check = re.findall(r"```text\n(.*?)```", section, flags=re.DOTALL)
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    algorithm, public, *_ = key.with_suffix(".pub").read_text().split()
    (tmp_path / "signers").write_text(f"alice@example.org {algorithm} {public}\n")
    shutil.copy(finish_run(make_run(tmp_path / "id")), tmp_path / "bundle.tgz")

    def run(commands: str) -> int:
        script = f"PATH={Path(sys.executable).parent}:$PATH; " + commands.replace("~/.ssh/id_ed25519", str(key))
        return subprocess.run(["sh", "-euc", script], cwd=tmp_path, capture_output=True, check=False).returncode

    assert (run(sign), (tmp_path / "bundle.tgz.sig").is_file()) == (0, True)
    (tmp_path / "SHA256SUMS").unlink(missing_ok=True)
    assert run(check) == 0
    shutil.copy(finish_run(make_run(tmp_path / "other", Recipe(speedup=1.2))), tmp_path / "bundle.tgz")
    assert run(check) != 0


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Make a folder of the victim's, with a file of that name."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "report.html").write_text("mine")
    return folder


def read_all(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_report_is_written_through_a_link_only_where_the_user_names_it(
    call: Call, mine: Path, tmp_path: Path
) -> None:
    run_dir = make_run(tmp_path / "stranger")
    finish_run(run_dir)
    run_dir.report.symlink_to(mine)
    bundle = tmp_path / "b.tgz"
    shutil.copy(run_dir.bundle, bundle)
    (tmp_path / "b-report").symlink_to(mine)
    for source in (run_dir.root, run_dir.bundle, bundle):
        code, _, err = call("report", str(source))
        said = "is a symbolic link; a report is written through a link only if -o names the link"
        assert (code, said in err) == (5, True)
        assert read_all(mine) == {"report.html": "mine"}
    run_dir.report.unlink()
    run_dir.report.mkdir()
    (run_dir.report / "report.html").symlink_to(mine / "report.html")
    assert call("report", str(run_dir.root))[0] == 0
    assert read_all(mine) == {"report.html": "mine"}
    assert not (run_dir.report / "report.html").is_symlink()
    (tmp_path / "out").symlink_to(mine)
    assert call("report", str(run_dir.root), "-o", str(tmp_path / "out"))[0] == 0
    assert read_all(mine)["report.html"].startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("place", [".work", "job", "scheduler", ".agent.log", "nodes/n/telemetry.jsonl", ".cancelled"])
def test_no_command_writes_into_a_run_directory_with_links(call: Call, tmp_path: Path, mine: Path, place: str) -> None:
    run_dir = make_run(tmp_path / "stranger")
    details = {"cluster": "local", "job_id": "1:1", "submitted_at": "2026-11-20T13:30:00Z", "details": {}}
    write_json(run_dir.submission, {"schema": 1, **details})
    link = run_dir.root / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(mine / "report.html" if "." in link.name[1:] else mine)
    before = sorted(os.walk(run_dir.root))
    for words in (("status",), ("logs",), ("cancel",), ("collect",), ("submit", "--resume")):
        code, _, err = call(*words, str(run_dir.root))
        assert (code, err.startswith(f"rlk-repro: {link}: is a link that may lead to your own files")) == (5, True)
    assert read_all(mine) == {"report.html": "mine"}
    assert sorted(os.walk(run_dir.root)) == before
