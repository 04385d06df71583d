"""Start vime's ``train.py`` from its checkout: ``python -m rlk_repro.integration.start_vime ARGS``.

All stored rollouts must exist, because vime's ``--load-forge-rollout-data`` replaces a missing file by file 0.  Their
files must hold data only, because vime unpickles them.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rlk_repro.base.errors import BundleUnreadable, CheckFailed, EnvironmentMissing, Problem, RlkReproError
from rlk_repro.integration.ports import use_own_ports
from rlk_repro.rundir.rollout_files import PICKLE, check_archive, check_records

SCRIPT: Final = "train.py"
WITHOUT_ENGINES: Final = "--load-debug-rollout-data"
LOADING: Final = ("--load-forge-rollout-data", WITHOUT_ENGINES)
PLACEHOLDER: Final = "{rollout_id}"
ROUTING_REPLAY: Final = "--use-rollout-routing-replay"


def main() -> int:
    argv = sys.argv[1:]
    try:
        check_rollouts(argv)
        script = find_script()
        if snapshots := _find_value(argv, "--memory-snapshot-dir"):
            Path(snapshots).mkdir(parents=True, exist_ok=True)  # torch writes to this folder but does not create it
    except RlkReproError as error:
        sys.stderr.write(f"{error.title}: {error}\n")
        return error.exit_code
    # Python sets sys.argv and sys.path like this for a script; Ray's workers import from the folder of sys.argv[0]
    sys.argv = [str(script), *argv]
    sys.path.insert(0, str(script.parent))
    if WITHOUT_ENGINES not in argv:
        use_own_ports()
    runpy.run_path(str(script), run_name="__main__")
    return 0


def check_rollouts(argv: Sequence[str]) -> None:
    """Check every rollout that these arguments load.

    Raises:
        CheckFailed: a rollout is missing, empty or without experts to replay; or all rollouts share one file.
        BundleUnreadable: a rollout is unreadable, or could run code when vime loads it.
    """
    number = int(_find_value(argv, "--num-rollout") or 0)
    for flag in LOADING:
        template = _find_value(argv, flag)
        if template is None:
            continue
        if PLACEHOLDER not in template:
            raise CheckFailed(
                Problem(flag, "names one file for all steps", got=template, expected=f"a name with {PLACEHOLDER}")
            )
        paths = [Path(template.format(rollout_id=rollout_id)) for rollout_id in range(number)]
        absent = [path for path in paths if not path.is_file() or not path.stat().st_size]
        if absent:
            what = f"{len(absent)} of {number} stored rollouts are missing or empty"
            raise CheckFailed(Problem(flag, what, got=str(absent[0]), hint="run rlk-repro prepare or submit a new run"))
        for path in paths:
            require_data(path)
        if ROUTING_REPLAY in argv and paths:
            check_routes(paths[0])


def require_data(path: Path) -> None:
    """Raise BundleUnreadable if a stored rollout is unreadable, or could run code when vime loads it.

    This check reads the archive with torch, as vime does, because another reader may read other members of an unusual
    archive.
    """
    check_archive(path)
    torch: Any = importlib.import_module("torch")
    try:
        archive = torch._C.PyTorchFileReader(str(path))  # noqa: SLF001  (what torch.load uses)
        records, data = archive.get_all_records(), archive.get_record(PICKLE)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise BundleUnreadable(Problem(path.name, f"cannot be read ({reason})", expected="a stored rollout")) from None
    check_records(path, data, records)


def check_routes(path: Path) -> None:
    """Raise CheckFailed if a stored rollout does not give ``topk`` different experts for every token.

    If vLLM's kernel itself chooses the experts, vLLM wrongly reports expert 0 for every token of every rollout, so a
    check of one rollout is enough.
    """
    torch: Any = importlib.import_module("torch")
    # vime loads the file in this way too; require_data has checked that the file holds only data
    stored = torch.load(path, map_location="cpu", weights_only=False)
    for number, sample in enumerate(stored["samples"]):
        routes = sample.get("rollout_routed_experts")  # [tokens - 1, layers, topk]
        where = f"{path.name}: samples.{number}.rollout_routed_experts"
        hint = "store the rollouts again with vllm-moe-backend triton"
        if routes is None:
            raise CheckFailed(Problem(where, "missing", expected="the experts of every token", hint=hint))
        ordered = torch.as_tensor(routes).sort(dim=-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise CheckFailed(Problem(where, "names an expert twice for one token", hint=hint))


def find_script() -> Path:
    """Find ``train.py`` beside the package ``vime`` in its checkout.

    Raises:
        EnvironmentMissing: vime is absent, or was installed without its scripts.
    """
    spec = importlib.util.find_spec("vime")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [script for place in places if (script := Path(place).parent / SCRIPT).is_file()]
    if not found:
        what = "missing" if spec is None else f"has no {SCRIPT} beside it"
        raise EnvironmentMissing(
            Problem("python module vime", what, expected="a checkout of vime", hint="set VIME_SRC")
        )
    return found[0]


def _find_value(argv: Sequence[str], flag: str) -> str | None:
    return next((value for word, value in itertools.pairwise(argv) if word == flag), None)


if __name__ == "__main__":
    sys.exit(main())
