"""The real Dockerfile, built by a real buildah on a small stand-in of vime's image; pushed, pulled, carried, run by a
real Slurm.

Nothing is fetched from outside: base, repositories and registry are the test's own, on loopback.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.files import load_json, sha256_file
from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.record import parse_record
from rlk_repro.plan import Plan
from rlk_repro.replay.identity import read_identity
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Stack
from rlk_repro.submit import planning, sending
from tests.support.copied_package import ADDRESS, render_config
from tests.support.images import examples
from tests.support.images.examples import EPOCH, SITE, Engine, Upstream
from tests.support.make_run import verify_bundle
from tests.support.slurm.runs import SETTINGS, Run, Site

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

RECORD = "opt/rlk-repro/provenance.json"
# What the stand-in's torch cannot do: a real one for the trainer alone, and what that imports beyond the image's own.
TRAINER_PACKAGES = ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "filelock", "fsspec")
TRAINER_DIR = "/opt/trainer"


@dataclass(frozen=True)
class Workshop:
    """Everything that a build takes, ready."""

    engine: Engine
    folder: Path
    host: str
    upstream: Upstream
    base_digest: str
    context: Path

    @property
    def arguments(self) -> dict[str, str]:
        return {
            "BASE_NAME": f"{self.host}/vime",
            "BASE_DIGEST": self.base_digest,
            "STACK": "test",
            "IMAGE_PLATFORM": "cuda-amd64",
            "REVISION": "1" * 40,
            "SOURCE_DATE_EPOCH": EPOCH,
            "VIME_REPOSITORY": f"{self.upstream.url}/vime",
            "VIME_COMMIT": self.upstream.vime,
            "RL_KERNEL_REPOSITORY": f"{self.upstream.url}/rl-kernel",
            "RL_KERNEL_COMMIT": self.upstream.rl_kernel,
        }

    @property
    def stack(self) -> Stack:
        return Stack.model_validate(self.upstream.stack(f"{self.host}/vime", self.base_digest))

    def build(self, tag: str, **changed: str) -> str:
        """What the build says; it must end well unless ``tag`` is empty."""
        given = [f"--build-arg={name}={value}" for name, value in (self.arguments | changed).items()]
        done = self.engine.run(
            "buildah", "build", "--tls-verify=false", f"--timestamp={EPOCH}", f"--tag={tag or 'localhost/refused'}",
            *given, f"--file={self.context}/docker/Dockerfile.vime", self.context,
            check=bool(tag),
        )  # fmt: skip
        assert (done.returncode == 0) == bool(tag), done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout + done.stderr

    def mount(self, tag: str) -> Path:
        """The files of an image."""
        container = self.engine.run("buildah", "from", "--pull-never", tag).stdout.strip()
        return Path(self.engine.run("buildah", "mount", container).stdout.strip())

    def read_labels(self, tag: str) -> dict[str, str]:
        done = self.engine.run("podman", "image", "inspect", "--format", "{{json .Config.Labels}}", tag)
        labels: dict[str, str] = json.loads(done.stdout)
        return labels

    def push(self, tag: str, repository: str) -> tuple[str, str]:
        """Its name and digest in the registry."""
        where, digest = f"{self.host}/{repository}", self.folder / f"{repository}.digest"
        self.engine.run(
            "skopeo", "copy", "--quiet", f"--digestfile={digest}", f"containers-storage:{tag}", f"docker://{where}:test"
        )
        return where, digest.read_text().strip()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    examples.require_tools()
    folder = tmp_path_factory.mktemp("images")
    (folder / "git").mkdir()
    try:
        with examples.registry(folder / "registry") as host, examples.git_server(folder / "git") as url:
            engine = Engine.make(folder / "engine", host)
            base = examples.make_base(engine, folder / "base", render_config(url))
            # to compress the base takes longer than its way over loopback
            pushed = ("--quiet", "--disable-compression", f"--digestfile={folder}/digest")
            engine.run("buildah", "push", *pushed, base, f"docker://{host}/vime")
            digest = (folder / "digest").read_text().strip()
            upstream = Upstream.make(folder / "git", ADDRESS)
            stack = upstream.stack(f"{host}/vime", digest)
            context = examples.make_context(folder / "context", stack)
            yield Workshop(engine, folder, host, upstream, digest, context)
    finally:
        examples.unmount_below(folder)
        shutil.rmtree(folder, ignore_errors=True)  # gigabytes


@pytest.fixture(scope="module")
def built(workshop: Workshop) -> Workshop:
    workshop.build("localhost/ours")
    return workshop


@pytest.fixture
def tools(workshop: Workshop, no_real_tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands under test find the engine of the test."""
    for name, value in workshop.engine.variables.items():
        monkeypatch.setenv(name, value)


def files_of(root: Path) -> dict[str, str]:
    """sha256 by path of every file."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(root)): sha256_file(path) for path in files}


def check(built: Workshop, tag: str) -> list[str]:
    """Where the image's own check finds something."""
    words = ("python3", "-P", "-m", "rlk_repro.image_check", "--stack", "test", "--json")
    done = built.engine.run("podman", "run", "--rm", "--network=none", "--entrypoint=", tag, *words, check=False)
    found = json.loads(done.stdout)
    assert (done.returncode == 0) is found["is_ok"], done.stderr
    return [item["where"] for item in found["findings"]]


