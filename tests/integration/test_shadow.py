"""Shadow steps: what they record, what they find, and that the training does not know of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlk_repro.integration.measure import shadow
from rlk_repro.integration.route.api import Route, RouteContext, RouteFactory
from rlk_repro.integration.route.table import ROUTES
from rlk_repro.integration.switch import Mode, Settings, install_into
from rlk_repro.logs.ops import OpsLog, read_ops
from rlk_repro.operators import Case
from rlk_repro.rundir.paths import TrialDir
from rlk_repro.rundir.results import ProofStatus
from tests import SUPPORT
from tests.integration.test_sessions import judge, run_session
from tests.support.loss_examples import (
    VOCABULARY,
    load_loss_module,
    make_args,
    make_batch,
    make_logits,
    run_ranks,
    train_once,
)

CASES = ["as trained", "peaked"]
NUM_ROWS = make_logits().shape[1]
CPU = Case(platform="cpu")
pytestmark = pytest.mark.usefixtures("rl_kernel")


def change(op: str, answer: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, RouteFactory]:
    """The routes, one of them with other log-probs."""

    def make(context: RouteContext) -> Any:
        route = ROUTES[op](context)
        assert isinstance(route, Route)
        run = route.run

        def run_changed(call: Any) -> Any:
            log_probs, entropy = run(call)
            return answer(log_probs), entropy

        return replace(route, run=run_changed)

    return {**ROUTES, op: make}


def run_steps(
    folder: Path,
    schedule: str,
    *,
    ops: tuple[str, ...] = ("logp", "ratio_kl"),
    routes: Mapping[str, RouteFactory] = ROUTES,
    args: argparse.Namespace | None = None,
    case: Case = CPU,
    train: Callable[..., list[torch.Tensor]] = train_once,
    module: ModuleType | None = None,
) -> tuple[list[list[torch.Tensor]], OpsLog]:
    """The numbers of each step, and the ops files."""
    settings = Settings(mode=Mode.REQUIRE, ops=ops, schedule=schedule, ops_dir=folder / "ops")
    module, found = module or load_loss_module(), []
    args = args or make_args()
    with install_into(module, settings, trainer="example", case=case, args=args, routes=routes) as installation:
        for step in range(len(schedule)):
            installation.begin_step(step)
            found.append(train(module, args))
            installation.end_step(step)
    return found, read_ops(TrialDir(folder))


def read_shadows(log: OpsLog) -> dict[str, Any]:
    """By case, of one rank and one step."""
    return {shadow.case: shadow for shadow in log.ranks[0].shadows}


@pytest.mark.usefixtures("torch_as_it_was")
def test_a_session_trains_to_the_same_bits_without_its_shadow_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses, gradient norms and metrics of every optimizer step, after a shadow step too."""
    log, printed = run_session(tmp_path / "with", caplog, "sbes")
    plain, expected = run_session(tmp_path / "without", caplog, "bbeb")
    assert printed == expected
    assert plain.ranks[0].shadows == ()
    assert [(record.step, record.case) for record in log.ranks[0].shadows] == [
        (step, case) for step in (0, 3) for case in CASES
    ]
    for record in log.ranks[0].shadows[2:]:  # in the first step nothing is to be learnt
        assert record.error == ""
        assert {op: (count.calls, count.fallbacks) for op, count in record.calls.items()} == {
            "logp": (1, 0), "ratio_kl": (1, 0)}  # fmt: skip
        assert record.log_probs is not None
        assert record.log_probs.n == record.calls["logp"].tokens > 0
        for gap in (record.log_probs, record.log_probs_no_grad, record.logits_grad):
            assert gap is not None
            assert gap.max_abs is not None
            assert gap.max_abs_baseline is not None
            assert gap.max_abs <= 1e-5 < gap.max_abs_baseline
        assert record.loss is not None
        assert record.loss.baseline == pytest.approx(record.loss.enabled, abs=1e-5, rel=1e-5)
    assert not any(log.calls_in("ratio_kl", step).calls for step in (0, 1, 3))
    assert judge(log, "sbes")[0] is ProofStatus.NATIVE


def test_an_error_of_an_operator_shows_in_its_numbers(tmp_path: Path) -> None:
    _, log = run_steps(tmp_path / "ratio_kl", "s", routes=change("ratio_kl", lambda answer: answer + 0.01))
    for record in read_shadows(log).values():
        assert record.log_probs.max_abs == pytest.approx(0.01, rel=0.05)
        assert record.log_probs.mean_abs == pytest.approx(0.01, rel=0.05)
        assert record.log_probs_no_grad.max_abs < 1e-5
    trained = read_shadows(log)["as trained"]
    assert trained.loss.baseline != pytest.approx(trained.loss.enabled, rel=1e-3)
    _, log = run_steps(tmp_path / "logp", "s", routes=change("logp", lambda answer: answer + 0.01))
    for record in read_shadows(log).values():
        assert record.log_probs.max_abs < 1e-5
        assert record.log_probs_no_grad.max_abs == pytest.approx(0.01, rel=0.05)
        assert record.loss.baseline == pytest.approx(record.loss.enabled, rel=1e-5)


