"""RL-Kernel's real kernels behind the routes, on a GPU: numbers against float64, gradients, what ran and was mended."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rlk_repro.bench.measure import record_kernels
from rlk_repro.integration.measure.installation import Installation
from rlk_repro.integration.route.log_probs import Shard, select_with_grad
from rlk_repro.integration.route.rl_kernel import load_operator
from rlk_repro.integration.route.table import _find_operators
from rlk_repro.integration.switch import Mode, Settings, install_into, probe_platform
from rlk_repro.logs.ops import read_ops
from rlk_repro.operators import OPERATORS, Case, Refusal
from rlk_repro.rundir.paths import TrialDir
from tests.support.loss_examples import load_loss_module, make_args, make_batch, make_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    # torch's own compiler and profiler use what torch has deprecated
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


@pytest.fixture(autouse=True)
def rl_kernel() -> None:
    found = load_operator("ratio_kl", probe_platform())
    if isinstance(found, Refusal):
        pytest.skip(str(found))


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RL-Kernel's Hopper class, which takes rows of a multiple of 16 bytes only: its Triton class then."""
    from rl_engine.kernels.registry import kernel_registry

    backends = kernel_registry._priority_map.get("cuda", {})
    kept = [item for item in backends.get("batch_invariant_logp", ()) if "SM90" not in item.name]
    monkeypatch.setitem(backends, "batch_invariant_logp", kept)


def install(folder: Path, *ops: str) -> tuple[object, Installation]:
    module = load_loss_module()
    settings = Settings(mode=Mode.REQUIRE, ops=ops, ops_dir=folder / "ops")
    return module, install_into(module, settings, trainer="example", case=Case(platform=probe_platform()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "columns", [136, 1024, 32000, 151936]
)  # rows of whole 16 bytes: the SM90 class takes no others
def test_log_probs_gradient_and_entropy_are_as_good_as_float64_allows(
    tmp_path: Path, any_size: None, columns: int, dtype: torch.dtype
) -> None:
    check_numbers(tmp_path, columns, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1032, 32000, 151936])
def test_the_class_that_rl_kernel_prefers_is_as_good(tmp_path: Path, columns: int, dtype: torch.dtype) -> None:
    check_numbers(tmp_path, columns, dtype)


def check_numbers(tmp_path: Path, columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(columns)
    logits = (torch.randn(37, columns, device="cuda", generator=generator) * 3).to(dtype)
    tokens = torch.randint(columns, (37,), device="cuda", generator=generator)
    grad = torch.randn(37, device="cuda", generator=generator)
    exact = logits.double().requires_grad_()
    full = exact.log_softmax(dim=-1)
    expected = full.gather(1, tokens.unsqueeze(1))
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double().unsqueeze(1), retain_graph=True)
    entropy = -(full.exp() * full).sum(dim=-1).detach()
    module, installation = install(tmp_path, "logp", "ratio_kl")
    tolerance = 4e-6 if dtype == torch.float32 else 1e-5
    with installation:
        calculate = module.calculate_log_probs_and_entropy  # type: ignore[attr-defined]
        with torch.no_grad():
            passed, passed_entropy = calculate(logits, tokens, None, with_entropy=True)
        leaf = logits.clone().requires_grad_()
        values, with_entropy = calculate(leaf, tokens, None, with_entropy=True, with_entropy_grad=False)
        (found,) = torch.autograd.grad(values, leaf, grad.unsqueeze(1))
        plain, _ = calculate(leaf, tokens, None)
        installation.end_step(0)
    for one in (passed, values.detach(), plain.detach()):
        torch.testing.assert_close(one.double(), expected.detach(), atol=tolerance, rtol=0)
    for one in (passed_entropy, with_entropy):
        torch.testing.assert_close(one.double(), entropy, atol=1e-5, rtol=0)
    largest = expected_grad.abs().max().item()
    limit = 1e-5 if dtype == torch.float32 else 8e-3
    assert (found.double() - expected_grad).abs().max().item() <= limit * largest


