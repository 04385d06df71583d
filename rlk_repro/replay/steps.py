"""Replay a bundle in steps: analyse its logs again, prepare the job, check how the machine differs, run, compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import CheckFailed, Problem, SpecError
from rlk_repro.base.files import read_limited, sha256_file
from rlk_repro.base.findings import Finding, Level, refuse_blocking
from rlk_repro.base.yamlfile import MAX_BYTES as MAX_YAML_BYTES
from rlk_repro.bundle.verify import open_verified
from rlk_repro.clusters.registry import get_backend
from rlk_repro.plan import Plan
from rlk_repro.prepare.contents import Contents, diff_contents, find_parts, load_parts
from rlk_repro.probes.node import PROBES, probe_node
from rlk_repro.replay.compare import Comparison, compare_analyses
from rlk_repro.replay.identity import Identity, compare_identities, find_source_drift, read_identity
from rlk_repro.replay.recorded import CHANGED, find_difference, has_same_bytes
from rlk_repro.rundir.manifest import Manifest, diff_manifests, load_manifests
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.results import Analysis
from rlk_repro.rundir.store import has_submitted
from rlk_repro.sources import RL_KERNEL
from rlk_repro.spec import Profile
from rlk_repro.spec.load import Loaded
from rlk_repro.spec.values import BASELINE
from rlk_repro.submit import finishing, planning, sending
from rlk_repro.submit.authored import find_rewritten
from rlk_repro.submit.site import LOCAL, resolve_profile
from rlk_repro.submit.stage import AuthorFiles
from rlk_repro.workloads import list_run_folders
from rlk_repro.workloads.checkouts import trainer_path
from rlk_repro.workloads.environment import find_checkouts


@dataclass(frozen=True, kw_only=True)
class Recorded:
    bundle_id: str
    plan: Plan
    inputs: AuthorFiles
    analysis: Analysis
    manifests: tuple[Manifest, ...]
    identity: Identity
    parts: Mapping[str, Contents] = field(default_factory=dict)
    is_own: bool = False
    """Whether this user submitted the same plan, and so has run its code before."""
    is_reworded: bool = False
    """Whether the sealed and the new analysis of the same logs differ only in their wording."""

    def describe(self) -> dict[str, Any]:
        """Return what ``replay --json`` says of the re-analysis."""
        verdict = self.analysis.verdict
        answer = {"level": "re-analysis", "is_ok": True, "is_reworded": self.is_reworded}
        return {**answer, "bundle_id": self.bundle_id, "verdict": verdict.word.value, "headline": verdict.headline}


@dataclass(frozen=True, kw_only=True)
class PreparedReplay:
    """A replay that is ready to run.

    ``drift`` lists how this machine differs from the recorded nodes; it is None where a scheduler chooses the nodes.
    ``parts`` lists how model, data and stored rollouts here differ from the recorded ones; empty on a remote cluster.
    ``missing`` lists manifests, and sections of manifests, that the bundle lacks.
    """

    recorded: Recorded
    launch: planning.Prepared
    drift: tuple[Finding, ...] | None
    parts: tuple[Finding, ...] = ()
    missing: tuple[Finding, ...] = ()

    @property
    def known_drift(self) -> tuple[Finding, ...]:
        return (*self.missing, *self.parts, *(self.drift or ()))

    @property
    def num_blocking(self) -> int:
        return sum(item.level is Level.BLOCKING for item in self.known_drift)


def reanalyse(bundle: Path) -> Recorded:
    """Verify a bundle and analyse its logs again.

    Raises:
        CheckFailed: a file was changed, the logs give another analysis, or the author's files give another plan.
    """
    with open_verified(bundle) as (run_dir, verification):
        refuse_blocking(verification.findings, CHANGED, under="bundle: ")
        analysis = analyse(run_dir)
        difference = find_difference(run_dir, analysis)
        if difference is not None:
            where = f"bundle: {run_dir.analysis.relative_to(run_dir.root)}"
            what = f"differs from the values computed from the logs ({difference})"
            hint = "the logs, the analysis or rlk-repro itself was changed"
            raise CheckFailed(Problem(where, what, expected="the same bytes", hint=hint))
        plan = Plan.load(run_dir.plan)
        inputs = _read_inputs(run_dir)
        what = "differs from the bundled files and the recorded flags"
        refuse_blocking(find_rewritten(plan, run_dir), what, under="bundle: ")
        return Recorded(
            bundle_id=sha256_file(run_dir.checksums),
            plan=plan,
            inputs=inputs,
            analysis=analysis,
            manifests=load_manifests(run_dir),
            identity=read_identity(run_dir, plan),
            parts=load_parts(run_dir.prepared),
            is_own=has_submitted(run_dir),
            is_reworded=not has_same_bytes(run_dir, analysis),
        )


def find_site(recorded: Recorded, cluster: str | None, profile: str | None) -> Loaded[Profile]:
    """Return the user's profile, never the bundle's; without ``cluster`` and ``profile``, use the bundle's cluster."""
    return resolve_profile(profile, cluster or (recorded.plan.cluster if profile is None else None))


