"""The numbers of RL-Kernel's later generation against torch, on one rank and two, and in a trainer.

RL-Kernel is the double of tests/support/fake_rl_engine_runtime and, where ``RLK_LATER_SRC`` names a tree of that
generation, the real one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlk_repro.analysis.proof import prove
from rlk_repro.base.errors import EnvironmentMissing
from rlk_repro.integration.route import vocab_parallel
from rlk_repro.integration.route.api import Route
from rlk_repro.integration.route.errors import RouteFailed
from rlk_repro.integration.route.log_probs import Shard
from rlk_repro.integration.route.rl_kernel import LoadedOperator, load_contracts
from rlk_repro.integration.route.vocab_parallel import Shape, make_contract
from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.logs.ops import read_ops
from rlk_repro.operators import Case, Reason, Refusal
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import ProofStatus
from tests.support.later_rl_kernel import (
    CPU,
    EARLIER,
    LATER,
    NAME,
    REAL,
    get_registry,
    importing_from,
    make_call,
    make_problem,
    make_route,
    write_package,
)
from tests.support.loss_examples import load_loss_module, make_args, run_ranks, train_once


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Any]:
    write_package(tmp_path, LATER, EARLIER)
    with importing_from(tmp_path):
        yield get_registry()


@pytest.fixture(params=["double", "real"])
def later(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder with RL-Kernel of the later generation, on the path."""
    if request.param == "real" and not REAL:
        pytest.skip("RLK_LATER_SRC names no RL-Kernel of the later generation")
    if request.param == "double":
        write_package(tmp_path, LATER, EARLIER)
    folder = Path(REAL) if request.param == "real" else tmp_path
    with importing_from(folder):
        yield str(folder)


