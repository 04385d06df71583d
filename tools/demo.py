"""Run the demo, check its bundle, run it again and say what came out: ``python -m tools.demo``.

The first line answers whether the installation works; it does not depend on the size of the effect.
"""

from __future__ import annotations

import json
import sys
import textwrap
from typing import Any, Final

from rlk_repro.base import proc

TIMEOUT_S: Final = 900.0


def ask(*words: str) -> Any:
    """Run one command of rlk-repro and return its JSON answer; end the demo with the command's own error."""
    done = proc.run([sys.executable, "-P", "-m", "rlk_repro", *words, "--json"], timeout_s=TIMEOUT_S)
    if done.returncode:
        print(f"rlk-repro {' '.join(words)} ended with exit code {done.returncode}:\n{done.stderr}", file=sys.stderr)
        sys.exit(1)
    return json.loads(done.stdout)


def main() -> None:
    print("three sessions of a small GRPO trainer run on this machine: about 15 s …", flush=True)
    result = ask("submit", "demo", "--cluster", "local", "--wait")
    bundle = result["bundle"]
    # a replay first verifies the bundle and analyses its logs again, and ends here if anything differs
    print("they ran and were sealed; now the same experiment again, from the bundle …", flush=True)
    again = ask("replay", bundle, "--yes")
    (answer,) = ask("report", bundle, "--summary")
    print("\nThe installation works: three sessions ran, were sealed, verified and analysed again.\n")
    rows = {
        "result": answer["answer"].removeprefix("Result: "),
        "planted": "in the baseline, a wait as long as each step's training: nearly half of a step",
        "replay": again["headline"],
        "bundle": f"{bundle} (id {result['bundle_id'][:12]})",
        "report": result["report"],
        "next": "rlk-repro runs list   (after: source .venv/bin/activate)",
    }
    for name, text in rows.items():
        print(textwrap.fill(text, 88, initial_indent=f"{name:<9}", subsequent_indent=" " * 9, break_long_words=False))


if __name__ == "__main__":
    main()