def prepare(
    recorded: Recorded, *, cluster: str | None = None, profile: str | None = None, is_on_same_nodes: bool = False
) -> PreparedReplay:
    site = find_site(recorded, cluster, profile)
    plan = dataclasses.replace(recorded.plan, profile=site.model)
    inputs = dataclasses.replace(recorded.inputs, profile=site.data)
    nodes = tuple(manifest.node for manifest in recorded.manifests) if is_on_same_nodes else ()
    drift = None
    if plan.cluster == LOCAL:
        plan, lost = _fit_here(plan)
        with trainer_path(plan):
            drift = (*lost, *_find_drift(recorded, probe_node("here")))
    rendered = planning.render(plan, inputs, nodes=nodes, is_own=recorded.is_own)
    parts: tuple[Finding, ...] = ()
    if not get_backend(plan.cluster).IS_REMOTE:  # this machine cannot see the prepared files of a remote cluster
        parts = tuple(diff_contents(recorded.parts, find_parts(list_run_folders(plan, rendered.run_dir))))
    missing = tuple(_find_missing(recorded))
    return PreparedReplay(recorded=recorded, launch=rendered, drift=drift, parts=parts, missing=missing)


def check_drift(drift: tuple[Finding, ...], *, is_accepted: bool) -> None:
    """Raise CheckFailed if this machine has blocking differences and the user did not accept them."""
    if not is_accepted:
        hint = "--yes runs the replay anyway; the comparison will list the differences"
        refuse_blocking(drift, "differs from the recorded machine", hint=hint)


def require_consent(*, is_accepted: bool) -> None:
    """Raise SpecError unless the user confirmed the run, with an answer on the terminal or with ``--yes``."""
    if not is_accepted:
        what = "would run the bundle's code, which you have not confirmed"
        hint = "--dry-run shows what would run; --yes runs it"
        raise SpecError(Problem("replay", what, expected="--yes, or a terminal", hint=hint))


def run(
    prepared: PreparedReplay, tell: Callable[[str], None], *, is_quiet: bool = False
) -> tuple[Comparison, finishing.Result]:
    launched = sending.submit(prepared.launch, [("replay_of", prepared.recorded.bundle_id)])
    tell(f"run directory: {launched.run_dir.root}")
    sending.wait(launched, tell, is_quiet=is_quiet)
    result = finishing.finish(launched, tell)
    if prepared.drift is None and (here := load_manifests(launched.run_dir)):
        prepared = dataclasses.replace(prepared, drift=_find_drift(prepared.recorded, here[0]))
    code = compare_identities(prepared.recorded.identity, read_identity(launched.run_dir, prepared.launch.plan))
    margin, drift = prepared.recorded.plan.run.measure.replay_margin, prepared.known_drift
    return compare_analyses(_translate(prepared), result.analysis, drift=drift, code=code, margin=margin), result


def _fit_here(plan: Plan) -> tuple[Plan, tuple[Finding, ...]]:
    """Reduce the plan to one node without a container, as the local cluster needs; list what was removed."""
    lost, sources = [], dict(plan.sources)
    run, stack, hardware, layout = plan.run, plan.stack, plan.hardware.hardware, plan.layout
    if layout.num_nodes > 1:
        where = f"run {run.run}: layouts.{hardware}.num_nodes"
        lost.append(Finding(Level.BLOCKING, where, str(layout.num_nodes), "1, because the local cluster has one node"))
        layouts = {**run.layouts, hardware: layout.model_copy(update={"num_nodes": 1})}
        run = run.model_copy(update={"layouts": layouts})
        sources[f"layouts.{hardware}.num_nodes"] = "--cluster local"
    if stack.images:
        found = "none, because the local cluster uses this machine's software"
        lost.append(Finding(Level.BLOCKING, f"stack {stack.stack}: images", ", ".join(stack.images), found))
        stack = stack.model_copy(update={"images": {}})
        sources["stack.images"] = "--cluster local"
    return dataclasses.replace(plan, run=run, stack=stack, sources=sources), tuple(lost)


def _translate(prepared: PreparedReplay) -> Analysis:
    """On the local cluster, replace the experiment hash in the recorded analysis by that of the plan that runs now."""
    analysis, plan = prepared.recorded.analysis, prepared.launch.plan
    if plan.cluster != LOCAL or analysis.experiment_hash != prepared.recorded.plan.experiment_hash:
        return analysis
    return dataclasses.replace(analysis, experiment_hash=plan.experiment_hash)


def _find_missing(recorded: Recorded) -> Iterator[Finding]:
    """Report each missing manifest or section, because a comparison would pass over it."""
    num_nodes, found = recorded.plan.layout.num_nodes, recorded.manifests
    if len(found) < num_nodes:
        yield Finding(Level.BLOCKING, "nodes", f"a manifest of each of {num_nodes} node(s)", f"{len(found)}")
    for manifest in found:
        for name in sorted(PROBES.keys() - manifest.sections.keys()):
            yield Finding(Level.BLOCKING, f"nodes.{manifest.node}.{name}", "recorded facts", "none")


def _find_drift(recorded: Recorded, here: Manifest) -> tuple[Finding, ...]:
    found = diff_manifests(recorded.manifests[0], here) if recorded.manifests else []
    own = {RL_KERNEL.module} if recorded.plan.run.rl_kernel.commits is not None else set()
    own |= {source.module for source in find_checkouts(recorded.plan, BASELINE)}
    return (*found, *find_source_drift(recorded.identity, here, found, own))


def _read_inputs(run_dir: RunDir) -> AuthorFiles:
    return AuthorFiles(
        run=read_limited(run_dir.run_yaml, MAX_YAML_BYTES),
        stack=read_limited(run_dir.stack_yaml, MAX_YAML_BYTES),
        hardware=read_limited(run_dir.hardware_yaml, MAX_YAML_BYTES),
        profile=read_limited(run_dir.profile_yaml, MAX_YAML_BYTES),
    )
