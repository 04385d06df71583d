"""A newer Slurm than this machine's: the packages of Debian's next release in a root of their own.

The root has /usr, /etc and /var; all else, also the folders of the tests and their Python, is this machine's.  It is
made once, is never written to, and has a name made of what is in it: another list of packages is another root.
"""

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

from tests import ROOT
from tests.support.slurm.cluster import Cluster, start_cluster
from tests.support.slurm.runs import REQUIRED

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
