"""Start-up of the command line beside a two-command Typer program in the same environment, paired, medians of 20.

``python -m benchmarks.startup [N]`` prints one JSON object: ratios, and which heavy modules were imported.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

HELLO = """
import typer
app = typer.Typer()
@app.command()
def hello(name: str) -> None:
    print(name)
@app.command()
def bye(name: str) -> None:
    print(name)
app()
"""
MAIN = "from rlk_repro.cli import main; main()"
HEAVY = ("torch", "scipy", "matplotlib", "numpy")
ROADS = {"help": ["--help"], "dry_run": ["submit", "--dry-run", "--run", "smoke"]}


def wall_s(argv: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def heavy_imports(arguments: list[str]) -> list[str]:
    code = f"""
import sys
sys.argv = ['rlk-repro', *{arguments!r}]
try:
    {MAIN}
except SystemExit:
    pass
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return list(json.loads(done.stderr.strip().splitlines()[-1].replace("'", '"')))


def time_in_turn(commands: Mapping[str, list[str]], num_times: int) -> dict[str, list[float]]:
    """Seconds of each command, one after the other ``num_times``; a round before them warms the file cache."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(num_times + 1):
        for name, argv in commands.items():
            elapsed = wall_s(argv)
            if number:
                times[name].append(elapsed)
    return times


def measure(num_runs: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        hello = Path(folder) / "hello.py"
        hello.write_text(HELLO)
        commands = {"hello": [sys.executable, str(hello), "--help"]}
        commands |= {name: [sys.executable, "-c", MAIN, *arguments] for name, arguments in ROADS.items()}
        times = time_in_turn(commands, num_runs)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "n": num_runs,
        "median_s": medians,
        "ratio_to_hello": {name: medians[name] / medians["hello"] for name in ROADS},
        "heavy_imports": {name: heavy_imports(arguments) for name, arguments in ROADS.items()},
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 20), indent=1))
