"""``python -m rlk_repro``: the same as the console script, whose name another package may have taken."""

from rlk_repro.cli import main

main()
