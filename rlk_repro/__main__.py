"""Run the command line: ``python -m rlk_repro``, for when another package owns the console script's name."""

from rlk_repro.cli import main

main()
