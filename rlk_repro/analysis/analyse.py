"""Make the analysis of a run directory; equal files give equal analyses on every machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rlk_repro.analysis import agreement, checks, microbatch, operators
from rlk_repro.analysis.allocations import describe_allocations, find_disturbed, find_misfits, find_unknown_nodes
from rlk_repro.analysis.evidence import Evidence
from rlk_repro.analysis.measured import Records
from rlk_repro.analysis.noise import find_noise
from rlk_repro.analysis.sessions import (
    compare_sessions,
    describe_replays,
    pool_step_times,
    read_session,
)
from rlk_repro.analysis.transport import find_fallbacks
from rlk_repro.analysis.trials import fell_back_everywhere, read_trial
from rlk_repro.analysis.verdict import decline, judge
from rlk_repro.base.errors import BundleUnreadable
from rlk_repro.base.escapes import printable
from rlk_repro.base.files import load_json, load_record
from rlk_repro.base.findings import Finding, Level, limit_findings
from rlk_repro.base.units import count, group, name_some
from rlk_repro.logs.telemetry import find_throttled, parse_telemetry
from rlk_repro.plan import Plan, Trial, find_run_id
from rlk_repro.rundir.differences import Kind, read_pair
from rlk_repro.rundir.manifest import Manifest, Unknown, diff_nodes
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import (
    Analysis,
    BlockResult,
    PairResult,
    PairStatus,
    ProofStatus,
    TrialResult,
    TrialStatus,
)
from rlk_repro.rundir.store import read_plan
from rlk_repro.sources import MEGATRON, OURSELVES, RL_KERNEL, VIME
from rlk_repro.spec.values import BASELINE
from rlk_repro.statistics.stats import GATED, STEP_TIME, pair_metrics

# Each fact at the head of a report: its label, and its dotted path in the manifest.
HEADLINE_FACTS: Final = (
    ("CPU", "host.cpu_model"),
    ("CPUs", "host.num_cpus"),
    ("kernel", "host.kernel"),
    ("GPU", "gpu.devices.0.name"),
    ("GPUs per node", "gpu.count"),
    ("driver", "gpu.driver"),
    ("CUDA driver", "gpu.cuda_driver_version"),
    ("ROCm", "gpu.rocm_version"),
    ("Python", "code.python"),
    ("all-reduce bus bandwidth, GB/s", "network.all_reduce.bus_gb_s"),  # of runs of version 0.2
    ("image", "container.image_digest"),
    (OURSELVES.title, "code.rlk_repro.version"),
    *((f"{source.title} commit", f"code.{source.section}.commit") for source in (OURSELVES, VIME, RL_KERNEL, MEGATRON)),
)
MEASURED: Final = (operators.read, agreement.read, checks.read, microbatch.read)
"""What a run measures besides step times."""
LIBRARIES: Final = ("torch", "cuda", "hip", "cudnn", "nccl")
MAX_ALIKE: Final = 20
MIN_COPIED: Final = 4
"""So many equal step times, one after the other, show that a log is a copy."""


def analyse(run_dir: RunDir) -> Analysis:
    """Analyse a run directory; a missing file other than the plan is reported as a status, a reason or a finding.

    Raises:
        BundleUnreadable: the plan is missing or unreadable.
    """
    record = read_plan(run_dir.plan)
    plan = Plan.from_json(record, "plan.json")
    throttled, refused = _read_telemetry(run_dir)
    records = _read_records(plan, run_dir, throttled)
    scored = [pair.pair for pair in records.pairs if pair.status is PairStatus.SCORED]
    manifests, findings = _read_manifests(run_dir)
    # Variants that were started differently, or without a record of how, cannot be compared.
    differences, missing = _compare_starts(plan, run_dir, scored)
    differences += find_fallbacks(plan, run_dir, manifests)
    missing += find_unknown_nodes(plan, run_dir, scored)
    findings += [*describe_allocations(plan, run_dir, scored), *refused, *differences]
    findings += [*_limit(missing), *_limit(list(_find_unplanned(plan, run_dir)))]
    evidence = _gather_evidence(records, differences, missing)
    facts = _facts(run_dir, manifests, records.trials) | describe_replays(records.sessions)
    # Most runs compare speed; a thing with a headline of its own says its result instead.
    judgement = None
    keys: dict[str, Any] = {"trials": tuple(records.trials)}
    for read in MEASURED:
        found = read(records)
        keys |= found.keys
        facts |= found.facts
        if found.headline:
            judgement = decline(evidence, found.headline, found.reasons, is_exploratory=plan.is_exploratory)
    judgement = judgement or judge(evidence, is_exploratory=plan.is_exploratory)
    num_controls = sum(first.is_control for first, _ in plan.pairs().values())
    analysis = Analysis(
        run=plan.run.run,
        run_id=find_run_id(record, run_dir.run_id),
        lane=plan.run.lane,
        workload=plan.run.workload.kind,
        hardware=plan.hardware.hardware,
        stack=plan.stack.stack,
        cluster=plan.cluster,
        experiment_hash=plan.experiment_hash,
        plan_hash=plan.plan_hash,
        num_pairs_planned=len(records.sessions) or len(plan.pairs()) - num_controls,
        num_control_pairs_planned=num_controls,
        num_warmup_steps=plan.run.measure.warmup_steps,
        num_scored_steps=plan.run.measure.num_scored,
        facts=facts,
        pairs=tuple(records.pairs),
        effects=judgement.effects,
        noise_floor=judgement.noise_floor,
        gates=judgement.gates,
        verdict=judgement.verdict,
        notes=tuple(_notes(run_dir)),
        findings=tuple(limit_findings(findings)),
        blocks=tuple(records.blocks),
        shadows=tuple(evidence.shadows),
        pooled=pool_step_times(records.sessions),
        switch=plan.run.switch_title,
        **keys,
    )
    # The analysis file holds 12 digits of each number, so the returned analysis is rounded to 12 digits too.
    rounded = Analysis.from_json(json.loads(analysis.content))
    vars(rounded)["content"] = analysis.content  # rounding twice gives the same bytes
    return rounded


def _read_records(plan: Plan, run_dir: RunDir, throttled: Mapping[str, float]) -> Records:
    """Read all trials, and compare the variants in each pair of trials or in each session."""
    sessions, tokens = [], {}
    trials: list[TrialResult] = []
    blocks: list[BlockResult] = []
    for trial in plan.trials:
        folder, share = run_dir.trial(trial.name), throttled.get(trial.name)
        if plan.is_crossover:
            session = read_session(plan, trial, folder, share)
            sessions.append(session)
            trials += session.arms
            tokens[trial.name] = session.tokens
        else:
            result, tokens[trial.name] = read_trial(plan, trial, folder, share)
            trials.append(result)
    if plan.is_crossover:
        pairs, blocks = compare_sessions(sessions)
    else:
        pairs = list(_make_pairs(plan, trials))
    misfits = dict(_find_copies(plan, trials)) | find_misfits(plan, run_dir)
    disturbed = find_disturbed(plan, run_dir) if plan.num_gpus else {}
    if plan.has_own_policies:  # a neighbour on the GPU makes steps longer, but changes no reward
        pairs = [_leave_times_out(pair) if pair.pair in disturbed else pair for pair in pairs]
    else:
        misfits = disturbed | misfits
    return Records(
        plan=plan,
        run_dir=run_dir,
        trials=trials,
        pairs=list(_drop_misfits(pairs, misfits)),
        sessions=sessions,
        blocks=blocks,
        tokens=tokens,
        disturbed=disturbed,
    )


def _gather_evidence(records: Records, differences: Sequence[Finding], missing: Sequence[Finding]) -> Evidence:
    plan, sessions = records.plan, records.sessions
    counted = [pair.pair for pair in records.pairs if pair.is_counted]
    return Evidence(
        measure=plan.run.measure,
        lane=plan.run.lane,
        workload=plan.run.workload.kind,
        pairs=records.pairs,
        trials={trial.name: trial for trial in records.trials},
        differences=differences,
        missing=[item.where for item in missing],
        disturbed=records.disturbed,
        blocks=records.blocks,
        shadows=[item for session in sessions for item in session.shadows],
        switch="" if plan.run.switch is None else plan.run.switch.title,
        title=plan.run.implementation_title,
        serving=plan.serving,
        has_rollout_log_probs=plan.run.workload.has_rollout_log_probs(plan.run.lane),
        noise=find_noise(sessions, counted) if plan.run.measure.rules > 1 else {},
    )


def _find_copies(plan: Plan, trials: Sequence[TrialResult]) -> Iterator[tuple[str, str]]:
    """Yield each pair of which a trial has the step times of another trial: no clock measures one series twice."""
    pairs = {trial.name: name for name, members in plan.groups().items() for trial in members}
    times = [(series.values, trial.name) for trial in trials if (series := trial.get_series(STEP_TIME)) is not None]
    for values, names in group(times).items():
        if len(names) > 1 and sum(value is not None for value in values) >= MIN_COPIED:
            for name in names:
                yield pairs[name.partition(":")[0]], f"{name_some(names)} have the same step times"


def _drop_misfits(pairs: Iterable[PairResult], misfits: Mapping[str, str]) -> Iterator[PairResult]:
    for pair in pairs:
        misfit = misfits.get(pair.pair, "") if pair.status is PairStatus.SCORED else ""
        yield replace(pair, status=PairStatus.VOID, reason=misfit) if misfit else pair


def _leave_times_out(pair: PairResult) -> PairResult:
    return replace(pair, metrics=tuple(item for item in pair.metrics if item.metric in GATED))


def _read_telemetry(run_dir: RunDir) -> tuple[Mapping[str, float], list[Finding]]:
    paths = [node.telemetry for node in run_dir.node_dirs()]
    found, refused, lacking = [], [], []
    for path in paths:
        where = path.relative_to(run_dir.root).as_posix()
        if not path.is_file():
            lacking.append(Finding(Level.WARNING, where, "telemetry", "missing"))
            continue
        item = parse_telemetry(path)
        found.append(item)
        for reason, number in item.reject_counts.items():
            refused.append(Finding(Level.WARNING, where, "samples", f"{count(number, 'line')}: {reason}"))
    return find_throttled(found), refused + lacking if found else []


def _make_pairs(plan: Plan, found: Sequence[TrialResult]) -> Iterator[PairResult]:
    trials = {trial.name: trial for trial in found}
    for name, (first, second) in plan.pairs().items():
        left, right = trials[first.name], trials[second.name]
        status, reason = _pair_status(plan, left, right)
        is_control, control_reason = _control(first, right)
        yield PairResult(
            pair=name,
            is_control=is_control,
            control_reason=control_reason,
            status=status,
            reason=reason,
            first=left.name,
            second=right.name,
            order="AB" if first.index < second.index else "BA",
            metrics=pair_metrics(left, right),
        )


def _pair_status(plan: Plan, first: TrialResult, second: TrialResult) -> tuple[PairStatus, str]:
    trials = (first, second)
    for trial in trials:
        if not plan.run.is_routed(trial.variant) and trial.proof is not ProofStatus.NOT_REQUESTED:
            return PairStatus.VOID, f"{trial.name}: {plan.serving} may have run ({trial.proof_reason or trial.proof})"
    ended_badly = [f"{trial.name}: {trial.status}" for trial in trials if trial.status is not TrialStatus.OK]
    if ended_badly:
        return PairStatus.DROPPED, "; ".join(ended_badly)
    for trial in trials:
        if not _is_proved(plan, trial):
            return PairStatus.VOID, f"{trial.name}: {trial.proof} ({trial.proof_reason})"
    return PairStatus.SCORED, ""


def _is_proved(plan: Plan, trial: TrialResult) -> bool:
    if not plan.run.is_routed(trial.variant) or trial.proof in {ProofStatus.PROVED, ProofStatus.NATIVE}:
        return True
    is_fallback = trial.proof is ProofStatus.FALLBACK and plan.run.rl_kernel.mode == "auto"
    return is_fallback and fell_back_everywhere(trial)


def _control(first: Trial, second: TrialResult) -> tuple[bool, str]:
    if first.is_control:
        return True, "planned"
    if second.proof is ProofStatus.FALLBACK and fell_back_everywhere(second):
        return True, f"enabled fell back everywhere: {second.proof_reason}"
    return False, ""


def _read_manifests(run_dir: RunDir) -> tuple[list[Manifest], list[Finding]]:
    manifests: list[Manifest] = []
    findings: list[Finding] = []
    for node in run_dir.node_dirs():
        name = node.path.name
        try:
            manifests.append(Manifest.load(node.manifest))
        except BundleUnreadable as error:
            findings.append(Finding(Level.WARNING, f"nodes.{name}", "a manifest", error.problems[0].what))
        try:
            preflight = load_json(node.preflight)
            findings += [Finding.from_json(item) for item in preflight["findings"]]
        except (BundleUnreadable, KeyError, TypeError, ValueError):
            findings.append(Finding(Level.WARNING, f"nodes.{name}", "a preflight record", "no readable record"))
    findings += diff_nodes(manifests)
    return manifests, findings


def _compare_starts(plan: Plan, run_dir: RunDir, scored: Sequence[str]) -> tuple[list[Finding], list[Finding]]:
    """Return what pairs were started with differently, and the records that scored pairs lack."""
    differences, missing = [], []
    for pair, trials in plan.pairs().items():
        record = read_pair(run_dir, *trials, plan.switches)
        for part, items in record.differences.items():
            for item in items:
                if item.kind is Kind.UNDECLARED:
                    where = f"{pair}.{part}.{item.name}"
                    differences.append(Finding(Level.BLOCKING, where, item.baseline, item.enabled))
        if pair in scored:
            for where, found in record.missing.items():
                missing.append(Finding(Level.WARNING, where, "a record to compare", found))
    return differences, missing


def _find_unplanned(plan: Plan, run_dir: RunDir) -> Iterator[Finding]:
    names = {trial.name for trial in plan.trials}
    found = sorted(path.name for path in run_dir.trials.iterdir()) if run_dir.trials.is_dir() else []
    for name in found:
        if name not in names:
            where = f"{run_dir.trials.name}/{printable(name)}"
            yield Finding(Level.WARNING, where, "only trials of the plan", "not in the plan")


def _limit(findings: Sequence[Finding]) -> Iterator[Finding]:
    yield from findings[:MAX_ALIKE]
    if rest := findings[MAX_ALIKE:]:
        yield replace(rest[0], found=f"{rest[0].found}, and {len(rest) - 1} more like this")


def _facts(run_dir: RunDir, manifests: Sequence[Manifest], trials: Sequence[TrialResult]) -> dict[str, str]:
    facts: dict[str, str] = {"nodes": str(len(manifests))}
    known = dict(manifests[0].facts()) if manifests else {}
    for label, path in HEADLINE_FACTS:
        value = known.get(path)
        if value is not None and not isinstance(value, Unknown):
            facts[label] = str(value)
    first = next((trial for trial in trials if trial.variant == BASELINE and trial.status is TrialStatus.OK), None)
    libraries = {} if first is None else load_record(run_dir.trial(first.folder).libraries_file(0))
    for name in LIBRARIES:
        value = libraries.get(name)
        if isinstance(value, str | int | float):
            facts[f"{name} as loaded"] = str(value)
    return facts


def _notes(run_dir: RunDir) -> Iterator[str]:
    for folder in sorted(run_dir.interrupted.glob("*/*")):
        name = folder.relative_to(run_dir.root).as_posix()
        yield f"{name}: interrupted and run again; kept as evidence, not counted"
