"""Compare the log-probs of two bundles' training engines, for example of tensor parallelism 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator

from rlk_repro.analysis.checks import compare_training
from rlk_repro.base.units import count, format_number
from rlk_repro.logs.engines import read_engines
from rlk_repro.plan import Plan
from rlk_repro.rundir.agreement import TRAINING, AgreementCheck, CheckKind, CheckWord
from rlk_repro.rundir.paths import RunDir

_NAMES = (f"{TRAINING}, first bundle", f"{TRAINING}, second bundle")
_JUDGED = {CheckWord.PASS: "within the contract", CheckWord.FAIL: "outside the contract"}


def compare_engines(plan: Plan, first: RunDir, second: RunDir) -> Iterator[str]:
    """Yield one line for each trial and step that both agreement runs recorded; ``plan`` is the first bundle's.

    The log-probs are compared if both trials have the same tokens and weights at the step.  The outputs of layers are
    not compared, because with tensor parallelism a layer's output may be one rank's shard.
    """
    for trial in plan.trials:
        one, other = (read_engines(run_dir.trial(trial.name)) for run_dir in (first, second))
        if one is None or other is None:
            continue
        for step in (step for step in one.steps if step in other.steps):
            for check in compare_training((trial.pair, trial.variant, step), _NAMES, one, other):
                if check.kind is CheckKind.LOG_PROBS:
                    where = f"{trial.name}, step {step}"
                    yield f"engines: {where}, log-probs of training, first against second bundle: {_describe(check)}"


def _describe(check: AgreementCheck) -> str:
    if check.word is CheckWord.NOT_MEASURED:
        return f"not compared, because {check.found}"
    if not check.num_unequal:
        return f"{count(check.num, 'token')} bitwise equal"
    mean = "" if check.mean is None else f"mean {format_number(check.mean, 3)}, "
    return f"{check.num_unequal:,} of {count(check.num, 'token')} differ, {mean}{check.found}: {_JUDGED[check.word]}"
