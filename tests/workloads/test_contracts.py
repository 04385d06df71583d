"""The recorded arguments of the pinned vime: what they hold, and what an argument list is refused for."""

from __future__ import annotations

import pytest

from rlk_repro.base.errors import SpecError
from rlk_repro.rundir.differences import split_arguments
from rlk_repro.spec.load import load_stack
from rlk_repro.workloads.vime.contract import Contract, load_contract
from tests.support.vime_examples import COMMIT

LEAST = ["--rollout-batch-size", "8"]


@pytest.fixture(scope="module")
def contract() -> Contract:
    return load_contract(COMMIT)


@pytest.mark.parametrize("stack", ["2026-07", "vime-host", "example"])
def test_every_stack_with_a_vime_has_its_contract_made_with_its_megatron(stack: str) -> None:
    pins = load_stack(stack).model.pins
    assert load_contract(pins["vime"].commit).megatron_lm == pins["megatron_lm"].commit


def test_it_names_the_four_owners(contract: Contract) -> None:
    owners = [flag.owner for flag in contract.flags]
    assert {owner: owners.count(owner) for owner in set(owners)} == {
        "vime": 213, "megatron": 659, "vllm": 251, "router": 68
    }  # fmt: skip
    assert contract.made_with["vllm"] == "0.25.1"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--num-layer", "3"], "x: --num-layer: is unknown to vime 1fc199d9, which would ignore the flag\n"
         "  hint: did you mean '--num-layers'?"),
        (["--enable-rl-kernel"], "x: --enable-rl-kernel: is unknown to vime 1fc199d9, which would ignore the flag"),
        (["--num-layers", "many"], "x: --num-layers: has a value of the wrong type, got 'many', expected a whole "
        "number"),
        (["--num-layers"], "x: --num-layers: has the wrong number of values, got '', expected one value"),
        (["--num-layers", "3", "4"], "x: --num-layers: has the wrong number of values, got '3 4', expected one value"),
        (["--swiglu", "true"], "x: --swiglu: has the wrong number of values, got 'true', expected no value"),
        (["--lr", "fast"], "x: --lr: has a value of the wrong type, got 'fast', expected a number"),
        (["--train-env-vars", "{A: 1}"], "x: --train-env-vars: has a value of the wrong type, got '{A: 1}', expected"
         " JSON"),
        (["--optimizer", "adm"], "x: --optimizer: is not one of the choices, got 'adm', expected one of adam, sgd, "
        "muon, "
         "dist_muon\n  hint: did you mean 'adam'?"),
        (["--seed", "1", "--seed", "2"], "x: --seed: is given twice, expected the flag once"),
        (["--vllm-gpu-memory-utilisation", "0.7"], "x: --vllm-gpu-memory-utilisation: is unknown to vime 1fc199d9, "
         "which would ignore the flag\n  hint: did you mean '--vllm-gpu-memory-utilization'?"),
    ],
)  # fmt: skip
def test_the_contract_refuses_wrong_flags_and_values(contract: Contract, argv: list[str], problem: str) -> None:
    found = [str(item) for item in contract.find_problems([*LEAST, *argv], "x")]
    assert any(item.startswith(problem) for item in found), found
    assert len(found) == 1


def test_required_flags_must_be_present(contract: Contract) -> None:
    assert [str(item) for item in contract.find_problems([], "x")] == [
        "x: --rollout-batch-size: missing, expected a value"
    ]


def test_flags_and_values_are_distinguished() -> None:
    words = ["--a", "-1", "--b=2=3", "--c", "--d", "x", "y"]
    assert list(split_arguments(words)) == [("--a", ("-1",)), ("--b", ("2=3",)), ("--c", ()), ("--d", ("x", "y"))]
    assert list(split_arguments(["stray"])) == [("", ("stray",))]


def test_a_commit_without_a_contract_is_refused() -> None:
    with pytest.raises(SpecError, match=r"stack: pins.vime: no argument contract for this commit, got '0000"):
        load_contract("0" * 40)
