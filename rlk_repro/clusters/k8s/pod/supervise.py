"""Run the first process of a pod (leader, follower or collector) until its work is done or it is asked to end."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from rlk_repro.agent.ray.given import ADDRESS_VARIABLE
from rlk_repro.agent.ray.launch import SETTINGS, require_tokens
from rlk_repro.agent.ray.node import raise_file_limit
from rlk_repro.agent.stop import Stop
from rlk_repro.base.disk import writing
from rlk_repro.base.errors import EnvironmentMissing, Problem, RlkReproError, code_after
from rlk_repro.base.files import load_json, write_bytes, write_json
from rlk_repro.base.guarded import Guarded
from rlk_repro.bundle.seal import pack
from rlk_repro.clusters.k8s.pod.notes import UID_VARIABLE, Notes, is_followed
from rlk_repro.clusters.k8s.pod.roster import Gathering, PodSeat, Roster, join
from rlk_repro.clusters.k8s.pods import GROUP_VARIABLE
from rlk_repro.rundir.paths import RunDir
from rlk_repro.rundir.state import read_state

SCHEMA: Final = 1
LOOK_S: Final = 0.2
LAST_LINES_S: Final = 10.0
GATHER_S: Final = 1800.0
RAY_COMMAND: Final = "KUBERAY_GEN_RAY_START_CMD"
MAKER: Final = "a pod that KubeRay 1.5.1 or later made"
RAY_GRACE_S: Final = 10.0
_RAY_PORT: Final = 6379
_STDERR: Final = 2


@dataclass(frozen=True, kw_only=True)
class Duty:
    """The arguments of a pod's command.

    The pod stays for ``hold_s`` seconds after its agent has ended.  ``num_restarts`` is the largest number of restarts
    after a loss of nodes, and also the largest number of replacements of a RayJob's lost leading pod.
    """

    run_dir: RunDir
    inputs: Path
    num_nodes: int
    is_kuberay: bool
    hold_s: float = 0.0
    num_restarts: int = 0


def lead(duty: Duty, environ: Mapping[str, str]) -> int:
    """Run the leading pod; return the agent's exit code, and record it for the RayJob's waiting entrypoint."""
    stop = Stop()
    run_dir = duty.run_dir
    with stop.installed():
        earlier_code = _find_earlier_end(duty, environ)
        if earlier_code is not None and not duty.is_kuberay:
            return _tell_end(run_dir, environ, earlier_code)
        if earlier_code is None:
            bring_in(run_dir, duty.inputs)
        notes = Notes(run_dir, environ)
        notes.write()
        ray = start_ray(environ) if duty.is_kuberay else None
        ray_grace_s = RAY_GRACE_S
        try:
            code = _run_agent(duty, environ, stop, ray, notes) if earlier_code is None else earlier_code
            if stop.signal is signal.SIGINT:  # The user cancelled the job.
                code = code_after(signal.SIGINT)  # Exit with 130: after 143 (SIGTERM), the Job would start a new pod.
            if ray is not None and _is_replaced(duty, environ, stop):
                # kill Ray before the RayJob fails: KubeRay replaces a dead head pod, but not that of a failed RayJob
                ray_grace_s = 0.0
                return code
            stop.forget(signal.SIGINT)  # A cancelled run's pod stays until its bundle and exit code are read.
            with suppress(EnvironmentMissing):  # If the disk is full, a collector pod can offer the bundle later.
                notes.write_bundle()
            _hold(duty, stop)
            _tell_end(run_dir, environ, code)
            _stay_for_operator(stop, ray)
        finally:
            if ray is not None:
                ray.end(ray_grace_s)
    return code


def bring_in(run_dir: RunDir, inputs: Path) -> None:
    """Copy the staged files, and remove the bundle, the state and the notes of an earlier submission."""
    with writing(run_dir.root, hint="can the pod's user write to the volume claim?"):
        run_dir.root.mkdir(parents=True, exist_ok=True)
        for source in sorted(inputs.rglob("*")):
            name = source.relative_to(inputs)
            # names of the kubelet's own folders in a ConfigMap's mount begin with two dots
            if source.is_file() and not any(part.startswith("..") for part in name.parts):
                write_bytes(run_dir.root / name, source.read_bytes())
        for earlier in (run_dir.state, run_dir.bundle, run_dir.pod_end, run_dir.pod_note, run_dir.pod_read):
            earlier.unlink(missing_ok=True)
    if not run_dir.plan.is_file():
        raise EnvironmentMissing(Problem(str(inputs), "holds no plan", expected="the ConfigMap of this run"))


def follow(duty: Duty, environ: Mapping[str, str]) -> int:
    stop = Stop()
    with stop.installed():
        ray = start_ray(environ) if duty.is_kuberay else None
        try:
            seat = find_seat(environ)
            code = _take_part(duty, seat, environ, stop, ray)
            _stay_for_operator(stop, ray)
        finally:
            if ray is not None:
                ray.end(RAY_GRACE_S)
    return code


def serve(run_dir: RunDir, environ: Mapping[str, str]) -> int:
    """Run the collector: pack the run directory if it has no bundle, and offer the bundle until a signal comes."""
    if not run_dir.plan.is_file():
        raise EnvironmentMissing(Problem(str(run_dir.root), "holds no run, because no agent started"))
    stop = Stop()
    with stop.installed():
        notes = Notes(run_dir, environ)
        notes.write(waits_for="packing")
        failure = "" if run_dir.bundle.is_file() else _pack(run_dir)
        notes.write(waits_for="", failure=failure)
        if not failure:
            notes.write_bundle()
            _tell_end(run_dir, environ, 0)
        while not stop.wait(3600):
            pass
    return 0


def wait_for_end(run_dir: RunDir, environ: Mapping[str, str]) -> int:
    """Run the entrypoint of a RayJob: wait, and return the exit code of the leading pod's agent.

    An exit code that another pod recorded does not count, because that pod may be from before a suspension.
    """
    own = environ.get(UID_VARIABLE, "")
    while True:
        if run_dir.pod_end.is_file():
            end = load_json(run_dir.pod_end, schema=SCHEMA)
            if not own or end.get("pod", own) == own:
                return int(end["exit_code"])
        time.sleep(LOOK_S)


def find_seat(environ: Mapping[str, str]) -> PodSeat:
    """Read this pod's identity, which the downward API gives."""
    names = ("RLK_REPRO_POD", UID_VARIABLE, "RLK_REPRO_NODE")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise EnvironmentMissing(*(Problem(name, "not set", expected="set in the pod template") for name in missing))
    pod, uid, node = (environ[name] for name in names)
    return PodSeat(pod=pod, uid=uid, node=node, group=environ.get(GROUP_VARIABLE, ""))