def solve(
    logits: torch.Tensor, tokens: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As vime does, over all columns: log-probs, their gradient and entropies, in float64."""
    leaf = logits.double().requires_grad_()
    full = leaf.log_softmax(dim=-1)
    values = full.gather(1, tokens.unsqueeze(1)).squeeze(1)
    entropy = -(full.exp() * full).sum(dim=-1).detach()
    return values.detach(), torch.autograd.grad(values, leaf, grad.double())[0], entropy


def check_against_torch(
    route: Route, problem: tuple[torch.Tensor, torch.Tensor, torch.Tensor], columns: slice, group: Any
) -> None:
    """One call with and one without gradient, of a rank that holds these columns."""
    logits, tokens, grad = problem
    expected, expected_grad, expected_entropy = solve(*problem)
    leaf = logits[:, columns].clone().requires_grad_()
    call = make_call(leaf, tokens, group)
    assert route.refuse(call) is None
    values, entropy = route.run(call)
    assert values.shape == (len(tokens), 1)
    (found,) = torch.autograd.grad(values.squeeze(1), leaf, grad)
    torch.testing.assert_close(values.squeeze(1).double(), expected, atol=5e-6, rtol=1e-6)
    torch.testing.assert_close(found.double(), expected_grad[:, columns], atol=2e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-6, rtol=0)
    assert not entropy.requires_grad
    with torch.no_grad():
        again, nothing = route.run(make_call(leaf, tokens, group, with_entropy=False))
    assert nothing is None
    assert torch.equal(again, values)
    assert not again.requires_grad


def test_log_probs_gradient_and_entropy_are_torch_s(later: str) -> None:
    route = make_route()
    for seed in range(6):
        check_against_torch(route, make_problem(seed, columns=11 + 53 * (seed % 2)), slice(None), None)
    assert route.version == "unversioned (rl_engine.runtime.registry)"
    assert route.implementation == "VocabParallelLogprobOp"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_logits_keep_float32_log_probs_and_their_own_gradient(later: str, dtype: torch.dtype) -> None:
    logits, tokens, grad = make_problem(3)
    leaf = logits.to(dtype).requires_grad_()
    expected, expected_grad, _ = solve(leaf.detach(), tokens, grad)
    values, _ = make_route().run(make_call(leaf, tokens))
    (found,) = torch.autograd.grad(values.squeeze(1), leaf, grad)
    assert (values.dtype, found.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(values.squeeze(1).double(), expected, atol=5e-6, rtol=0)
    torch.testing.assert_close(found.double(), expected_grad, atol=2e-2, rtol=0)


@pytest.mark.parametrize("part", ["implementation", "actual_backend"])
def test_another_implementation_than_the_recorded_one_is_refused(double: Any, part: str) -> None:
    found = vocab_parallel.VocabParallelLogp.find(CPU)
    assert isinstance(found, vocab_parallel.VocabParallelLogp)
    logits, tokens, _ = make_problem(1)
    dispatch = found._dispatch

    def dispatch_elsewhere(shape: Shape) -> LoadedOperator:
        result = dispatch(shape)
        assert isinstance(result, LoadedOperator)
        assert result.provenance is not None
        if part == "implementation":
            return dataclasses.replace(result, implementation="AnotherOp")
        return dataclasses.replace(result, provenance={**result.provenance, "actual_backend": "another"})

    shard = Shard(0, 1, None)
    assert found.check(logits, tokens, shard) is None
    found._dispatch = dispatch_elsewhere  # type: ignore[assignment]
    refusal = found.check(logits, tokens, shard)
    assert refusal is not None
    assert refusal.reason is Reason.NOT_DISPATCHED


def test_padded_columns_stay_in_the_softmax_as_they_are_in_vime_s(later: str) -> None:
    """A contract with fewer real columns leaves them out, and differs."""
    logits, tokens, grad = make_problem(5, columns=64)
    tokens %= 50
    logits[:, 50:] += 4  # what a padded row of the output layer happens to give
    check_against_torch(make_route(), (logits, tokens, grad), slice(None), None)
    contracts = load_contracts()
    assert not isinstance(contracts, Refusal)
    shape = Shape.of(logits, Shard(0, 1, None))
    assert make_contract(contracts.types, shape, 1).sharding.real_vocab_size == 64
    found = vocab_parallel.dispatch(contracts, CPU, shape, "reference")
    assert isinstance(found, LoadedOperator)
    masked = dataclasses.replace(found.contract, sharding=contracts.types.ShardingSpec(0, 1, ((0, 64),), 50, 64))
    without, _ = found.op(logits, tokens, contract=masked, num_vocab_tiles=64)
    assert float((without - solve(logits, tokens, grad)[0]).amin()) > 0.1


def test_unsupported_calls_are_refused(later: str) -> None:
    route, (logits, tokens, _) = make_route(), make_problem(0)
    mask = torch.ones_like(logits, dtype=torch.bool)
    assert route.refuse(make_call(logits, tokens, log_prob_keep_mask=mask)) == Refusal(Reason.TOP_P_REPLAY)
    with_entropy = make_call(logits.requires_grad_(), tokens, with_entropy_grad=True)
    assert route.refuse(with_entropy) == Refusal(Reason.ENTROPY_GRADIENT)
    assert route.run(make_call(logits[:0], tokens[:0])) == "native"


def test_a_result_without_gradient_stops(double: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens, _ = make_problem(0)
    route = make_route()
    answer = torch.zeros(len(tokens)), torch.zeros(len(tokens))
    monkeypatch.setattr(type(double.backends["cpu"][0].op), "__call__", lambda *_, **__: answer)
    with pytest.raises(RouteFailed, match="returned a result without gradient"):
        route.run(make_call(logits.requires_grad_(), tokens))


def run_rank(rank: int, folder: str, source: str) -> None:
    """One of two ranks; every assertion is on this rank's half of the columns."""
    sys.path.insert(0, source)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    try:
        route = make_route(Case(platform="cpu", tensor_parallel=2))
        half = slice(24 * rank, 24 * rank + 24)
        for seed in range(6):
            problem = make_problem(seed)
            if seed % 3 == 2:
                problem[0][:, 24:] -= 300  # all of the probability on one rank
            check_against_torch(route, problem, half, dist.group.WORLD)
        logits, tokens, _ = make_problem(0)
        tokens[0] = 48
        call = make_call(logits[:, half], tokens, dist.group.WORLD)
        assert make_route(Case(platform="cpu", tensor_parallel=2)).refuse(call) == Refusal(Reason.FOREIGN_ID)
    finally:
        dist.destroy_process_group()


def test_over_a_split_vocabulary_all_is_the_same(later: str, tmp_path: Path) -> None:
    run_ranks(run_rank, str(tmp_path), later)


def install(folder: Path, mode: Mode, case: Case = CPU) -> Any:
    settings = Settings(mode=mode, ops=(NAME,), ops_dir=folder / "ops")
    return install_into(load_loss_module(), settings, trainer="example", case=case)


def test_a_refusal_stops_the_start_and_is_never_a_fallback_under_require(double: Any, tmp_path: Path) -> None:
    double.backends["cpu"].clear()
    with pytest.raises(EnvironmentMissing) as caught:
        install(tmp_path, Mode.REQUIRE)
    assert str(caught.value) == (
        "VIME_RL_KERNEL_MODE=require: vocab_parallel_logp: RL-Kernel's own dispatch refuses the operator "
        "(nothing registered), expected no fallback\n  hint: repair the cause, remove the operator from "
        "VIME_RL_KERNEL_OPS, or set VIME_RL_KERNEL_MODE=auto"
    )


def train(folder: Path, *ops: str, case: Case = CPU) -> list[torch.Tensor]:
    module = load_loss_module()
    settings = Settings(mode=Mode.REQUIRE if ops else Mode.OFF, ops=ops, ops_dir=folder / "ops")
    with install_into(module, settings, trainer="example", case=case) as installation:
        found = train_once(module, make_args())
        installation.end_step(0)
    return found


def test_a_trainer_s_numbers_are_the_same_and_the_record_says_who_computed_them(later: str, tmp_path: Path) -> None:
    enabled, baseline = train(tmp_path / "enabled", NAME), train(tmp_path / "baseline")
    for one, other in zip(enabled, baseline, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    decision, *_ = read_ops(TrialDir(tmp_path / "enabled")).ranks[0].decisions
    assert (decision.implementation, decision.version) == (
        "VocabParallelLogprobOp", "unversioned (rl_engine.runtime.registry)")  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "enabled/ops/0.jsonl").read_text().splitlines()]
    (provenance,) = (line["provenance"] for line in lines if line["event"] == "decision")
    assert provenance["actual_backend"] == "pytorch-vocab-parallel-logp-ws2"
    log = read_ops(TrialDir(tmp_path / "enabled"))
    proof = prove(log, variant="enabled", requested_ops=(NAME,), platform="cpu")
    assert (proof.status, log.calls[NAME].calls) == (ProofStatus.NATIVE, 4)
