"""Every argument list of every shipped run of vime through vime's own parser and its checks, and Megatron-LM's.

Needs VIME_SRC and MEGATRON_SRC, and a Python with torch and triton: this one, or VIME_PYTHON.  What else that one
lacks, vLLM, its router and transformers among it, is stood in for (tests/support/vime_parser.py names it); vLLM's own
flags then reach no parser here, and only the recorded contract judges them.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.base import proc
from rlk_repro.base.resources import data_dir
from rlk_repro.rundir.differences import split_arguments
from rlk_repro.rundir.paths import RunDir
from rlk_repro.workloads.vime.contract import Flag, load_contract
from tests import ROOT
from tests.support.slurm.examples import plan_for
from tests.support.vime_examples import COMMIT, all_lists, list_runs, patch_megatron, trial_argv

REPOSITORY = ROOT
needs_sources = pytest.mark.skipif(
    not {"VIME_SRC", "MEGATRON_SRC"} <= os.environ.keys(), reason="VIME_SRC or MEGATRON_SRC unset"
)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return patch_megatron(tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, list[str], dict[str, str], int]]:
    return all_lists(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("VIME_PYTHON") or sys.executable
    if not proc.run([found, "-c", "import torch, triton"], timeout_s=120).is_ok:
        pytest.skip(f"{found} has no triton, which Megatron-LM imports: set VIME_PYTHON")
    return found


@pytest.fixture(scope="module")
def answer(lists: list[Any], megatron: Path, python: str) -> Any:
    paths = [str(REPOSITORY), os.environ["VIME_SRC"], str(megatron), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    argv = [python, "-m", "tests.support.vime_parser"]
    found = proc.run(argv, cwd=REPOSITORY, env=env, timeout_s=900, stdin=json.dumps(lists).encode())
    assert found.is_ok, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


@needs_sources
@pytest.mark.timeout(600)
def test_the_contract_equals_the_parsers_flags(megatron: Path, python: str, tmp_path: Path) -> None:
    """Made again by the documented command."""
    if not proc.run([python, "-c", "import vllm, vllm_router"], timeout_s=120).is_ok:
        pytest.skip(f"{python} has no vLLM: set VIME_PYTHON")
    out = tmp_path / "contract.json"
    argv = [python, "-m", "tools.contract", os.environ["VIME_SRC"], str(megatron), "-o", str(out)]
    argv += ["--vime-commit", COMMIT, "--megatron-commit", load_contract(COMMIT).megatron_lm]
    made = proc.run(argv, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, timeout_s=500)
    assert made.is_ok, made.stderr[-3000:]
    recorded = json.loads((data_dir("manifests") / "contracts" / f"vime-{COMMIT}.json").read_text())
    again = json.loads(out.read_text())
    assert again["megatron_patch"] == recorded["megatron_patch"]
    assert again["flags"] == recorded["flags"]


@needs_sources
@pytest.mark.timeout(1200)
def test_vime_takes_every_list_and_every_value_arrives(lists: list[Any], answer: Any) -> None:
    with_vllm = "vllm.engine.arg_utils" not in answer["stand_ins"]
    assert answer["results"].keys() == {name for name, *_ in lists}
    assert {name: result["error"] for name, result in answer["results"].items() if result["error"]} == {}
    for name, argv, *_ in lists:
        result = answer["results"][name]
        ignored = {flag for flag in result["ignored"] if with_vllm or not flag.startswith("--vllm-")}
        assert ignored == set(), name
        wrong = list(find_lost_values(argv, result["values"], with_vllm=with_vllm))
        assert wrong == [], name


def find_lost_values(argv: list[str], values: dict[str, str], *, with_vllm: bool) -> Iterator[str]:
    """Flags whose value is not what vime then goes by."""
    by_flag = load_contract(COMMIT).by_flag
    for flag, given in split_arguments(argv):
        definition = by_flag[flag][-1]
        if not with_vllm and definition.owner in {"vllm", "router"}:
            continue
        found = values.get(definition.dest)
        if found is None or found not in spell(flag, definition, given):
            yield f"{flag} {' '.join(given)}: {found}"


def spell(flag: str, definition: Flag, given: tuple[str, ...]) -> set[str]:
    """How the value may stand in the namespace."""
    if not definition.takes_value:
        is_off = definition.action == "store_false" or (definition.action != "store_true" and flag.startswith("--no-"))
        return {str(not is_off)}
    if len(given) > 1:
        return {str(list(given)), str([int(word) if word.isdecimal() else word for word in given])}
    (value,) = given
    number = _normal(value)
    forms = {value, str(number), f"AttnBackend.{value}"} | ({str(int(number))} if isinstance(number, float) else set())
    return forms | {f"['{value}']", f"[{value}]"}  # some that take several values are given one


def _evaluate(value: str) -> Any:
    return eval(value, {"__builtins__": {}}) if re.fullmatch(r"[\[\]0-9*+, ()]+", value) else value


@needs_sources
@pytest.mark.parametrize("run", sorted(name for name, workload in list_runs().items() if workload.model.recipe))
def test_a_model_is_built_as_upstream_s_script_says(run: str) -> None:
    model = list_runs()[run].model
    assert model.recipe is not None
    script = Path(os.environ["VIME_SRC"]) / model.recipe
    printed = proc.run(["bash", "-c", 'source "$1"; printf "%s\\0" "${MODEL_ARGS[@]}"', "-", str(script)])
    assert printed.is_ok
    upstream = {flag: tuple(map(_normal, values)) for flag, values in split_arguments(printed.stdout.split("\0")[:-1])}
    own = {f"--{flag}": tuple(map(_normal, _words(value))) for flag, value in model.arguments.items()}
    assert own == upstream


ELSEWHERE = {
    "hf-checkpoint", "ref-load", "prompt-data",  # places
    "load", "save", "save-interval", "eval-interval", "eval-prompt-data", "n-samples-per-eval-prompt",
    "eval-max-response-len", "eval-top-p",  # no checkpoints, no evaluation
    "num-rollout", "rollout-max-response-len", "global-batch-size",  # the amount, and two optimizer steps
}  # fmt: skip
OFFLOADED = {"optimizer-cpu-offload", "overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer"}
"""On A100 only: the others hold the optimizer."""
ADDED = {
    "clip-grad", "log-probs-chunk-size", "num-steps-per-rollout", "rollout-max-prompt-len", "rollout-top-p",
    "seed", "rollout-seed", "rollout-num-gpus", "num-gpus-per-node", "custom-megatron-init-path",
    "actor-num-nodes", "actor-num-gpus-per-node", "colocate",
}  # fmt: skip
"""What vime and Megatron-LM take for these anyway, what follows from the node, and what the run's first lines name."""