def _take_part(duty: Duty, seat: PodSeat, environ: Mapping[str, str], stop: Stop, ray: Guarded | None) -> int:
    earlier, code = "", 0
    while roster := join(duty.run_dir, seat, stop.wait, earlier):
        earlier = roster.allocation
        code = _wait_for(start_agent(duty.run_dir, seat.node, roster, environ), stop, ray)
        if not duty.num_restarts or (ray is not None and ray.code is not None):
            return code
    return code_after(stop.signal) if stop.signal else code


def _run_agent(duty: Duty, environ: Mapping[str, str], stop: Stop, ray: Guarded | None, notes: Notes) -> int:
    seat, code = find_seat(environ), 0
    given = {ADDRESS_VARIABLE: f"127.0.0.1:{_RAY_PORT}"} if ray is not None else {}
    for number in range(duty.num_restarts + 1):
        try:
            roster = _gather(duty, seat, stop, notes, number)
        except EnvironmentMissing as error:
            if ray is None:
                raise
            sys.stderr.write(f"{error}\n")  # KubeRay would replace a head pod that ends
            code = error.exit_code
            break
        if roster is None:
            code = code_after(stop.signal or 0)
            break
        code = _wait_for(start_agent(duty.run_dir, seat.node, roster, {**environ, **given}), stop, ray)
        if ray is not None and ray.code is not None:
            _name_ray(duty.run_dir, ray.code)
        if not has_lost_nodes(duty.run_dir, roster) or stop.signal or (ray is not None and ray.code is not None):
            break
    if not duty.run_dir.bundle.is_file():
        _pack(duty.run_dir)
    return code


def _name_ray(run_dir: RunDir, code: int) -> None:
    state = read_state(run_dir)
    if state is not None and state.is_interrupted:
        message = f"Ray ended with {code}; {state.message}"
        with suppress(EnvironmentMissing):  # if the disk is full, only this message is lost
            write_json(run_dir.state, replace(state, message=message).to_json(), is_durable=False)


def has_lost_nodes(run_dir: RunDir, roster: Roster) -> bool:
    return run_dir.lost.is_file() and run_dir.lost.read_text() == roster.allocation


def _find_earlier_end(duty: Duty, environ: Mapping[str, str]) -> int | None:
    """Return the exit code of a run that ended in an earlier pod or container; None if the run has not ended."""
    if duty.run_dir.is_sealed:
        return 0
    # if the head pod disappears before KubeRay sees that the job has ended, KubeRay starts a new head pod
    end = _read_own(duty.run_dir.pod_end, environ) if duty.is_kuberay else None
    return None if end is None else int(end["exit_code"])


