"""torch.compile in the place of the trainer's log-prob function, compiled for a CPU: numbers, proof, and no silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _dynamo as dynamo

from rlk_repro.analysis.proof import prove
from rlk_repro.integration.measure.profile import read_counts
from rlk_repro.integration.route import torch_compile
from rlk_repro.integration.route.api import Route, RouteContext
from rlk_repro.integration.route.rl_kernel import RouteFailed
from rlk_repro.integration.route.table import ROUTES
from rlk_repro.integration.route.torch_compile import CompiledFunction, load_functions
from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.logs.ops import OpsLog, read_ops
from rlk_repro.operators import COMPILED_LOGP, Case, Reason, Refusal
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import ProofStatus
from rlk_repro.schedule import LETTERS
from tests.support.loss_examples import load_loss_module, make_args, make_loud_route, train_once

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch's compiler


@pytest.fixture(autouse=True)
def without_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but torch's last stage, which compiles C++ for ten seconds; test_agreement goes there."""
    monkeypatch.setattr(torch_compile, "BACKEND", "aot_eager")


SCHEDULE = "beebs"


def run_session(folder: Path, schedule: str = SCHEDULE, **ops: Any) -> tuple[OpsLog, list[Any]]:
    """Each step's numbers, and what the ops file says."""
    module, found = load_loss_module(), []
    settings = Settings(mode=Mode.REQUIRE, schedule=schedule, ops_dir=folder / "ops", **ops)
    routes = {**ROUTES, "logp": make_loud_route}
    with install_into(
        module, settings, trainer="example", case=Case(platform="cpu"), args=make_args(), routes=routes
    ) as installation:
        for step in range(len(schedule)):
            installation.begin_step(step)
            found.append(train_once(module, make_args()))
            installation.end_step(step)
    return read_ops(TrialDir(folder)), found


def test_a_session_is_proved_and_its_numbers_are_the_trainer_s(tmp_path: Path) -> None:
    ops, found = run_session(tmp_path, ops=(COMPILED_LOGP,))
    expected = train_once(load_loss_module(), make_args())
    for numbers in found:
        for one, other in zip(numbers, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, found[0], expected))
    (decision,) = ops.decisions()
    assert (decision.op, decision.implementation, decision.is_rl_kernel) == (COMPILED_LOGP, "torch.compile", False)
    assert decision.is_served
    assert decision.calls == 2 * 4  # per microbatch one pass without gradient and one with
    planned = {0: "baseline", 1: "enabled", 2: "enabled", 3: "baseline"}
    proof = prove(ops, variant="crossover", requested_ops=(COMPILED_LOGP,), platform="cpu", planned=planned)
    assert (proof.status, proof.reason) == (ProofStatus.PROVED, "")
    assert ops.counts_in(2)["compilations"] == 0
    shadows = ops.ranks[0].shadows
    assert [(item.case, item.error, sorted(item.calls)) for item in shadows] == [
        ("as trained", "", [COMPILED_LOGP]),
        ("peaked", "", [COMPILED_LOGP]),
    ]


def test_calls_that_a_route_cannot_serve_are_refused_before_they_run() -> None:
    route = ROUTES[COMPILED_LOGP](
        RouteContext(case=Case(platform="cpu"), native=lambda **call: call["logits"], args=make_args())
    )
    assert isinstance(route, Route)
    logits, tokens = torch.zeros(3, 8, requires_grad=True), torch.tensor([0, 7, 1])
    call = {"logits": logits, "tokens": tokens, "tp_group": None, "log_prob_keep_mask": None,
            "with_entropy": True, "with_entropy_grad": False}  # fmt: skip
    assert route.refuse({**call, "log_prob_keep_mask": logits > 0}) == Refusal(Reason.TOP_P_REPLAY)
    assert route.refuse({**call, "with_entropy_grad": True}) == Refusal(Reason.ENTROPY_GRADIENT)
    assert route.refuse({**call, "tokens": tokens + 1}) == Refusal(Reason.FOREIGN_ID)
    assert route.refuse(call) is None
    empty = logits[:0]
    assert route.run({**call, "logits": empty, "tokens": tokens[:0]}) is empty


def test_the_baseline_of_a_session_may_be_served_too(tmp_path: Path) -> None:
    ops, _ = run_session(tmp_path, ops=("logp",), baseline_ops=(COMPILED_LOGP,))
    calls = [[ops.calls_in(op, step).calls for op in ("logp", COMPILED_LOGP)] for step in range(len(SCHEDULE))]
    assert calls == [[0, 4], [2, 0], [2, 0], [0, 4], [0, 4]]
    planned = {step: LETTERS[letter] for step, letter in enumerate(SCHEDULE)}
    proof = prove(
        ops,
        variant="crossover",
        requested_ops=("logp",),
        baseline_ops=(COMPILED_LOGP,),
        platform="cpu",
        planned=planned,
    )
    assert proof.status is ProofStatus.NATIVE  # RL-Kernel's part of it
    other = prove(ops, variant="crossover", requested_ops=(COMPILED_LOGP,), platform="cpu", planned=planned)
    assert other.status is ProofStatus.MISSING
    assert other.reason == f"{COMPILED_LOGP}: called in step 0, which is baseline"
    assert [sorted(item.calls) for item in ops.ranks[0].shadows] == [["logp"], ["logp"]]


def make_case(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_rows = int(torch.randint(2, 90, (1,), generator=generator))
    logits = torch.randn(num_rows, 11, generator=generator) * (1 + seed % 7)
    return logits, torch.randint(11, (num_rows,), generator=generator)


def test_one_compilation_serves_every_number_of_rows_and_is_counted() -> None:
    no_grad, with_grad = load_functions()
    for seed in range(2):
        logits, tokens = make_case(seed)
        with torch.no_grad():
            no_grad(logits, tokens)
        with_grad(logits.requires_grad_(), tokens)
    before, runs = read_counts()["compilations"], with_grad.num_runs
    for seed in range(40):
        logits, tokens = make_case(seed)
        expected = logits.double().log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            torch.testing.assert_close(no_grad(logits, tokens).double(), expected, atol=1e-5, rtol=0)
        leaf = logits.requires_grad_()
        found = with_grad(leaf, tokens)
        (gradient,) = torch.autograd.grad(found.sum(), leaf)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
        wanted = torch.nn.functional.one_hot(tokens, 11) - logits.detach().double().softmax(-1)
        torch.testing.assert_close(gradient.double(), wanted, atol=5e-6, rtol=0)
    assert read_counts()["compilations"] == before
    assert with_grad.num_runs == runs + 40
    logits, tokens = make_case(0)
    with torch.no_grad():
        no_grad(logits.half(), tokens)
    assert read_counts()["compilations"] == before + 1


def test_nothing_is_silently_eager() -> None:
    logits, tokens = make_case(1)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RouteFailed, match="without its compiled code"):
        load_functions()[0](logits, tokens)
    limited = CompiledFunction(lambda logits, tokens: logits.gather(1, tokens.unsqueeze(1)).squeeze(1))
    limited(logits, tokens)
    with dynamo.config.patch(recompile_limit=1), pytest.raises(dynamo.exc.FailOnRecompileLimitHit):
        limited(logits.double(), tokens)
