"""No reader accepts one key twice in an object, because two readers may take different values."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.files import parse_json
from rlk_repro.cli import app
from rlk_repro.logs.ops import read_ops
from rlk_repro.rundir.paths import RunDir, TrialDir
from tests.security import hostile
from tests.support.verifying import verify_bundle


@pytest.mark.parametrize("relative", ["plan.json", "analysis/analysis.json", hostile.FILES["exit"]])
def test_a_sealed_file_with_a_key_twice_does_not_verify(relative: str, tmp_path: Path) -> None:
    def double(run_dir: RunDir) -> None:
        path = run_dir.root / relative
        path.write_bytes(path.read_bytes().replace(b'"schema": 1', b'"schema": 1, "schema": 1', 1))

    _, bundle = hostile.make_bundle(hostile.make_honest(tmp_path / "honest"), tmp_path / "hostile", double)
    [finding] = [item for item in verify_bundle(bundle) if item.level == "blocking"]
    assert (finding.where, finding.found) == (
        relative,
        f"{relative}: not readable as JSON (key 'schema' is given twice)",
    )
    result = CliRunner().invoke(app, ["replay", str(bundle), "--analyze-only"])
    assert isinstance(result.exception, BaseException)


def test_the_key_is_named_however_deep(tmp_path: Path) -> None:
    with pytest.raises(BundleUnreadable, match=r"x\.json: not readable as JSON \(key 'b' is given twice\)"):
        parse_json("x.json", b'{"a": [{"b": 1, "c": 2, "b": 1}]}')


def test_a_log_line_with_a_key_twice_is_ignored(tmp_path: Path) -> None:
    folder = TrialDir(tmp_path / "00-p1-baseline")
    folder.ops.mkdir(parents=True)
    folder.ops_file(0).write_text('{"event":"step","step":0,"step":1,"timers":{},"memory":{},"calls":{}}\n')
    [rank] = read_ops(folder).ranks
    assert rank.first_reject == "line 1: not an event: key 'step' is given twice"
