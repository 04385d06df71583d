"""What needs a newer Slurm than 22.05, on a real 24.11: segments, GPUs that are devices; and a chain of jobs on it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base.errors import SchedulerRefused
from rlk_repro.bundle.verify import open_verified
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec.load import load_profile
from tests import ROOT
from tests.clusters import test_sbatch_real as scripts
from tests.support.make_run import verify_bundle
from tests.support.slurm.cluster import Cluster, start_cluster
from tests.support.slurm.examples import plan_for, with_site
from tests.support.slurm.runs import REQUIRED, SETTINGS, Site
from tests.support.two_node_agent import allow_nodes

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

NODES = ("node-0", "node-1", "node-2", "node-3")
BLOCKS = "BlockName=b0 Nodes=node-[0-1]\nBlockName=b1 Nodes=node-[2-3]\nBlockSizes=2\n"
# Stands for Python: what Slurm gave each node.
SHOW_GPUS = '#!/bin/sh\n[ "$3" = rlk_repro.job ] && echo "$CUDA_VISIBLE_DEVICES" > "$0.$SLURMD_NODENAME"\nexit 0\n'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm") / "c"
    with running_newer_cluster(folder, nodes=NODES, topology=BLOCKS) as running:
        yield running


def test_a_run_fills_two_segments_is_sealed_and_replays_and_one_segment_of_four_is_refused(
    call, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_nodes(monkeypatch)
    nodes = (*SETTINGS, "layouts.cpu.num_nodes=4")
    run = site.submit(nodes, block_size=2)
    assert run.wait_for_end().reason == "sealed, 2 of 2 trials ok"
    assert {node.path.name for node in run.run_dir.node_dirs()} == set(NODES)
    bundle = run.collect()
    assert verify_bundle(bundle) == []
    with open_verified(bundle) as (sealed, _):
        assert "SLURM_VERSION = 24.11." in sealed.scheduler_file("config").read_text()
        assert "BlockName=b0" in sealed.scheduler_file("topology").read_text()
        assert "#SBATCH --segment=2\n" in (sealed.job / "job.sbatch").read_text()
    code, out, err = call("replay", str(bundle), "--analyze-only")
    assert (code, err) == (0, "")
    assert "the analysis is reproduced byte for byte" in out
    with pytest.raises(SchedulerRefused, match="Requested node configuration is not available"):
        site.submit(nodes, block_size=4)


def test_a_job_sees_the_gpus_that_it_asked_for_and_others_are_refused(site: Site) -> None:
    python = scripts.write_python(site.folder / "python", SHOW_GPUS)
    container = {"runtime": "host", "python": str(python)}
    slurm = {"gres": "gpu:a100", "exclusive": False, "stop_before_s": 60}
    one, three = (
        plan_for("smoke", "a100", settings=(f"layouts.a100={{num_nodes: 1, gpus_per_node: {gpus}}}",))
        for gpus in (1, 3)
    )
    run_dir = RunDir(site.folder / "run")
    job_id = scripts.submit(site.cluster, with_site(one, slurm=slurm, container=container), run_dir)
    scripts.wait_for_end(site.cluster, job_id)
    (found,) = site.folder.glob("python.node-*")
    assert found.read_text() == "0\n", run_dir.job_output(job_id).read_text()
    with pytest.raises(AssertionError, match="Requested node configuration is not available"):
        scripts.submit(site.cluster, with_site(three, slurm=slurm), RunDir(site.folder / "other"))


def test_the_cluster_is_described_with_its_blocks_and_takes_the_job(call, site: Site) -> None:
    path = site.folder / "proposed.yaml"
    code, _, err = call("profile", "init", "--yes", "-o", str(path))
    assert code == 0, err
    found = load_profile(str(path), []).model.slurm
    assert found is not None
    assert (found.gres, found.block_size) == ("gpu:a100", 2)
    code, out, _ = call("profile", "check", str(path), "--run", "smoke")
    assert code == 0, out
    assert "info: sbatch --test-only: expected accepted, found Job " in out


# A newer Slurm than this machine's: the packages of Debian's next release in a root of their own.


SUITE = "trixie"
SLURM = ("slurmctld", "slurmd", "slurm-client", "munge")
# what a Python that was built on this machine may be linked with
LIBRARIES = ("libbz2-1.0", "libffi8", "liblzma5", "libncursesw6", "libreadline8t64", "libsqlite3-0", "libssl3t64",
             "zlib1g")  # fmt: skip
UNWANTED = ("doc", "info", "locale", "man")
# These are the root's own, as are links into them; of /etc the names of users and hosts are this machine's.
OWN = frozenset({"bin", "boot", "etc", "lib", "lib32", "lib64", "libx32", "sbin", "usr", "var"})
NAMES = ("group", "hosts", "passwd", "resolv.conf")
# Its own mounts end with the process: nothing is left on this machine.
ENTER = """\
set -eu
root=$1 own=$2
shift 2
mount -t tmpfs rlk-repro-root "$own"
mkdir "$own/upper" "$own/work" "$own/root"
mount -t overlay -o "lowerdir=$root,upperdir=$own/upper,workdir=$own/work" rlk-repro-root "$own/root"
for path in "$@"; do
  [ -d "$path" ] && mkdir -p "$own/root$path" || : >>"$own/root$path"
  mount --rbind "$path" "$own/root$path"
