"""Each mistake of a stranger gets an answer that says what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from rlk_repro.rundir.paths import FIND_BUNDLE
from tests import ROOT

Call = Callable[..., tuple[int, str, str]]
BUNDLE = ROOT / "docs" / "evidence" / "operators-h200.tgz"

NO_RUNS = "hint: call this command in the folder in which the run was submitted, or set RLK_REPRO_RUNS"

MISTAKES = (
    ("submit smoek", 2, "did you mean 'smoke'?"),
    ("submit qwen3-30b --dry-run", 2, "did you mean 'qwen3-30b-a3b'?"),
    ("submit --dry-run", 2, "hint: rlk-repro submit smoke"),
    ("submit xyzzy", 2, "hint: rlk-repro list runs"),
    ("submit missing.yaml", 2, "hint: rlk-repro list runs"),
    ("submit typo.yaml", 2, "did you mean 'warmup_steps'?"),
    ("submit smoke learn", 2, "example: rlk-repro submit qwen3-30b-a3b --cluster slurm --dry-run"),
    ("submit smoke --runn x", 2, "Possible options: --dry-run, --run"),
    ("submit smoke --pairs", 2, "example: rlk-repro submit qwen3-30b-a3b --cluster slurm --dry-run"),
    ("submit smoke --pairs six", 2, "Try 'rlk-repro submit -h' for help."),
    ("submit smoke --hardware h201 --dry-run", 2, "jobs/hardware/h200.yaml, change its values and give its path"),
    ("submit qwen3-30b-a3b-r3 --hardware cpu --dry-run", 2, "expected one of "),
    ("submit qwen3-30b-a3b", 2, "hint: --hardware a100 --dry-run shows the job for a100"),
    ("submit glm-4.5-air --hardware a100 --dry-run", 2, "rlk-repro runs list names each"),
    ("submit demo --pairs 3 --dry-run", 2, "expected --sessions, or"),
    ("submit qwen3-30b-a3b --dry-run", 0, "no --hardware given: the plan is shown for h200"),
    ("verify folder", 5, FIND_BUNDLE),
    ("submit smoke --cluster slrum", 2, "did you mean 'slurm'?"),
    ("submit smoke --cluster lsf", 2, "expected one of local, slurm, k8s"),
    ("submit smoke --cluster slurm", 2, "make a profile there with rlk-repro profile init"),
    ("submit smoke --cluster slurm --profile generic-h200", 3, "hint: --dry-run works anywhere"),
    ("submit smoke --profile nope.yaml", 2, "hint: rlk-repro list profiles"),
    ("submit smoke --profile nope", 2, "hint: rlk-repro list profiles"),
    ("submit smoke --stack latest --dry-run", 2, "hint: rlk-repro list stacks"),
    ("submit smoke --lane fast --dry-run", 2, "expected 'live', 'fixed-rollout' or 'train-only'"),
    ("submit smoke --variants enabled --dry-run", 2, "expected baseline,enabled"),
    ("submit smoke --variants baseline,enabeld --dry-run", 2, "did you mean 'enabled'?"),
    ("submit smoke --set foo --dry-run", 2, "expected for example measure.pairs=8"),
    ("submit smoke --set measure.par=3 --dry-run", 2, "did you mean 'pairs'?"),
    ("submit smoke --set measure.smallest_effect_pct=5 --dry-run", 2, "hint: add --exploratory"),
    ("submit smoke --max-job-time 4h", 2, "expected --cluster slurm"),
    ("submit smoke --vime-src folder", 2, "expected a folder with vime/"),
    ("submit --resume 2026", 2, NO_RUNS),
    ("submit --resume x --pairs 3", 2, "expected only --dry-run, --wait or --json"),
    ("status", 2, "hint: rlk-repro submit smoke makes one"),
    ("logs nope", 2, NO_RUNS),
    ("cancel nope", 2, NO_RUNS),
    ("verify", 2, "hint: rlk-repro submit smoke makes one"),
    ("claims check", 2, "hint: claims was removed in version 0.3; docs/evidence/README.md has a table"),
    ("images export -o x", 2, "hint: images export was removed in version 0.3; use skopeo copy"),
    ("verify README.md", 5, FIND_BUNDLE),
    ("verify nope.tgz", 2, FIND_BUNDLE),
    ("verify cut.tgz", 5, FIND_BUNDLE),
    ("replay cut.tgz", 5, FIND_BUNDLE),
    ("replay BUNDLE --cluster slurm", 2, "hint: rlk-repro profile init --cluster slurm"),
    ("replay BUNDLE --profile nope", 2, "hint: rlk-repro list profiles"),
    ("report folder", 5, FIND_BUNDLE),
    ("report BUNDLE --fail-on slow", 2, "expected any of faster, slower"),
    ("report BUNDLE -o README.md", 3, "hint: name another folder with -o"),
    ("submit qwen3-4b --cluster slurm --profile generic-mi300x --dry-run", 2, "has no layout for this hardware"),
    ("diff BUNDLE", 2, "example: rlk-repro diff --gate reference.tgz bundle.tgz"),
    ("index folder -o site", 5, FIND_BUNDLE),
    ("index BUNDLE", 2, "example: rlk-repro index docs/evidence/*.tgz -o site"),
    ("profile show generic", 2, "did you mean 'generic-a100'?"),
    ("profile init --cluster slurm", 3, "log in to the cluster, or copy a shipped profile: rlk-repro profile show "),
    ("images pull --stack nope", 2, "hint: rlk-repro list stacks"),
    ("images pull --platform cuda", 2, "expected --platform cuda-amd64"),
    ("prepare qwen3-4b", 2, "expected one of a100, h100, h200"),
    ("statsu", 2, "Did you mean 'status'?"),
    ("list run", 2, "did you mean 'runs'?"),
)


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a folder with files that are not bundles, on a machine without a scheduler or an engine."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "README.md").write_text("# Hello\n")
    (tmp_path / "cut.tgz").write_bytes(BUNDLE.read_bytes()[:5000])
    (tmp_path / "typo.yaml").write_text(
        (ROOT / "jobs" / "smoke.yaml").read_text().replace("warmup_steps", "warmup_step")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "folder"))
    monkeypatch.setenv("COLUMNS", "160")


@pytest.mark.parametrize(("line", "exit_code", "next_step"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_a_mistake_is_answered_with_the_next_step(call: Call, line: str, exit_code: int, next_step: str) -> None:
    code, _, err = call(*shlex.split(line.replace("BUNDLE", str(BUNDLE))))
    assert (code, next_step in err) == (exit_code, True), err
    assert "Traceback" not in err
