"""A real Slurm on this machine: munged, slurmctld and two slurmd with fake GPUs, on loopback, in one folder.

``start_cluster`` starts it, its ``close`` ends every process it started.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlk_repro.base.procfs import read_stat
from tests.support.waiting import find_ports

PROGRAMS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "sacct", "sacctmgr", "salloc")
PACKAGES = "slurmctld slurmd slurm-client munge"
ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")
ACCOUNTING_PACKAGES = "slurmdbd mariadb-server"
SBIN = "/usr/sbin:/usr/local/sbin:/sbin"
NODES = ("node-0", "node-1")
GPUS_PER_NODE = 2
CPUS_PER_NODE = 4
START_S = 30.0

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
MpiDefault=none
GresTypes=gpu
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout_s}
KillWait=30
MinJobAge={min_job_age_s}
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n.spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=1-0 State=UP
PartitionName=short Nodes=ALL MaxTime=10 State=UP
{extra}
"""

_ENFORCING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos
JobAcctGatherType=jobacct_gather/none
"""

_DBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={db_port}
StorageUser=slurm
StoragePass=only-on-loopback
StorageLoc=slurm
"""

_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'only-on-loopback';
GRANT ALL ON slurm.* TO slurm@'127.0.0.1';
"""


def find_missing(*, has_accounting: bool = False) -> str | None:
    """Why no Slurm can be started here, or None."""
    path = f"{os.environ['PATH']}:{SBIN}"
    programs = PROGRAMS + (ACCOUNTING_PROGRAMS if has_accounting else ())
    packages = f"{PACKAGES} {ACCOUNTING_PACKAGES}" if has_accounting else PACKAGES
    absent = [name for name in programs if shutil.which(name, path=path) is None]
    absent += [name for name in CLIENTS if not Path(f"/usr/bin/{name}").is_file()]
    return f"not installed: {', '.join(absent)} (apt-get install {packages})" if absent else None


@dataclass(kw_only=True)
class Cluster:
    """A running Slurm.  ``env`` is what its clients need; ``bin`` holds the real clients, for the front of PATH.

    ``enter`` stands before each of its programs, where these lie in a root of their own.
    """

    folder: Path
    nodes: tuple[str, ...] = NODES
    enter: tuple[str, ...] = ()
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.conf), "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    def ask(self, *argv: str, check: bool = True) -> str:
        """Standard output of a client."""
        env = {**os.environ, **self.env}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.conf))
        self.wait_until(lambda: "is UP" in self.ask("scontrol", "ping", check=False), "slurmctld answers")

    def stop_controller(self) -> None:
        """It writes down what it knows.  Killed, it would have lost the newest jobs and given their numbers again."""
        process = self.processes.pop("slurmctld")
        process.terminate()
        process.wait(START_S)

    def revive_controller(self) -> bool:
        """Start it again where it died by itself, as 22.05 may when a job restarts at once on its old node."""
        if self.processes["slurmctld"].poll() is None:
            return False
        self.start_controller()
        return True

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def wait_for_nodes(self) -> None:
        self.wait_until(lambda: set(self.node_states().values()) == {"idle"}, "all nodes are idle")

    def node_states(self) -> dict[str, str]:
        lines = self.ask("sinfo", "-N", "-h", "-p", "gpu", "-o", "%N|%T").splitlines()
        return dict(line.split("|") for line in lines)

    def job_field(self, job_id: str, letter: str) -> str:
        return self.ask("squeue", "-h", "-t", "all", "-j", f"{job_id},{job_id}", "-o", letter).strip()

    def kill(self, name: str) -> None:
        """As if the power had gone: the daemon alone, at once."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def kill_node(self, node: str) -> None:
        """The daemon and everything that ran below its job steps."""
        steps = _find_steps(self.folder, node)
        self.kill(node)
        for pid in [found for step in steps for found in [step, *_find_below(step)]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_until(self, is_so: object, what: str, timeout_s: float = START_S) -> None:
        assert callable(is_so)
        until = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < until, f"never: {what}\n{self.tail()}"
            time.sleep(0.1)

    def tail(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    def resume(self) -> None:
        """Take back what made nodes drain."""
        away = [node for node, state in self.node_states().items() if "drain" in state]
        if away:
            self.ask("scontrol", "update", f"nodename={','.join(away)}", "state=resume")

    def clear(self) -> None:
        """Cancel every job and wait until none is left.  What ends by itself is waited for: scancel takes longer."""
        with contextlib.suppress(AssertionError):
            self.wait_until(lambda: not self.ask("squeue", "-h").strip(), "no job is left", 2)
            return
        self.ask("scancel", "--signal=KILL", "--full", "--user", getpass.getuser(), check=False)
        self.ask("scancel", "--user", getpass.getuser(), check=False)
        self.wait_until(lambda: not self.ask("squeue", "-h").strip(), "no job is left", 60)

    def find_leftovers(self) -> list[int]:
        """Job steps that are still there, and whatever knows this cluster's configuration and is no daemon of it."""
        daemons = {process.pid for process in self.processes.values()}
        daemons |= {pid for daemon in daemons for pid in _find_below(daemon)}  # a newer slurmctld has a helper
        mark = f"SLURM_CONF={self.conf}".encode()
        found = [pid for node in self.nodes for pid in _find_steps(self.folder, node)]
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes() and pid not in daemons and pid != os.getpid():
                    found.append(pid)
        return sorted(set(found))

    def close(self) -> None:
        if "slurmctld" in self.processes:
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                self.clear()
        steps = [pid for node in self.nodes for pid in _find_steps(self.folder, node)]
        for pid in [found for step in steps for found in [*_find_below(step), step]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()

    def _start(self, name: str, *argv: str, env: Mapping[str, str] | None = None) -> None:
        environ = {**os.environ, "PATH": f"{os.environ['PATH']}:{SBIN}", **(env or {})}
        if env is None:
            environ.pop("SLURM_CONF", None)
        with (self.folder / f"{name}.out.log").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [*self.enter, *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )


def start_cluster(
    folder: Path,
    *,
    slurmd_timeout_s: int = 10,
    min_job_age_s: int = 300,
    has_accounting: bool = False,
    site_lines: str = "",
    nodes: tuple[str, ...] = NODES,
    enter: tuple[str, ...] = (),
) -> Cluster:
    """A Slurm whose nodes are idle; with accounting, account ``lab`` with the default QOS is what its user may use.

    ``site_lines`` are added to its configuration.
    """
    cluster = Cluster(folder=folder, nodes=nodes, enter=enter)
    for name in ("state", "bin", *(f"{node}.spool" for node in nodes)):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    _write_clients(cluster)
    ports = find_ports(3 + len(nodes))
    cluster.conf.write_text(
        _CONF.format(
            host=socket.gethostname(),
            port=ports[0],
            user=getpass.getuser(),
            folder=folder,
            nodes="\n".join(_describe_node(node, port) for node, port in zip(nodes, ports[3:], strict=True)),
            slurmd_timeout_s=slurmd_timeout_s,
            min_job_age_s=min_job_age_s,
            extra=site_lines + (_ENFORCING.format(port=ports[1], folder=folder) if has_accounting else ""),
        )
    )
    _write_gres(cluster)
    try:
        _start_munge(cluster)
        if has_accounting:
            _start_accounting(cluster, *ports[1:3])
        cluster.start_controller()
        for node in nodes:
            cluster.start_node(node)
        if has_accounting:
            for entry in (("account", "lab"), ("user", getpass.getuser(), "account=lab")):
                cluster.ask("sacctmgr", "--immediate", "add", *entry)
        cluster.wait_for_nodes()
    except BaseException:
        cluster.close()
        raise
    return cluster


def _describe_node(node: str, port: int) -> str:
    return (
        f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} "
        f"RealMemory=4000 Gres=gpu:a100:{GPUS_PER_NODE} State=UNKNOWN"
    )


def _write_clients(cluster: Cluster) -> None:
    for name in CLIENTS:
        client = cluster.bin / name
        if cluster.enter:
            client.write_text(f'#!/bin/sh\nexec {" ".join(cluster.enter)} --wdns="$PWD" /usr/bin/{name} "$@"\n')
            client.chmod(0o755)
        else:
            client.symlink_to(f"/usr/bin/{name}")


def _write_gres(cluster: Cluster) -> None:
    """Devices that are no devices: a file each, and a null device each for a Slurm that looks at them."""
    folder, lines = cluster.folder, []
    for node in cluster.nodes:
        for number in range(GPUS_PER_NODE):
            device = folder / f"{node}.gpu{number}"
            if cluster.enter:
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            else:
                device.touch()
        lines.append(f"NodeName={node} Name=gpu Type=a100 File={folder}/{node}.gpu[0-{GPUS_PER_NODE - 1}]")
    (folder / "gres.conf").write_text("\n".join(lines) + "\n")
    if cluster.enter:
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")


def _start_munge(cluster: Cluster) -> None:
    folder = cluster.folder
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    cluster._start(
        "munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
        f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed", "--num-threads=2",
    )  # fmt: skip
    cluster.wait_until((folder / "munge.socket").exists, "munged listens")


def _start_accounting(cluster: Cluster, port: int, db_port: int) -> None:
    folder, user = cluster.folder, getpass.getuser()
    (folder / "init.sql").write_text(_SQL)
    data = [f"--datadir={folder}/db", f"--user={user}"]
    install = ["mariadb-install-db", "--no-defaults", *data, "--auth-root-authentication-method=normal"]
    subprocess.run([*install, "--skip-test-db"], check=True, capture_output=True, timeout=120)
    cluster._start(
        "mariadbd", "mariadbd", "--no-defaults", *data, f"--socket={folder}/db.sock", f"--port={db_port}",
        "--bind-address=127.0.0.1", "--skip-name-resolve", f"--init-file={folder}/init.sql",
        f"--pid-file={folder}/db.pid", "--innodb-buffer-pool-size=64M",
    )  # fmt: skip
    cluster.wait_until((folder / "db.sock").exists, "the database listens")
    conf = folder / "slurmdbd.conf"
    conf.write_text(_DBD_CONF.format(folder=folder, host=socket.gethostname(), port=port, db_port=db_port, user=user))
    conf.chmod(0o600)
    cluster._start("slurmdbd", "slurmdbd", "-D", env={"SLURM_CONF": str(cluster.conf)})
    add = ("sacctmgr", "--immediate", "add", "cluster", "test")
    cluster.wait_until(lambda: "test" in cluster.ask(*add, check=False), "slurmdbd answers")


def _find_steps(folder: Path, node: str) -> list[int]:
    """The slurmstepd processes of a node; their title names node and job only, so the open files tell."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if not (entry / "comm").read_text().startswith("slurmstepd"):
                continue
            links = [str(link.readlink()) for link in (entry / "fd").iterdir()]
            if any(link.startswith(f"{folder}/{node}.") for link in links):
                found.append(int(entry.name))
    return found


def _find_below(pid: int) -> list[int]:
    """Descendants, children first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text()
            parents.setdefault(int(stat[stat.rfind(")") + 2 :].split()[1]), []).append(int(entry.name))
    children = [child for child in parents.get(pid, []) if read_stat(child) is not None]
    return [found for child in children for found in [*_find_below(child), child]]
