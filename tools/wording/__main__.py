"""Lint the files named on the command line: ``python -m tools.wording FILE...``; the exit code is 1 for an offence."""

import sys
from pathlib import Path

from rlk_repro.base.units import count
from tools.wording import lint_file

files = [Path(name) for name in sys.argv[1:]]
offences = [f"{file}:{offence}" for file in files for offence in lint_file(file)]
for line in offences:
    print(line)
if not offences:
    print(f"no claim found that goes beyond the evidence ({count(len(files), 'file')})")
sys.exit(bool(offences))
