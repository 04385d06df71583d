"""The script that Slurm gets: its text, its quoting, and what is refused before anything is sent."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_repro.base.errors import SpecError
from rlk_repro.clusters.slurm.options import find_max_jobs, find_segment, time_limit_min
from rlk_repro.clusters.slurm.script import Directive, ShellLine, quote, render_sbatch
from rlk_repro.images.stacks import NOT_PUBLISHED
from rlk_repro.plan import Plan
from rlk_repro.rundir.paths import RunDir
from rlk_repro.spec import FromEnv, Profile
from tests.support.slurm.examples import HOSTILE, IMAGE_DIR, RUNTIMES, list_plans, plan_for, run_dir_of, with_site

WORDS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1)


TWO_NODES = ("layouts.h200={num_nodes: 2, gpus_per_node: 8}",)
UNSAYABLE = {"pyxis": " ,\n:", "docker": ',"', "apptainer": ',"'}


def check_script(paths: list[str], severity: str = "style") -> None:
    for path in paths:
        done = subprocess.run(["bash", "-n", path], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or "shellcheck"
    done = subprocess.run(
        [shellcheck, "--norc", f"--severity={severity}", *paths], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def options_of(plan: Plan, **arguments: Any) -> list[str]:
    script = render_sbatch(plan, run_dir_of(plan), **arguments)
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def refusal_of(plan: Plan, run_dir: RunDir | None = None, **arguments: Any) -> str:
    with pytest.raises(SpecError) as caught:
        render_sbatch(plan, run_dir or run_dir_of(plan), **arguments)
    return str(caught.value)


def test_every_kind_of_script_passes_bash_and_shellcheck(tmp_path: Path) -> None:
    kinds = [f"{hardware}.{runtime}" for hardware in ("h200", "mi300x") for runtime in RUNTIMES]
    kinds += ["h200", "h200.two-nodes", "gb200.two-nodes"]
    plans = {name: plan for name, plan in list_plans() if name in {f"smoke.{kind}" for kind in kinds}}
    assert len(plans) == len(kinds)
    for name, plan in plans.items():
        (tmp_path / name).write_text(render_sbatch(plan, run_dir_of(plan)))
    check_script(sorted(str(path) for path in tmp_path.iterdir()))


@given(WORDS)
def test_bash_reads_a_quoted_word_unchanged(words: list[str]) -> None:
    script = f"printf '%s\\0' {quote(words)} {quote(words[0])}"
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True)
    assert done.stdout.decode().split("\0")[:-1] == [*words, words[0]]


def test_a_value_of_an_unforeseen_type_is_a_bug() -> None:
    for value in (None, True, 1.5, b"x", {"a": "b"}, [1], [["x"]]):
        with pytest.raises(TypeError, match=r"no rule to quote|not a text"):
            quote(value)


def test_an_option_is_quoted_as_sbatch_reads_it() -> None:
    assert quote(Directive("--nodes=2")) == "--nodes=2"
    assert quote(Directive('--comment=a "b" \\ $(c) # d')) == '--comment="a \\"b\\" \\\\ $(c) # d"'
    assert quote(ShellLine("module load x && true")) == "module load x && true"
    with pytest.raises(ValueError, match="not one line"):
        quote(Directive("--comment=a\nrm -rf ."))


@pytest.mark.parametrize("runtime", ["host", *RUNTIMES])
def test_hostile_names_make_a_sound_script(runtime: str, tmp_path: Path) -> None:
    plan = plan_for(stack="host" if runtime == "host" else "example")
    allowed = [name for name in HOSTILE if not set(name) & set(UNSAYABLE.get(runtime, ""))]
    for name in ("".join(allowed), "-rf"):
        line = name.replace("\n", " ")  # what a profile may hold; a run directory may be called anything
        mounts = [{"source": f"/data/{line}", "read_only": True}]
        site = with_site(
            plan,
            slurm={"account": line.lstrip("-"), "setup": ["module load cuda"]},
            container={"runtime": runtime, "image_dir": f"/images/{line}", "package_dir": f"/code/{line}",
                       "python": line.lstrip("-"), "mounts": mounts},
        )  # fmt: skip
        (tmp_path / str(len(name))).write_text(render_sbatch(site, RunDir(Path("/runs") / name)))
    paths = [str(path) for path in tmp_path.iterdir()]
    check_script(paths, "warning")  # single quotes around a $( are what shellcheck informs of


def test_a_secret_is_named_and_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    plan = plan_for(stack="example")
    for runtime, phrase in {"pyxis": "--container-env=HF_TOKEN", "docker": "--env=HF_TOKEN", "podman": "--env=HF_TOKEN",
                            "apptainer": "for name in HF_TOKEN; do"}.items():  # fmt: skip
        site = with_site(plan, container={"runtime": runtime, "image_dir": IMAGE_DIR})
        values = {**site.profile.model_dump(by_alias=True), "env": {"TOKEN": FromEnv(from_env="HF_TOKEN")}}
        site = with_site(site, profile=Profile.model_validate(values))
        script = render_sbatch(site, run_dir_of(site))
        assert "hf_secret" not in script
        assert phrase in script
        assert "#SBATCH --export=HF_TOKEN\n" in script


def test_options_are_those_of_the_site() -> None:
    slurm = {"account": "lab", "partition": "gpu", "qos": "long", "gres": "gpu:h200", "exclusive": False,
             "requeue": False, "block_size": 18, "extra": ["--dependency=afterok:1", "--mail-type=END"]}  # fmt: skip
    plan = with_site(plan_for(settings=("layouts.h200={num_nodes: 24, gpus_per_node: 8}",)), slurm=slurm)
    options = options_of(plan)
    own = ["--account=lab", "--partition=gpu", "--qos=long", "--gres=gpu:h200:8", "--no-requeue", "--segment=12"]
    hash_of_plan = plan.plan_hash[:12]
    own += [f'--comment="rlk-repro 20261120T120000Z-0123abcd-4567 plan {hash_of_plan}"', "--time=110"]
    assert set(own) <= set(options)
    assert "--kill-on-invalid-dep=yes" in options, "the profile's extra options name a dependency"
    assert options[-2:] == ["--dependency=afterok:1", "--mail-type=END"]
    assert "--nodelist=n1,n7" in options_of(plan_for(settings=TWO_NODES), nodes=["n1", "n7"])


def test_a_segment_is_the_greatest_divisor_that_fits_into_a_rack() -> None:
    sizes = {1: None, 2: 2, 18: 18, 19: 1, 24: 12, 72: 18}
    assert {num_nodes: find_segment(num_nodes, 18) for num_nodes in sizes} == sizes
    assert find_segment(2, None) is None


def test_the_time_limit_is_1_5_times_the_estimate_and_at_least_one_pair() -> None:
    estimate = "expected_trial_minutes={h200: 3}"
    plan = plan_for(settings=(estimate,))
    assert time_limit_min(plan) == 1.5 * 12 * 3 + 45 + 5
    assert time_limit_min(plan_for(settings=(estimate, "lane=train-only"))) == 1.5 * 12 * 3 + 6 * 5 + 45 + 5
    assert time_limit_min(plan_for()) == 2 * 5 + 45 + 5
    assert time_limit_min(with_site(plan_for(), slurm={"max_time_min": 50.0})) == 50
    # each limit where nothing is estimated or the job cannot go on
    every = 12 * 5 + 45 + 5
    assert time_limit_min(plan_for(settings=("expected_trial_minutes={cpu: 1}",))) == every
    fixed = with_site(plan_for(), slurm={"requeue": False})
    assert (time_limit_min(fixed), find_max_jobs(fixed), find_max_jobs(plan_for())) == (every, 1, 6)
    sessions = plan_for(settings=("measure.design=crossover", "measure.sessions=3", "lane=train-only"))
    assert find_max_jobs(with_site(sessions, slurm={"max_time_min": 30.0})) == 3 + 1


def test_a_job_time_of_the_command_line_is_the_profile_s(call) -> None:
    flags = ("submit", "smoke", "--profile", "generic-h200", "--stack", "example", "--dry-run", "--json")
    code, out, err = call(*flags, "--cluster", "slurm", "--max-job-time", "50m")
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert shown["plan"]["profile"]["slurm"]["max_time_min"] == 50
    assert shown["plan"]["sources"]["profile.slurm.max_time_min"] == "--max-job-time"
    assert "#SBATCH --time=50\n" in shown["job"]["files"]["job.sbatch"]
    plain = json.loads(call(*flags, "--cluster", "slurm")[1])["plan"]
    assert plain["experiment_hash"] == shown["plan"]["experiment_hash"]
    for words, answer in {
        ("--cluster", "slurm", "--max-job-time", "soon"): "--max-job-time: not a time, got 'soon'",
        ("--cluster", "slurm", "--max-job-time", "2m"): "is shorter than the time limit of one pair of trials",
        ("--max-job-time", "4h"): "--max-job-time: works on Slurm only, got 'local', expected --cluster slurm",
    }.items():
        code, _, err = call(*flags[:-1], *words)
        assert code == 2
        assert answer in err


def test_the_digest_is_where_enroot_3_and_4_expect_it() -> None:
    plan = plan_for(stack="example")
    digest = plan.stack.images["cuda-amd64"].digest
    for reference, uri in {
        "registry.example/a/b": "registry.example#a/b",
        "localhost:5000/b": "localhost:5000#b",
        "ubuntu": "registry-1.docker.io#library/ubuntu",
    }.items():
        image = plan.stack.images["cuda-amd64"].model_copy(update={"reference": reference})
        stack = plan.stack.model_copy(update={"images": {"cuda-amd64": image}})
        script = render_sbatch(with_site(plan, stack=stack), run_dir_of(plan))
        assert f"enroot import --arch=x86_64 --output \"$partial\" 'docker://{uri}:{digest}'\n" in script


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("docker", "--device={0}"),
        ("podman", "--device={0}"),
        ("apptainer", "--bind={0}"),
        ("pyxis", "--container-mounts={1}:{1},{0}:{0}"),
    ],
)
def test_the_fabric_s_devices_that_are_there_reach_every_runtime(tmp_path: Path, runtime: str, words: str) -> None:
    """enroot's own hook for the fabric fails on a node without Mellanox's devices, so it is asked only beside them."""
    device, absent = tmp_path / "uverbs", tmp_path / "absent"
    device.touch()
    fabric = [str(device), str(absent)]
    container = {"runtime": runtime, "image_dir": IMAGE_DIR, "fabric": fabric}
    two = plan_for(stack="example", settings=TWO_NODES)
    plan, run_dir = with_site(two, container=container), run_dir_of(two)
    script = render_sbatch(plan, run_dir)
    start = script.index("# Existing devices of the network")
    stubs = "srun() { :; }; compgen() { true; }"
    head = f"set -eu; {stubs}; srun_options=() identity=() limits=() image=i allocation=1\n"
    tail = '\nprintf "%s\\n" "${runtime[@]-}" "${srun_options[@]-}" "hook=${MELLANOX_VISIBLE_DEVICES-}"'
    part = script[start : script.index("\ncontainer=(", start)]
    done = subprocess.run(["bash", "-c", head + part + tail], check=True, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert words.format(device, run_dir.root.absolute()) in lines
    assert str(absent) not in done.stdout
    assert ("hook=all" in lines) is (runtime == "pyxis")


def test_apptainer_s_containers_see_the_job_s_variables_and_cache_on_the_node(tmp_path: Path) -> None:
    plan = with_site(plan_for(stack="example"), container={"runtime": "apptainer", "image_dir": IMAGE_DIR})
    script = render_sbatch(plan, run_dir_of(plan))
    on_node = script[script.index("on_node=") : script.index("\nsrun ", script.index("on_node="))]
    shell = f'{on_node}\nbash -c "$on_node" node-agent env | grep ^APPTAINERENV_ | LC_ALL=C sort'
    fake = tmp_path / "env"
    fake.write_text("#!/bin/sh\nexec /usr/bin/env\n")
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0,3", "SLURM_JOB_ID": "7", "A": "1"}
    env["SLURMD_NODENAME"] = "n"
    done = subprocess.run(["bash", "-c", shell], env=env, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [
        "APPTAINERENV_CUDA_VISIBLE_DEVICES=0,3", "APPTAINERENV_SLURMD_NODENAME=n", "APPTAINERENV_SLURM_JOB_ID=7",
    ]  # fmt: skip
    assert '"--bind=$cache:/var/cache/rlk-repro"' in script
    assert "TRITON_HOME=/var/cache/rlk-repro" in script
    assert "clean_up || echo" in script


PULL = '#!/bin/sh\n[ "$1" != pull ] || echo image >"$3"\n'


# ``lock``: a folder can be opened to read only, as a lock file of another user's
@pytest.mark.parametrize(("lock", "flock"), [("file", "exit 0"), ("folder", "exit 0"), ("file", "exit 1")])
def test_every_user_of_a_shared_folder_imports_and_records_an_image(tmp_path: Path, lock: str, flock: str) -> None:
    folder, tools = tmp_path / "images", tmp_path / "tools"
    plan = with_site(plan_for(stack="example"), container={"runtime": "apptainer", "image_dir": str(folder)})
    script = render_sbatch(plan, run_dir_of(plan))
    lines = script[script.index("\nimage=") : script.index("record image hash_image") + 25]
    image = Path(re.findall(r"^image=(.*)$", lines, re.MULTILINE)[0].strip("'"))
    tools.mkdir()
    folder.mkdir()
    if lock == "folder":
        image.with_name(f"{image.name}.lock").mkdir()
    for name, text in {"apptainer": PULL, "flock": f"#!/bin/sh\n{flock}\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    shell = f'set -Eeuo pipefail\nallocation=7.0\nrecord() {{ shift; "$@"; }}\n{lines}\n'
    env = {"PATH": f"{tools}:/usr/bin:/bin"}
    for is_by_hand in (False, True):  # an image that somebody put there has no hash beside it
        if is_by_hand:
            image.with_name(f"{image.name}.sha256").unlink()
        done = subprocess.run(["bash", "-c", shell], env=env, check=True, capture_output=True, text=True)
        assert {path.name for path in folder.iterdir()} >= {image.name, f"{image.name}.lock"}
        assert done.stdout.split() == [hashlib.sha256(b"image\n").hexdigest(), image.name]
        assert ("has no locks" in done.stderr) is (flock == "exit 1" and not is_by_hand)
    if lock == "file":
        assert image.with_name(f"{image.name}.lock").stat().st_mode & 0o666 == 0o666


def test_headline_runs_are_shown_in_a_container_whose_digest_is_not_published(call) -> None:
    plan = plan_for("qwen3-4b", stack="2026-07")
    script = render_sbatch(plan, run_dir_of(plan))
    assert NOT_PUBLISHED.digest in script
    assert "# no container" not in script
    assert "has no published image" in script
    for cluster, form in (("slurm", "registry.example#rlk-repro:"), ("k8s", "registry.example/rlk-repro@")):
        flags = ("submit", "qwen3-4b", "--cluster", cluster, "--profile", "generic-h200", "--stack", "2026-07")
        code, out, err = call(*flags, "--dry-run", "--show-job")
        assert (code, f"{form}<not published: run rlk-repro images build>" in out) == (0, True), out
        assert "cannot be submitted yet: stack 2026-07 has no published image for h200" in err
    host = with_site(plan_for("qwen3-4b", stack="2026-07"), container={"runtime": "host"})
    assert "runs in images, but container.runtime: host does not use any" in refusal_of(host)
    locked = plan.stack.model_copy(update={"locks": {"cuda-amd64": f"sha256:{'1' * 64}"}})
    assert "# no container" in render_sbatch(with_site(host, stack=locked), run_dir_of(host))


def test_a_stack_without_images_says_that_the_profile_s_runtime_is_not_used(call) -> None:
    remark = "stack host has no images: the trials run with the Python of the nodes, without pyxis"
    flags = ("submit", "smoke", "--cluster", "slurm", "--profile", "generic-h200")
    code, out, err = call(*flags, "--dry-run", "--show-job")
    assert (code, remark in err, f"# {remark}\n" in out) == (0, True, True)


@pytest.mark.parametrize(
    ("again", "state", "is_cancelled", "is_requeued"),
    [
        ("7.2", "RUNNING", False, True),
        (None, "RUNNING", False, False),
        ("7.1", "RUNNING", False, False),  # an earlier allocation's word
        ("7.2", "COMPLETING", False, False),  # ended by scancel
        ("7.2", "RUNNING", True, False),
    ],
)
def test_a_job_queues_itself_again_if_its_agent_asks_and_no_user_ended_it(
    tmp_path: Path, again: str | None, state: str, is_cancelled: bool, is_requeued: bool
) -> None:
    plan = plan_for()
    script = render_sbatch(plan, run_dir_of(plan))
    part = script[script.index("finish() {") : script.index("trap finish EXIT")]
    for name, line in {"squeue": f"echo {state}", "scontrol": 'echo "asked: $*"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    run_dir = RunDir(tmp_path / "run dir")
    run_dir.root.mkdir()
    run_dir.bundle.touch()
    if again is not None:
        run_dir.again.write_text(again)
    if is_cancelled:
        run_dir.cancelled.touch()
    head = f"set -Eeuo pipefail; PATH={tmp_path}:$PATH SLURM_JOB_ID=7 allocation=7.2 run_dir={quote(str(run_dir.root))}"
    shell = f"{head}\nbundle=$run_dir/bundle.tgz\n{part}\ntrap finish EXIT\nexit 75"
    done = subprocess.run(["bash", "-c", shell], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (75, "")
    assert ("asked: requeue 7" in done.stdout) is is_requeued
    assert "scontrol requeue" not in render_sbatch(with_site(plan, slurm={"requeue": False}), run_dir_of(plan))


def test_rootless_docker_does_without_locked_memory_and_groups_are_those_that_are_there(tmp_path: Path) -> None:
    plan = with_site(plan_for(hardware="mi300x", stack="example"), container={"runtime": "docker"})
    script = render_sbatch(plan, run_dir_of(plan))
    part = script[script.index("identity=(") : script.index("runtime=(")]
    for answer, user in (
        ("name=rootless", "--user=0:0"),
        ("", f"--user={os.getuid()}:{os.getgid()} --ulimit=memlock=-1"),
    ):
        shell = f'docker() {{ echo "{answer}"; }}\n{part}\necho "${{identity[@]}}"'
        done = subprocess.run(
            ["bash", "-c", f"set -Eeuo pipefail\n{shell}"], check=True, capture_output=True, text=True
        )
        assert done.stdout == f"{user}\n"  # no GPU of AMD's is here


def test_values_that_a_runtime_cannot_take_are_refused() -> None:
    example = plan_for(stack="example")
    assert refusal_of(with_site(example, container={"runtime": "host"})) == (
        "stack example: runs in images, but container.runtime: host does not use any, "
        "expected another container.runtime, or a stack with a lock or without images"
    )
    comma = [{"source": "/a,b"}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"runtime": "apptainer", "image_dir": None}, "profile generic-h200: container.image_dir: missing"),
        ({"runtime": "podman", "mounts": [{"source": "/a:b"}]}, "mount: podman cannot take this path, got '/a:b'"),
        ({"runtime": "docker", "mounts": comma}, "mount: docker cannot take this path, got '/a,b'"),
        ({"runtime": "apptainer", "image_dir": IMAGE_DIR, "mounts": comma}, "mount: apptainer cannot take this path"),
    ]
    for values, problem in cases:
        assert refusal_of(with_site(example, container=values)).startswith(problem)
    assert refusal_of(example, RunDir(Path("/runs/a b"))).startswith("mount: pyxis cannot take this path")
    shared = with_site(example, slurm={"exclusive": False}, container={"runtime": "docker"})
    assert "slurm.exclusive: false, but docker gives a job all GPUs of a node" in refusal_of(shared)
    stack = example.stack.model_copy(update={"images": {"rocm-amd64": example.stack.images["rocm-amd64"]}})
    assert "stack example: has no image for h200" in refusal_of(with_site(example, stack=stack))


def test_requests_that_slurm_cannot_take_are_refused() -> None:
    plan = plan_for()
    assert refusal_of(with_site(plan, slurm={"max_time_min": 10.0})) == (
        "profile generic-h200: slurm.max_time_min: is shorter than the time limit of one pair of trials, "
        "got 10.0, expected at least 15"
    )
    for option in ("--clusters=east", "-Meast"):
        there = with_site(plan, slurm={"extra": [option]})
        assert "slurm.extra: sends the job to another cluster" in refusal_of(there)
    for nodes, what in ((["a", "b"], "names more or fewer nodes"), (["n[1-2]"], "is not a node name, got 'n[1-2]'")):
        assert refusal_of(plan, nodes=nodes).startswith(f"--same-nodes: {what}")