def test_old_log_probs_serve_where_they_are_near_and_are_mended_where_not() -> None:
    ratio_kl = load_operator("ratio_kl", probe_platform())
    assert not isinstance(ratio_kl, Refusal)
    operators, _ = _find_operators(ratio_kl, probe_platform())
    if operators.logp_of_far is None:
        pytest.skip("no indexed log-prob kernel here")
    logits = torch.randn(64, 4096, device="cuda") * 4
    tokens = torch.randint(4096, (64,), device="cuda")
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    expected = exact.log_softmax(dim=-1).gather(1, tokens.unsqueeze(1)).squeeze(1)
    hint = expected.detach().float() + torch.randn(64, device="cuda") * 0.1
    hint[::3] = torch.tensor([0.0, -400.0, 400.0, float("nan"), float("inf"), -60.0] * 4, device="cuda")[:22]
    grad = torch.randn(64, device="cuda")
    values, _ = select_with_grad(operators, leaf, tokens, Shard(0, 1, None), with_entropy=False, hint=hint)
    torch.testing.assert_close(values.detach().double(), expected.detach(), atol=4e-6, rtol=0)
    (found,), (wanted,) = torch.autograd.grad(values, leaf, grad), torch.autograd.grad(expected, exact, grad.double())
    assert (found.double() - wanted).abs().max().item() <= 1e-5 * wanted.abs().max().item()


def test_linear_logp_is_as_good_as_products_of_bfloat16_allow() -> None:
    loaded = load_operator("linear_logp", probe_platform())
    if isinstance(loaded, Refusal):
        pytest.skip(str(loaded))
    hidden = torch.randn(96, 512, device="cuda").bfloat16()
    weight = (torch.randn(4096, 512, device="cuda") / 512**0.5).bfloat16()
    tokens = torch.randint(4096, (96,), device="cuda")
    whole = {"tp_group": None, "vocab_start_index": 0, "global_vocab_size": 4096}
    found = loaded.op(hidden, weight, tokens, None, **whole)
    full = (hidden.double() @ weight.double().T).log_softmax(dim=-1)
    exact = full.gather(1, tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found.double(), exact, atol=1e-2, rtol=0)


def train_on_device(module: object) -> tuple[torch.Tensor, torch.Tensor]:
    args = make_args(use_kl_loss=False, eps_clip_high=0.2, use_rollout_logprobs=False)
    batch = {key: [item.cuda() if isinstance(item, torch.Tensor) else item for item in value]
             if isinstance(value, list) else value.cuda() for key, value in make_batch().items()}  # fmt: skip
    logits = make_logits()
    # rows of whole 16 bytes, because the SM90 class takes no others
    logits = torch.nn.functional.pad(logits, (0, -logits.shape[-1] % 8))
    leaf = logits.cuda().requires_grad_()
    reducer = module.make_sum_of_sample_mean(batch["loss_masks"], batch["rollout_mask_sums"])  # type: ignore[attr-defined]
    loss, _ = module.policy_loss_function(args, batch, leaf, reducer)  # type: ignore[attr-defined]
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def test_a_shadow_finds_both_routes_equal_and_a_step_records_its_energy(tmp_path: Path, any_size: None) -> None:
    module, settings = load_loss_module(), Settings(mode=Mode.REQUIRE, ops=("logp", "ratio_kl"), schedule="ebs",
                                                    ops_dir=tmp_path / "ops")  # fmt: skip
    with install_into(module, settings, trainer="example", case=Case(platform=probe_platform())) as installation:
        for step in range(3):
            installation.begin_step(step)
            train_on_device(module)
            installation.end_step(step)
    log = read_ops(TrialDir(tmp_path))
    shadows = log.ranks[0].shadows
    assert [shadow.case for shadow in shadows] == ["as trained", "peaked"]
    for shadow in shadows:
        assert shadow.error == ""
        assert shadow.calls["ratio_kl"].calls == 1
        for gap in (shadow.log_probs, shadow.log_probs_no_grad, shadow.logits_grad):
            assert gap is not None
            assert gap.max_abs is not None
            assert gap.max_abs < 1e-4
    assert (len(log.energy) == 3) is (probe_platform() == "cuda" and find_spec("pynvml") is not None)


@pytest.mark.parametrize("ops", [("logp", "ratio_kl"), ("logp", "grpo_loss")])
def test_the_loss_agrees_and_the_profiler_sees_the_kernels(
    tmp_path: Path, any_size: None, ops: tuple[str, ...]
) -> None:
    expected = train_on_device(load_loss_module())
    module, installation = install(tmp_path, *ops)
    with installation:
        found = train_on_device(module)
        kernels = record_kernels(lambda: train_on_device(module), limit=1000)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)
    implementation = OPERATORS[ops[1]].find_implementation(
        probe_platform(), installation.ledger.decisions[1].implementation
    )
    assert implementation is not None
    assert all(any(part in name for name in kernels) for part in implementation.kernels)