@needs_sources
@pytest.mark.parametrize(
    ("run", "hardware", "added"),
    [
        ("qwen3-30b-a3b", "a100", set()),
        ("qwen3-30b-a3b", "h200", set()),
        ("qwen3-30b-a3b-r3", "h200", {"use-rollout-routing-replay", "vllm-moe-backend"}),
    ],
)
def test_a_run_is_upstream_s_script_but_for_what_its_first_lines_name(run: str, hardware: str, added: set[str]) -> None:
    script = (Path(os.environ["VIME_SRC"]) / "scripts" / "run-qwen3-30B-A3B.sh").read_text()
    arrays = re.findall(r"^\w+_ARGS=\(\n.*?^\)", script, re.DOTALL | re.MULTILINE)
    names = " ".join(f'"${{{array.partition("=")[0]}[@]}}"' for array in arrays)
    printed = proc.run(["bash", "-c", "\n".join([*arrays, f'printf "%s\\0" {names}'])])
    upstream = {
        flag[2:]: tuple(map(_normal, values)) for flag, values in split_arguments(printed.stdout.split("\0")[:-1])
    }
    plan = plan_for(run, hardware, settings=("lane=live", "measure.design=parallel"))
    own = {
        flag[2:]: tuple(map(_normal, values)) for flag, values in split_arguments(trial_argv(plan, RunDir(Path("/r"))))
    }
    own = {flag: values for flag, values in own.items() if flag not in list_runs()[run].model.arguments}
    if hardware != "a100":
        upstream = {flag: values for flag, values in upstream.items() if flag not in OFFLOADED}
    assert len(upstream) > 30
    differ = {flag for flag in {*own, *upstream} if own.get(flag) != upstream.get(flag)}
    assert differ - ELSEWHERE == ADDED | added


def _words(value: Any) -> tuple[str, ...]:
    if value is True:
        return ()
    return tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)


def _normal(word: str) -> Any:
    """Numbers by value, patterns of layers by what they come to."""
    try:
        return float(ast.literal_eval(word))
    except (ValueError, SyntaxError, TypeError):
        return _evaluate(word)
