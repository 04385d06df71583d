"""The real Dockerfile, built by a real buildah on a small stand-in of vime's image; pushed, pulled, carried, run by a
real Slurm.

Nothing is fetched from outside: base, repositories and registry are the test's own, on loopback.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlk_repro.base.files import load_json, sha256_file
from rlk_repro.base.findings import Finding, Level
from rlk_repro.clusters.api import JobState
from rlk_repro.images.record import parse_record
from rlk_repro.plan import Plan
from rlk_repro.replay.identity import read_identity
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import Stack
from rlk_repro.submit import planning, sending
from tests import ROOT
from tests.support.copied_package import ADDRESS, make_wheel, render_config
from tests.support.images import examples
from tests.support.images.examples import EPOCH, SITE, Engine, Upstream, list_differences
from tests.support.make_run import verify_bundle
from tests.support.probe_examples import write_tree
from tests.support.slurm.runs import SETTINGS, Run, Site

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

Call = Callable[..., tuple[int, str, str]]
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

    def build(self, tag: str, *, context: Path | None = None, **changed: str) -> str:
        """What the build says; it must end well unless ``tag`` is empty."""
        given = [f"--build-arg={name}={value}" for name, value in (self.arguments | changed).items()]
        done = self.engine.run(
            "buildah", "build", "--tls-verify=false", f"--timestamp={EPOCH}", f"--tag={tag or 'localhost/refused'}",
            *given, f"--file={context or self.context}/docker/Dockerfile.cuda", context or self.context,
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

    def change(self, tag: str, *words: str) -> None:
        """A container of the image, changed by ``buildah run`` or ``config``, as an image of its own."""
        container = self.engine.run("buildah", "from", "localhost/ours").stdout.strip()
        self.engine.run(
            "buildah", words[0], *([container, "--", *words[1:]] if words[0] == "run" else [*words[1:], container])
        )
        self.engine.run("buildah", "commit", "--quiet", "--rm", container, tag)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    examples.require_tools()
    folder = tmp_path_factory.mktemp("images")
    (folder / "git").mkdir()
    with examples.registry(folder / "registry") as host, examples.git_server(folder / "git") as url:
        engine = Engine.make(folder / "engine", host)
        base = examples.make_base(engine, folder / "base", render_config(url))
        engine.run("buildah", "push", "--quiet", f"--digestfile={folder}/digest", base, f"docker://{host}/vime")
        digest = (folder / "digest").read_text().strip()
        upstream = Upstream.make(folder / "git", ADDRESS)
        stack = upstream.stack(f"{host}/vime", digest)
        other = upstream.stack(f"{host}/vime", digest, name="other")
        context = examples.make_context(folder / "context", {"test": stack, "other": other})
        yield Workshop(engine, folder, host, upstream, digest, context)
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


def check(call: Call, tag: str, stack: Path) -> list[str]:
    """Where ``images check`` finds something."""
    code, out, error = call("images", "check", tag, "--runtime", "podman", "--stack", str(stack), "--json")
    found = json.loads(out)
    assert (code == 0) is found["is_ok"], error
    return [item["where"] for item in found["findings"]]


def write_stack(built: Workshop, folder: Path, name: str = "test") -> Path:
    path = folder / f"{name}.yaml"
    stack = built.upstream.stack(f"{built.host}/vime", built.base_digest, name=name)
    path.write_text(yaml.safe_dump(stack, sort_keys=False))
    return path


def test_the_image_has_a_record_of_its_content(built: Workshop, tools: None, call: Call, tmp_path: Path) -> None:
    assert check(call, "localhost/ours", write_stack(built, tmp_path)) == []
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
    assert list_differences(*records) == []
    differing = dict(files_of(first).items() ^ files_of(second).items())
    assert set(differing) <= {RECORD}


def test_submit_is_answered_in_a_container_without_a_scheduler(built: Workshop) -> None:
    words = ("rlk-repro", "submit", "--run", "qwen3-4b", "--cluster", "slurm")
    done = built.engine.run("podman", "run", "--rm", "--network=host", "localhost/ours", *words, check=False)
    assert done.returncode == 2, done.stderr
    assert "this machine has no sbatch" in done.stderr


def test_our_command_stays_ours(built: Workshop) -> None:
    root = built.mount("localhost/ours")
    assert "from rlk_repro.cli import main" in (root / "usr/local/bin/rlk-repro").read_text()
    assert "rlk-repro" not in (root / f"{SITE}/rl_kernel-0.1.0.dist-info/entry_points.txt").read_text()


def test_an_image_is_published_pulled_and_checked(built: Workshop, tools: None, call: Call, tmp_path: Path) -> None:
    where, digest = built.push("localhost/ours", "rlk-repro")
    stack, published = write_stack(built, tmp_path), tmp_path / "published.yaml"
    code, _, error = call("images", "pull", "--stack", str(stack))
    assert (code, "rlk-repro images build --stack test --platform cuda-amd64" in error) == (2, True)
    code, out, _ = call("images", "pin", str(stack), "--image", f"cuda-amd64={where}@{digest}", "-o", str(published))
    assert code == 0, out
    assert f"+    digest: {digest}" in out
    code, out, _ = call("images", "list", str(published), "--size", "--json")
    assert json.loads(out)["images"][0]["status"] == "published"
    assert json.loads(out)["images"][0]["size_bytes"] > 1_000_000
    code, out, error = call("images", "pull", "--stack", str(published), "--runtime", "podman")
    assert (code, out) == (0, f"{where}@{digest}: matches its record\n"), error
    assert check(call, f"{where}@{digest}", published) == []


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


def make_published(built: Workshop, folder: Path, name: str = "test") -> tuple[Path, str]:
    """A stack whose image, for machines without GPUs, is in the registry; the image's digest."""
    where, digest = built.push("localhost/ours", "on-slurm")
    stack = built.upstream.stack(f"{built.host}/vime", built.base_digest, name=name) | {
        "unpublished": {},
        "images": {"cpu": {"reference": where, "digest": digest}},
    }
    path = folder / "stack.yaml"
    path.write_text(yaml.safe_dump(stack, sort_keys=False))
    return path, digest