def test_the_image_has_a_record_of_its_content(built: Workshop) -> None:
    assert check(built, "localhost/ours") == []
    record = parse_record((built.mount("localhost/ours") / RECORD).read_bytes())
    kernels: Any = record.code["rl_kernel"]
    assert kernels["extension_architectures"] == ["sm_100", "sm_80", "sm_90", "sm_90a"]
    assert record.commits["vime"] == built.upstream.vime
    assert record.base.digest == built.base_digest
    assert record.added_packages == ()
    labels = built.read_labels("localhost/ours")
    assert labels["rlk-repro.rl-kernel.commit"] == built.upstream.rl_kernel
    assert labels["org.opencontainers.image.base.digest"] == built.base_digest


@pytest.mark.long
def test_the_same_inputs_give_the_same_files(built: Workshop) -> None:
    built.build("localhost/again")
    first, second = built.mount("localhost/ours"), built.mount("localhost/again")
    records = [json.loads((root / RECORD).read_text()) for root in (first, second)]
    for record in records:  # the compiler gives names of its own to every build
        del record["digest"], record["code"]["rl_kernel"]["extension_sha256"]
    assert records[0] == records[1]
    differing = dict(files_of(first).items() ^ files_of(second).items())
    assert set(differing) <= {RECORD}


def test_the_command_is_ours_and_submit_is_answered_without_a_scheduler(built: Workshop) -> None:
    words = ("rlk-repro", "submit", "--run", "qwen3-4b", "--cluster", "slurm")
    done = built.engine.run("podman", "run", "--rm", "--network=host", "localhost/ours", *words, check=False)
    assert done.returncode == 2, done.stderr
    assert "this machine has no sbatch" in done.stderr
    # newer RL-Kernel declares a command of this name
    root = built.mount("localhost/ours")
    assert "from rlk_repro.cli import main" in (root / "usr/local/bin/rlk-repro").read_text()
    assert "rlk-repro" not in (root / f"{SITE}/rl_kernel-0.1.0.dist-info/entry_points.txt").read_text()


def make_profile(folder: Path, engine: Engine) -> Path:
    """Of the tests' Slurm.  The trainer alone finds the real torch: what the agent sees is the image."""
    mounts = []
    for name in TRAINER_PACKAGES:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        source = Path(str(spec.origin)).parent
        mounts.append({"source": str(source), "target": f"{TRAINER_DIR}/{name}", "read_only": True})
    value = {
        "profile": "here",
        "cluster": "slurm",
        "hardware": "cpu",
        "slurm": {
            "gres": "none",
            "stop_before_s": 60,
            "setup": [f"export {name}='{text}'" for name, text in engine.variables.items() if name != "PATH"],
        },
        "container": {"runtime": "podman", "mounts": mounts},
        "env": {"PYTHONPATH": TRAINER_DIR},
        "preflight": {"min_free_disk_gib": 0.01, "min_free_memory_gib": 0.01},
    }
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def submit(site: Site, built: Workshop, stack: Path) -> Run:
    """The smoke run, one pair of which the second trial has to use the RL-Kernel of the image."""
    request = planning.Request(
        run="smoke", cluster="slurm", profile=str(make_profile(site.folder, built.engine)), stack=str(stack),
        settings=(*SETTINGS, "rl_kernel.mode=require", "rl_kernel.ops=[logp]"), is_exploratory=True,
    )  # fmt: skip
    return Run(site=site, launched=sending.submit(planning.prepare(request)))


def make_published(built: Workshop, folder: Path) -> tuple[Path, str]:
    """A stack whose image, for machines without GPUs, is in the registry; the image's digest."""
    where, digest = built.push("localhost/ours", "on-slurm")
    stack = built.upstream.stack(f"{built.host}/vime", built.base_digest) | {
        "unpublished": {},
        "images": {"cpu": {"reference": where, "digest": digest}},
    }
    path = folder / "stack.yaml"
    path.write_text(yaml.safe_dump(stack, sort_keys=False))
    return path, digest


def read_findings(run_dir: RunDir) -> list[Finding]:
    (node,) = run_dir.node_dirs()
    return [Finding.from_json(item) for item in load_json(node.preflight)["findings"]]


def test_slurm_runs_the_published_image(built: Workshop, tools: None, site: Site) -> None:
    stack, digest = make_published(built, site.folder)
    run = submit(site, built, stack)
    assert run.wait_for_end().reason == "sealed, 2 of 2 trials ok", run.tail()
    assert verify_bundle(run.collect()) == []
    (node,) = run.run_dir.node_dirs()
    sections = load_json(node.manifest)["sections"]
    assert (sections["container"]["runtime"], sections["container"]["image_digest"]) == ("podman", digest)
    record = parse_record((built.mount("localhost/ours") / RECORD).read_bytes())
    assert sections["code"]["packages"] == record.code["packages"]
    assert [finding for finding in read_findings(run.run_dir) if finding.level is Level.BLOCKING] == []
    ((implementation, version),) = read_identity(run.run_dir, Plan.load(run.run_dir.plan)).decisions["logp"]
    assert implementation == "NativeLogpOp"
    assert built.upstream.rl_kernel[:12] in version
    run.wait_for_script()
    assert built.engine.run("podman", "ps", "--all", "--quiet").stdout == ""


# Ways to make an image mean less, and who refuses: the build, or the check of the image.


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BASE_DIGEST", "latest", "invalid reference format"),
        ("VIME_COMMIT", "2" * 40, "the repository does not have this commit (any more)"),
    ],
)
def test_what_moves_or_is_gone_is_refused(built: Workshop, name: str, value: str, said: str) -> None:
    assert said in built.build("", **{name: value})
