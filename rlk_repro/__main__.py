"""Run the command line as ``python -m rlk_repro``, even if another package owns the command ``rlk-repro``."""

from rlk_repro.cli import main

if __name__ == "__main__":
    main()
