"""A second trainer is two modules and a line in each of two tables; no other file knows of it."""

import json
from pathlib import Path

from tests.support.copied_package import Copy

FILES = Path(__file__).parent / "second_trainer"
PROFILE = (
    "profile: here\ncluster: local\nhardware: cpu\npreflight: {min_free_disk_gib: 0.01, min_free_memory_gib: 0.01}\n"
)


def test_a_second_trainer_is_measured_sealed_and_read(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "source")
    copy.add(FILES / "spec.py", "rlk_repro/spec/line.py")
    copy.add(FILES / "workload.py", "rlk_repro/workloads/line.py")
    copy.add(FILES / "trainer.py", "rlk_repro/workloads/line_trainer.py")
    table = "rlk_repro/workloads/__init__.py"
    copy.replace(
        table,
        "from rlk_repro.workloads.module import",
        "from rlk_repro.workloads.line import Line\nfrom rlk_repro.workloads.module import",
    )
    copy.replace(table, '    "reference": Reference(),', '    "line": Line(),\n    "reference": Reference(),')
    models = "rlk_repro/spec/files.py"
    copy.replace(
        models,
        "from rlk_repro.spec.vime import",
        "from rlk_repro.spec.line import LineWorkload\nfrom rlk_repro.spec.vime import",
    )
    copy.replace(models, "    ReferenceWorkload | ", "    LineWorkload | ReferenceWorkload | ")
    assert copy.touched() == {table: 2, models: 2}

    copy.add(FILES / "run.yaml", "jobs/line.yaml")
    (tmp_path / "here.yaml").write_text(PROFILE)
    runs = {"RLK_REPRO_RUNS": str(tmp_path / "runs")}
    request = ("submit", "--run", "line", "--profile", tmp_path / "here.yaml")
    shown = copy.run(*request, "--dry-run", cwd=tmp_path, **runs)
    assert shown.returncode == 0, shown.stderr
    ran = copy.run(*request, "--wait", cwd=tmp_path, **runs)
    assert ran.returncode == 0, ran.stderr
    (bundle,) = (tmp_path / "runs").rglob("bundle.tgz")
    assert copy.run("verify", bundle, cwd=tmp_path).returncode == 0
    assert copy.run("replay", bundle, "--analyze-only", cwd=tmp_path).returncode == 0
    report = copy.run("report", bundle, "-o", tmp_path / "report", "--json", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    (found,) = json.loads(report.stdout)
    assert found["verdict"] == "inconclusive"
    assert "01-p1-enabled: missing (the trainer wrote no ops file)" in found["headline"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert "a line through 50 points" in page
    assert "These numbers are of a line." in page
