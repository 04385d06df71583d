"""What the flags of ``submit`` ask for, and the site that they mean: a profile, and the hardware of its nodes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rlk_repro.base.errors import EnvironmentMissing, Problem, SpecError
from rlk_repro.base.resources import list_names, profile_folders
from rlk_repro.base.units import parse_minutes
from rlk_repro.clusters.profiles import render_profile, take_likeliest
from rlk_repro.clusters.registry import BACKENDS, get_backend
from rlk_repro.spec import Profile, Run
from rlk_repro.spec.load import Loaded, Override, load_bytes, load_hardware, load_profile
from rlk_repro.spec.values import BASELINE, ENABLED

LOCAL: Final = "local"


@dataclass(frozen=True, kw_only=True)
class Request:
    run: str
    cluster: str | None = None
    hardware: str | None = None
    profile: str | None = None
    stack: str | None = None
    lane: str | None = None
    sessions: int | None = None
    pairs: int | None = None
    control_pairs: int | None = None
    variants: tuple[str, ...] = (BASELINE, ENABLED)
    settings: tuple[str, ...] = ()
    is_exploratory: bool = False
    is_dry_run: bool = False
    max_job_time: str | None = None
    gpus: str | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    profile: Loaded[Profile]
    remarks: tuple[str, ...] = ()
    is_proposed: bool = False


def find_site(request: Request, run: Run) -> Site:
    """Return the named profile or one proposed from the cluster; dry runs without a cluster take a shipped profile."""
    cluster = request.cluster or LOCAL
    overrides = _list_profile_overrides(request)
    if request.profile is not None or cluster == LOCAL:
        return Site(profile=resolve_profile(request.profile, request.cluster, overrides))
    client = get_backend(cluster).CLIENT
    reason = f"this machine has no {client}"
    if client is not None and shutil.which(client) is not None:
        try:
            return _propose(cluster, overrides)
        except EnvironmentMissing as error:
            if not request.is_dry_run:
                last = error.problems[-1]
                hint = "--dry-run shows the job without sending it"
                if last.hint:
                    hint = f"{last.hint}; {hint}"
                raise EnvironmentMissing(*error.problems[:-1], replace(last, hint=hint)) from None
            words = error.problems[0].what.partition("(")[0].strip()
            reason = f"{client} on this machine reaches no cluster ({words})"
    if not request.is_dry_run:
        ways = "submit on the cluster, or make a profile there with rlk-repro profile init"
        hint = f"{reason}: {ways}; --dry-run shows the job without sending it"
        raise _missing_profile(cluster, hint)
    hardware = request.hardware or next(iter(run.layouts))
    load_hardware(hardware)  # a wrong name is the hardware's, not that of the profile made from it
    name = f"generic-{hardware}"
    remark = f"{reason}: the job uses the shipped profile {name}, whose paths are examples"
    return Site(profile=resolve_profile(name, cluster, overrides), remarks=(remark,))


def _list_profile_overrides(request: Request) -> list[Override]:
    """``--max-job-time`` is for Slurm, where a run can continue in a further job; ``--gpus`` is for this machine."""
    if request.gpus is not None:
        numbers = [word.strip() for word in request.gpus.split(",")]
        if request.cluster not in {None, LOCAL}:
            what = "works on this machine only, because a scheduler assigns GPUs itself"
            raise SpecError(Problem("--gpus", what, got=request.cluster, expected="--cluster local"))
        if not all(number.isdecimal() for number in numbers):
            expected = "numbers of this machine's GPUs, such as 0 or 0,1"
            raise SpecError(Problem("--gpus", "not a list of GPUs", got=request.gpus, expected=expected))
        return [Override(("gpus",), [int(number) for number in numbers], "--gpus")]
    if request.max_job_time is None:
        return []
    flag = "--max-job-time"
    if request.cluster != "slurm":
        raise SpecError(Problem(flag, "works on Slurm only", got=request.cluster or LOCAL, expected="--cluster slurm"))
    time_min = parse_minutes(request.max_job_time)
    if time_min is None:
        raise SpecError(Problem(flag, "not a time", got=request.max_job_time, expected="a time such as 4h or 90m"))
    return [Override(("slurm", "max_time_min"), time_min, flag)]


def _propose(cluster: str, overrides: Sequence[Override]) -> Site:
    proposal, origin = get_backend(cluster).propose_profile(take_likeliest)
    loaded = load_bytes(Profile, f"profile proposed by {origin}", render_profile(proposal, origin).encode(),
                        overrides)  # fmt: skip
    values = proposal.values
    words = [f"hardware {values.get('hardware', 'unknown (no hardware file describes it)')}"]
    words += [f"{key} {value}" for key, value in values.get(cluster, {}).items() if isinstance(value, str)]
    remarks = (
        f"no --profile given: rlk-repro made one from {origin}: {', '.join(words)}",
        f"check before a run: {'; '.join(proposal.remarks) or 'nothing special'}",
        f"to save this profile: rlk-repro profile init --cluster {cluster}",
    )
    return Site(profile=loaded, remarks=remarks, is_proposed=True)


def _missing_profile(cluster: str, hint: str) -> SpecError:
    known = ", ".join(list_names(profile_folders(cluster))) or "(none)"
    what, expected = f"needed for cluster {cluster}", f"a file, or one of {known}"
    return SpecError(Problem("--profile", what, expected=expected, hint=hint))


def choose_hardware(request: Request, run: Run, found: Site) -> tuple[str, tuple[str, ...]]:
    """A dry run without a hardware name takes the hardware of the run's first layout."""
    name = request.hardware or found.profile.model.hardware
    # The shipped profile ``local`` names cpu; a dry run ignores this if the run has no layout for cpu.
    is_shipped_local = request.profile is None and request.cluster in {None, LOCAL}
    is_open = request.hardware is None and (name is None or is_shipped_local)
    if request.is_dry_run and is_open and name not in run.layouts:
        name = next(iter(run.layouts))
        return name, (f"no --hardware given: the plan is shown for {name}",)
    if name is None:
        choices = sorted(run.layouts)
        hint = f"add --hardware {choices[0]}, or set hardware in the profile"
        reason = "no known hardware matches the nodes" if found.is_proposed else "the profile names no hardware"
        raise SpecError(Problem("--hardware", f"missing; {reason}", expected=f"one of {', '.join(choices)}", hint=hint))
    return name, ()


def resolve_profile(name: str | None, cluster: str | None, overrides: Sequence[Override] = ()) -> Loaded[Any]:
    """Return the profile by name or file; the default ``local`` is for the local cluster only.

    Raises:
        SpecError: no profile is given for a cluster other than ``local``, or the profile is for another cluster.
    """
    wanted = cluster or LOCAL
    get_backend(wanted)
    folders = profile_folders(wanted)
    if name is None:
        if wanted != LOCAL:
            hint = f"rlk-repro profile init --cluster {wanted} writes one; run it on the cluster"
            raise _missing_profile(wanted, hint)
        name = LOCAL
    profile = load_profile(name, folders, BACKENDS, overrides)
    if cluster is not None and profile.model.cluster != cluster:
        raise SpecError(
            Problem("--profile", "made for another cluster", got=profile.model.cluster, expected=cluster,
                    hint=f"use --cluster {profile.model.cluster}")
        )  # fmt: skip
    return profile