done
mkdir "$own/root/old"
cd "$own/root"
pivot_root . old
umount -l /old
echo ready
exec sleep infinity
"""


@contextlib.contextmanager
def running_newer_cluster(folder: Path, *, topology: str, **options: Any) -> Iterator[Cluster]:
    """With the blocks of ``topology``.  Where a Slurm is required, so is this one; elsewhere what stands in its way
    skips the tests.
    """
    obstacle = _find_obstacle()
    if obstacle:
        assert not os.environ.get(REQUIRED), obstacle
        pytest.skip(obstacle)
    with _entered(make_root(), folder.with_name(f"{folder.name}-root")) as enter:
        folder.mkdir(parents=True)
        (folder / "topology.conf").write_text(topology)
        cluster = start_cluster(folder, enter=enter, site_lines="TopologyPlugin=topology/block\n", **options)
        try:
            yield cluster
        finally:
            cluster.close()


def make_root() -> Path:
    """Make it, or take the one of an earlier run."""
    wanted = "\n".join((SUITE, *SLURM, *LIBRARIES, *UNWANTED))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlk-repro-tests"
    root = cache / f"slurm-{SUITE}-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            partial = root.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            options = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in UNWANTED]
            subprocess.run(["mmdebstrap", "--quiet", "--variant=essential", "--mode=root", *options,
                            f"--include={','.join((*SLURM, *LIBRARIES))}", SUITE, partial], check=True)  # fmt: skip
            partial.rename(root)
    return root


def _find_obstacle() -> str:
    missing = [name for name in ("mmdebstrap", "nsenter", "pivot_root", "unshare") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not Path("/usr/share/keyrings/debian-archive-keyring.gpg").is_file():
        return "not installed: debian-archive-keyring"
    if os.geteuid() != 0:
        return "needs root, as mounting does"
    hidden = {Path(path).parts[1] for path in (ROOT, sys.prefix, sys.base_prefix)} & OWN
    return f"the tests or their Python lie in /{', /'.join(sorted(hidden))}: the root has its own" if hidden else ""


@contextlib.contextmanager
def _entered(root: Path, own: Path) -> Iterator[tuple[str, ...]]:
    """The words that start a program in it; this machine's folders are at their own paths there."""
    own.mkdir(parents=True)
    shared = [str(path) for path in sorted(Path("/").iterdir())
              if path.name not in OWN and path.is_dir() and not path.is_symlink()]  # fmt: skip
    names = [f"/etc/{name}" for name in NAMES if Path(f"/etc/{name}").is_file()]
    command = ["unshare", "--mount", "sh", "-c", ENTER, "enter", str(root), str(own), *shared, *names]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n", "the root cannot be entered"
            yield ("nsenter", f"--target={holder.pid}", "--mount")
        finally:
            holder.kill()