def read_findings(run_dir: RunDir) -> list[Finding]:
    (node,) = run_dir.node_dirs()
    return [Finding.from_json(item) for item in load_json(node.preflight)["findings"]]


def test_slurm_runs_the_published_image(built: Workshop, tools: None, call: Call, site: Site) -> None:
    stack, digest = make_published(built, site.folder)
    code, _, error = call("images", "pull", "--stack", str(stack), "--runtime", "podman")
    assert code == 0, error
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


@pytest.mark.long
def test_slurm_runs_no_image_of_another_stack(built: Workshop, tools: None, site: Site) -> None:
    stack, _ = make_published(built, site.folder, name="other")
    run = submit(site, built, stack)
    assert run.wait_for_end().state is JobState.FAILED
    blocking = [finding for finding in read_findings(run.run_dir) if finding.level is Level.BLOCKING]
    assert [(finding.where, finding.expected, finding.found) for finding in blocking] == [
        ("image.stack", "other", "test")
    ]
    assert list(run.run_dir.trials.iterdir()) == []
    run.wait_for_script()


# Ways to make an image mean less, and who refuses: the build, or the check of the image.


def test_packages_of_a_lock_are_installed_and_a_changed_hash_stops_the_build(
    workshop: Workshop, tmp_path: Path
) -> None:
    """The half of docker/Dockerfile.locked that installs packages, on two small ones; the whole is built by hand."""
    wheels = [make_wheel(tmp_path / "wheels", name, "1.0") for name in ("nvidia_tiny", "tiny")]
    hashes = [sha256_file(wheel) for wheel in wheels]
    text = "\n\n".join((ROOT / "docker/Dockerfile.locked").read_text().split("\n\n")[:2])
    write_tree(tmp_path, {"Dockerfile": text, "pip.conf": "[global]\nno-index = true\nfind-links = /mnt\n"})

    def build(*expected: str) -> subprocess.CompletedProcess[str]:
        lines = [f"{name}==1.0 --hash=sha256:{value}  # 1\n"
                 for name, value in zip(("nvidia-tiny", "tiny"), expected, strict=True)]  # fmt: skip
        write_tree(tmp_path, {"context/requirements/test-cuda-amd64.txt": "".join(lines)})
        given = [f"--build-arg={name}={value}" for name, value in workshop.arguments.items()]
        mounts = [f"--volume={tmp_path}/wheels:/mnt:ro", f"--volume={tmp_path}/pip.conf:/etc/pip.conf:ro"]
        return workshop.engine.run(
            "buildah", "build", "--layers", "--tls-verify=false", f"--timestamp={EPOCH}", "--tag=localhost/slim",
            *given, *mounts, f"--file={tmp_path}/Dockerfile", tmp_path / "context", check=False,
        )  # fmt: skip

    done = build(*hashes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    names = {path.parent.name for path in workshop.mount("localhost/slim").rglob("*tiny/__init__.py")}
    assert names == {"nvidia_tiny", "tiny"}
    refused = build(hashes[0], "0" * 64)
    assert refused.returncode != 0
    assert "tiny==1.0 from file:///mnt/tiny-1.0-py3-none-any.whl" in refused.stdout + refused.stderr


def test_a_base_by_tag_is_refused(built: Workshop) -> None:
    assert "invalid reference format" in built.build("", BASE_DIGEST="latest")


def test_a_commit_that_is_gone_is_refused(built: Workshop) -> None:
    said = built.build("", VIME_COMMIT="2" * 40)
    assert "not our ref" in said
    assert "the repository does not have this commit (any more)" in said


def test_other_architectures_are_refused(built: Workshop) -> None:
    said = built.build("", RL_KERNEL_ARCHITECTURES="90")
    expected = "got 'sm_90, sm_90a', expected sm_100, sm_80, sm_90, sm_90a"
    assert f"rl_engine._C architectures: is not what the stack needs, {expected}" in said


def test_a_lost_label_is_found(built: Workshop, tools: None, call: Call, tmp_path: Path) -> None:
    built.change("localhost/unlabelled", "config", "--label", "rlk-repro.vime.commit-")
    assert check(call, "localhost/unlabelled", write_stack(built, tmp_path)) == ["label rlk-repro.vime.commit"]


@pytest.mark.long
def test_a_carefully_edited_record_is_found_by_the_files_that_it_describes(
    built: Workshop, tools: None, call: Call
) -> None:
    words = ("import json; from pathlib import Path; from rlk_repro.images.record import digest_of; "
             f"p = Path('/{RECORD}'); v = json.loads(p.read_text()); v['code']['packages']['torch'] = '9'; "
             "v['code']['rl_kernel']['extension_sha256'] = '0' * 64; v['digest'] = digest_of(v); "
             "p.write_text(json.dumps(v))")  # fmt: skip
    built.change("localhost/forged", "run", "python3", "-c", words)
    code, out, _ = call("images", "check", "localhost/forged", "--runtime", "podman")
    assert code == 1
    assert "packages.torch: expected 9, found 2.11.0+cu129" in out
    assert "code.rl_kernel.extension_sha256" in out


def test_an_image_of_another_stack_is_found(built: Workshop, tools: None, call: Call, tmp_path: Path) -> None:
    assert check(call, "localhost/ours", write_stack(built, tmp_path, "other")) == ["image.stack"]
