"""Run the reference trainer: ``python -m rlk_repro.refengine``."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence

from rlk_repro.base.errors import finish
from rlk_repro.refengine.arguments import parse_args

LOG_FORMAT = "[%(asctime)s] %(filename)s:%(lineno)d - %(message)s"
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=TIME_FORMAT, stream=sys.stdout)
    # without numpy, torch warns once and prints a path of this machine; the trainer does not need numpy
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

    def train() -> None:
        args = parse_args(argv)
        from rlk_repro.refengine.trainer import run

        run(args)

    return finish(train)


if __name__ == "__main__":
    sys.exit(main())
