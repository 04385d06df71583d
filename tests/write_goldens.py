"""Rewrites every generated file that the tests compare with: ``make goldens``, then review the difference."""

from __future__ import annotations

from tests import ROOT
from tests.logs.test_vime_metrics import metrics_page
from tests.support.example_files import write_digests
from tests.support.kube import examples as k8s_examples
from tests.support.slurm import examples as sbatch_examples
from tools.schemas import write_schemas


def main() -> None:
    write_schemas()
    write_digests(sbatch_examples.write_examples() | k8s_examples.write_examples())
    (ROOT / "docs" / "metrics.md").write_text(metrics_page())


if __name__ == "__main__":
    main()
