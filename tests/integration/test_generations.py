"""Which generation of RL-Kernel is taken, and what the later one's dispatch resolves to.

RL-Kernel is the double of tests/support/fake_rl_engine_runtime.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlk_repro.integration.route import rl_kernel
from rlk_repro.integration.route.rl_kernel import LoadedOperator, load_contracts, load_operator
from rlk_repro.integration.route.vocab_parallel import VocabParallelLogp
from rlk_repro.operators import Case, Reason, Refusal
from tests.support.later_rl_kernel import (
    CPU,
    EARLIER,
    LATER,
    get_registry,
    importing_from,
    make_call,
    make_problem,
    make_route,
    write_package,
)


@pytest.fixture(autouse=True)
def packages(tmp_path: Path) -> Iterator[Path]:
    """The folder from which this process imports RL-Kernel."""
    folder = tmp_path / "packages"
    folder.mkdir()
    with importing_from(folder):
        yield folder


@pytest.fixture
def double(packages: Path) -> Any:
    write_package(packages, LATER, EARLIER)
    return get_registry()


def test_the_newer_one_is_taken_where_both_are_there_and_gives_the_same_operators(double: Any) -> None:
    importlib.import_module("rl_engine.kernels.registry")
    for name, class_name in [("logp", "NativeLogpOp"), ("ratio_kl", "NativeRatioKLOp")]:
        found = load_operator(name, "cpu")
        assert isinstance(found, LoadedOperator)
        assert (found.implementation, found.version) == (class_name, "unversioned (rl_engine.runtime.registry)")
        assert found.op is double.get_op(name)
        assert found.provenance is None


def test_the_earlier_one_has_no_contracts(packages: Path) -> None:
    write_package(packages, EARLIER)
    assert load_contracts() == Refusal(Reason.GENERATION, "rl_engine.kernels.registry")
    found = load_operator("logp", "cpu")
    assert isinstance(found, LoadedOperator)
    assert found.version == "unversioned (rl_engine.kernels.registry)"


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"rlk_repro_build.json": {"commit": "036450b82b551dd7"}}, "0.1.0 at 036450b82b55"),
        ({"direct_url.json": {"vcs_info": {"commit_id": "202f0e30e56729d1"}}}, "0.1.0 at 202f0e30e567"),
        ({"direct_url.json": {"dir_info": {}}, "rlk_repro_build.json": {"commit": None}}, "0.1.0"),
        ({}, "0.1.0"),
    ],
)
def test_a_version_names_the_commit_where_its_installation_did(
    packages: Path, record: dict[str, Any], expected: str
) -> None:
    folder = packages / "rl_kernel-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: RL-Kernel\nVersion: 0.1.0\n")
    for name, value in record.items():
        (folder / name).write_text(json.dumps(value))
    assert rl_kernel.find_version() == expected


def test_kernels_are_asked_for_where_there_are_any_and_recorded(double: Any) -> None:
    double.platform = "cuda"
    found = VocabParallelLogp.find(Case(platform="cuda", tensor_parallel=4, context_parallel=2))
    assert isinstance(found, VocabParallelLogp)
    assert found.loaded.implementation == "TritonVocabParallelLogprobOp"
    assert found.loaded.provenance == {
        "requested_backend": "production",
        "actual_backend": "triton-vocab-parallel-logp-ws2",
        "backend_enum": "TRITON_VOCAB_PARALLEL_LOGP",
        "platform": "cuda",
        "fallback": False,
        "prior_rejections": (),
    }


def test_a_class_that_does_not_count_is_refused_whatever_it_calls_itself(double: Any) -> None:
    real = double.get_logprob_op

    def dispatch(contract: Any, requested_backend: str) -> Any:
        result = real(contract, requested_backend=requested_backend)
        return type(result)(op=op, capability=result.capability, provenance=result.provenance | {"actual_backend": who})

    double.get_logprob_op = dispatch
    op, who = object(), "pytorch-vocab-parallel-logp-ws2"
    found = VocabParallelLogp.find(CPU)
    assert isinstance(found, Refusal)
    assert found.reason is Reason.NOT_ACCEPTED
    assert found.detail.startswith("object, because")
    op, who = double.backends["cpu"][0].op, "triton-vocab-parallel-logp-ws2"
    assert VocabParallelLogp.find(CPU) == Refusal(
        Reason.NOT_ACCEPTED, "VocabParallelLogprobOp, which calls itself triton-vocab-parallel-logp-ws2"
    )


def test_a_shape_that_its_implementation_does_not_serve_is_refused_before_the_call(double: Any) -> None:
    route = make_route()
    registry = importlib.import_module("rl_engine.runtime.registry")
    only = type(registry.REFERENCE.capability)(
        "pytorch-vocab-parallel-logp-ws2",
        frozenset({importlib.import_module(rl_kernel.CONTRACTS).LogprobDType("fp32")}),
        implementation_kind="reference",
    )
    double.backends["cpu"][0] = registry.Backend("PYTORCH_VOCAB_PARALLEL_LOGP", registry.REFERENCE.op, only)
    logits, tokens, _ = make_problem(0)
    refusal = route.refuse(make_call(logits.bfloat16(), tokens))
    assert refusal is not None
    assert str(refusal).startswith(
        "RL-Kernel's own dispatch refuses the operator (PYTORCH_VOCAB_PARALLEL_LOGP: serves no bf16 logits | "
    )
    assert route.refuse(make_call(logits, tokens)) is None