def _is_replaced(duty: Duty, environ: Mapping[str, str], stop: Stop) -> bool:
    """Count how often the cluster took the leading pod away; return whether a new leading pod continues the run."""
    if stop.signal is not signal.SIGTERM or duty.run_dir.is_sealed:
        return False
    losses = _read_own(duty.run_dir.pod_losses, environ)
    num_losses = 1 if losses is None else int(losses["count"]) + 1
    group = environ.get(GROUP_VARIABLE, "")
    write_json(duty.run_dir.pod_losses, {"schema": SCHEMA, "group": group, "count": num_losses})
    return num_losses <= duty.num_restarts


def _read_own(path: Path, environ: Mapping[str, str]) -> Mapping[str, Any] | None:
    # a head of an earlier Ray cluster may have written the file, for example before a suspension
    value: Mapping[str, Any] | None = load_json(path, schema=SCHEMA) if path.is_file() else None
    return value if value is not None and value.get("group") == environ.get(GROUP_VARIABLE, "") else None


def _gather(duty: Duty, seat: PodSeat, stop: Stop, notes: Notes, number: int) -> Roster | None:
    gathering = Gathering(duty.run_dir, seat, duty.num_nodes, number)
    until = time.monotonic() + GATHER_S
    while (roster := gathering.look()) is None:
        notes.write(waits_for=f"{gathering.num_missing} of {duty.num_nodes} pods")
        if time.monotonic() >= until:
            raise EnvironmentMissing(Problem("pods", f"{gathering.num_missing} pods did not join within {GATHER_S:g} s",
                                             expected=f"{duty.num_nodes}"))  # fmt: skip
        if stop.wait(LOOK_S):
            return None
    notes.write(waits_for="")
    if number:
        duty.run_dir.bundle.unlink(missing_ok=True)
    return roster


def _wait_for(agent: Guarded, stop: Stop, ray: Guarded | None) -> int:
    is_asked = False
    while (code := agent.code) is None:
        is_over = stop.wait(LOOK_S) or (ray is not None and ray.code is not None)
        if is_over and not is_asked:
            is_asked = agent.ask_command()
            if is_asked and ray is not None and ray.code is not None:
                sys.stderr.write(f"Ray ended with exit code {ray.code}\n")
        if is_over:
            time.sleep(LOOK_S)
    agent.release()
    return code if code >= 0 else 128 - code


def _hold(duty: Duty, stop: Stop) -> None:
    """Wait until the logs are read and the bundle is collected; without a volume, both are lost with the pod."""
    if duty.hold_s:
        stop.wait(duty.hold_s)
    until = time.monotonic() + LAST_LINES_S
    while is_followed(duty.run_dir) and time.monotonic() < until and not stop.wait(LOOK_S):
        pass


def _stay_for_operator(stop: Stop, ray: Guarded | None) -> None:
    """Wait until KubeRay ends this pod, because KubeRay replaces a head pod that ends by itself."""
    while ray is not None and ray.code is None and not stop.wait(LOOK_S * 5):
        pass


def _tell_end(run_dir: RunDir, environ: Mapping[str, str], code: int) -> int:
    pod, group = environ.get(UID_VARIABLE, ""), environ.get(GROUP_VARIABLE, "")
    write_json(run_dir.pod_end, {"schema": SCHEMA, "exit_code": code, "pod": pod, "group": group})
    return code


def _pack(run_dir: RunDir) -> str:
    try:
        pack(run_dir)
    except (RlkReproError, OSError) as error:
        sys.stderr.write(f"not packed: {error}\n")
        return str(error)
    return ""


def start_ray(environ: Mapping[str, str]) -> Guarded:
    """Start Ray with the exact command that KubeRay would have run in this container."""
    require_tokens()
    command = environ.get(RAY_COMMAND)
    if not command:
        raise EnvironmentMissing(Problem(RAY_COMMAND, "not set", expected=MAKER))
    if environ.get("RAY_AUTH_MODE") != "token" or not environ.get("RAY_AUTH_TOKEN"):
        what = "not set: anyone who reaches Ray's ports could run any code"
        raise EnvironmentMissing(Problem("RAY_AUTH_TOKEN", what, expected=MAKER))
    raise_file_limit()
    words = [os.path.expandvars(word) for word in shlex.split(command)]
    return Guarded(words, {**environ, **SETTINGS}, _STDERR)


def start_agent(run_dir: RunDir, node: str, roster: Roster, env: Mapping[str, str]) -> Guarded:
    argv = [sys.executable, "-m", "rlk_repro.job", str(run_dir.root), "--resume", "--node", node]
    argv += ["--nodes", ",".join(roster.nodes), "--allocation", roster.allocation]
    return Guarded(argv, env, _STDERR)