def test_the_peaked_case_finds_what_near_uniform_logits_hide(tmp_path: Path) -> None:
    records = read_shadows(run_steps(tmp_path, "s", routes=change("ratio_kl", lambda answer: answer.clamp_min(-20)))[1])
    trained, peaked = (records[case] for case in CASES)
    assert trained.log_probs.max_abs < 1e-5
    assert trained.logits_grad.max_abs < 1e-5
    assert peaked.log_probs.max_abs > 1
    assert peaked.logits_grad.max_abs > 0.1


def test_some_rows_stand_for_all_and_the_loss_is_still_the_microbatch_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MAX_ROWS", 7)
    (numbers,), log = run_steps(tmp_path, "s")
    assert any(torch.equal(number, torch.tensor(read_shadows(log)["as trained"].loss.baseline)) for number in numbers)
    for record in read_shadows(log).values():
        assert record.log_probs.n == record.calls["ratio_kl"].tokens == 7 < NUM_ROWS
        assert record.logits_grad.n == 7 * VOCABULARY
        assert record.logits_grad.max_abs < 1e-5 < record.logits_grad.max_abs_baseline


def test_a_failed_comparison_is_recorded_and_the_training_continues(tmp_path: Path) -> None:
    def fail(answer: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate much.")

    expected = train_once(load_loss_module(), make_args())
    found, log = run_steps(tmp_path, "sb", routes=change("ratio_kl", fail))
    assert all(all(map(torch.equal, numbers, expected)) for numbers in found)
    assert [shadow.error for shadow in log.ranks[0].shadows] == ["OutOfMemoryError: CUDA out of memory."] * 2
    assert [shadow.log_probs for shadow in log.ranks[0].shadows] == [None, None]


def split_vocabulary(module: ModuleType, rank: int) -> None:
    """Give the loss module a vocabulary that two ranks share, as vime's is: the reference trainer's is never split."""
    whole = module.calculate_log_probs_and_entropy

    def calculate_log_probs_and_entropy(
        logits: Any, tokens: Any, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1,
        log_prob_keep_mask: Any = None, with_entropy_grad: bool = True,
    ) -> Any:  # fmt: skip
        parts = [torch.empty_like(logits) for _ in range(2)]
        dist.all_gather(parts, logits.detach().contiguous(), group=tp_group)
        parts[rank] = logits
        return whole(torch.cat(parts, dim=1), tokens, None, with_entropy, chunk_size, None, with_entropy_grad)

    def find_response_log_probs(args: Any, batch: Any, logits: Any, *, with_entropy: bool = False) -> Any:
        log_probs, entropy = module.calculate_log_probs_and_entropy(
            logits.squeeze(0), module._shift_tokens(batch["unconcat_tokens"]), dist.group.WORLD, with_entropy,
            with_entropy_grad=False,
        )  # fmt: skip
        return module.cut_responses(log_probs.squeeze(-1), batch), (
            [] if entropy is None else module.cut_responses(entropy, batch)
        )

    names = {"calculate_log_probs_and_entropy": calculate_log_probs_and_entropy,
             "find_response_log_probs": find_response_log_probs}  # fmt: skip
    vars(module).update(names)


def run_rank(rank: int, folder: str, is_short: bool) -> None:
    """One of two ranks; with ``is_short`` the second one has no memory for a comparison."""
    sys.path.insert(0, str(SUPPORT / "fake_rl_engine"))
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)

    def train(module: ModuleType, args: argparse.Namespace) -> list[torch.Tensor]:
        batch, leaf = make_batch(), make_logits(rank).requires_grad_()
        reducer = module.make_sum_of_sample_mean(batch["loss_masks"], batch["rollout_mask_sums"])
        loss, _ = module.policy_loss_function(args, batch, leaf, reducer)
        loss.backward()
        assert leaf.grad is not None
        return [loss.detach(), leaf.grad]

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    module = load_loss_module()
    split_vocabulary(module, rank)
    expected = train(module, make_args())
    if is_short and rank == 1:
        vars(torch)["empty"] = refuse
    case = Case(platform="cpu", tensor_parallel=2)
    (found,), _ = run_steps(Path(folder), "s", case=case, train=train, module=module)
    assert all(map(torch.equal, found, expected))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_short", [False, True])
def test_ranks_that_share_a_vocabulary_compare_together_or_not_at_all(tmp_path: Path, is_short: bool) -> None:
    run_ranks(run_rank, str(tmp_path), is_short)
    log = read_ops(TrialDir(tmp_path))
    assert [[shadow.case for shadow in rank.shadows] for rank in log.ranks] == [CASES, CASES]
    shadows = [shadow for rank in log.ranks for shadow in rank.shadows]
    if is_short:
        other, own = "another rank of the tensor-parallel group cannot compare", "OutOfMemoryError: CUDA out of memory."
        assert [shadow.error for shadow in shadows] == [other] * 2 + [own] * 2
        return
    for found in shadows:
        assert found.error == ""
        for gap in (found.log_probs, found.log_probs_no_grad, found.logits_grad):
            assert gap is not None
            assert gap.max_abs is not None
            assert gap.max_abs < 1e-4
