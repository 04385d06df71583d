"""A node has the sources that the stack pins, or a finding says which it has."""

from __future__ import annotations

from typing import get_args

import pytest

from rlk_repro.base.findings import Finding, Level
from rlk_repro.images.pins import match_pins
from rlk_repro.probes import code
from rlk_repro.rundir.manifest import Fact, Manifest, Unknown
from rlk_repro.sources import SECTIONS
from rlk_repro.spec import Pin, Stack

PINNED = Stack(
    stack="pinned", purpose="x", pins={"megatron_lm": Pin(repository="https://git.example/x", commit="1" * 40)}
)
WAY_OUT = ", pinned by stack pinned; --stack host uses what is installed"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ({"megatron": {"commit": "1" * 40, "is_dirty": False}}, None),
        ({"megatron": {"commit": "1" * 40, "is_dirty": Unknown("no checkout")}}, None),
        ({"megatron": {"commit": "1" * 40, "is_dirty": True}}, ("is_dirty", f"{'1' * 40} unchanged", "changed files")),
        ({"megatron": {"commit": "2" * 40}}, ("commit", f"{'1' * 40}{WAY_OUT}", "2" * 40)),
        ({"megatron": {"commit": Unknown("absent")}}, ("commit", f"{'1' * 40}{WAY_OUT}", "unknown (absent)")),
        ({}, ("commit", f"{'1' * 40}{WAY_OUT}", "unknown (not recorded)")),
    ],
)
def test_a_pin_that_is_not_confirmed_blocks(code: dict[str, Fact], expected: tuple[str, str, str] | None) -> None:
    found = list(match_pins(PINNED, Manifest(node="n", sections={"code": code})))
    assert found == ([] if expected is None else
                     [Finding(Level.BLOCKING, f"code.megatron.{expected[0]}", expected[1], expected[2])])  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"commit": Unknown("no checkout"), "tree": "3" * 40}, None),
        (
            {"commit": Unknown("no checkout"), "tree": "4" * 40},
            ("tree", f"{'3' * 40} (the files of {'1' * 12}){WAY_OUT}", "4" * 40),
        ),
        (
            {"commit": Unknown("no checkout"), "tree": Unknown("installed")},
            ("commit", f"{'1' * 40}{WAY_OUT}", "unknown (no checkout)"),
        ),
        ({"commit": "2" * 40, "tree": "3" * 40}, ("commit", f"{'1' * 40}{WAY_OUT}", "2" * 40)),
        (
            {"commit": Unknown("none recorded"), "tree": "3" * 40, "is_dirty": True},
            ("is_dirty", f"{'1' * 40} unchanged", "changed files"),
        ),
        ({"commit": Unknown("no checkout"), "tree": "5" * 40}, None),
        ({"commit": "1" * 40, "tree": "5" * 40, "is_dirty": True}, None),
        ({"commit": "2" * 40, "tree": "5" * 40}, ("commit", f"{'1' * 40}{WAY_OUT}", "2" * 40)),
    ],
)
def test_an_archive_of_the_pinned_tree_is_the_pinned_commit(
    facts: dict[str, Fact], expected: tuple[str, str, str] | None
) -> None:
    pin = PINNED.pins["megatron_lm"].model_copy(update={"tree": "3" * 40, "patched_tree": "5" * 40})
    stack = PINNED.model_copy(update={"pins": {"megatron_lm": pin}})
    found = list(match_pins(stack, Manifest(node="n", sections={"code": {"megatron": facts}})))
    assert found == ([] if expected is None else
                     [Finding(Level.BLOCKING, f"code.megatron.{expected[0]}", expected[1], expected[2])])  # fmt: skip


@pytest.mark.parametrize(("tree", "is_taken"), [("3" * 40, False), ("5" * 40, True)])
def test_a_run_that_needs_the_patch_takes_no_unpatched_sources(tree: str, is_taken: bool) -> None:
    pin = PINNED.pins["megatron_lm"].model_copy(update={"tree": "3" * 40, "patched_tree": "5" * 40})
    stack = PINNED.model_copy(update={"pins": {"megatron_lm": pin}})
    facts: dict[str, Fact] = {"commit": Unknown("no checkout"), "tree": tree}
    manifest = Manifest(node="n", sections={"code": {"megatron": facts}})
    told, without = f"{'5' * 40} (with upstream's patch)", f"{tree} (without this patch)"
    expected = Finding(Level.BLOCKING, "code.megatron.tree", told, without)
    found = list(match_pins(stack, manifest, patched=frozenset({"megatron_lm"})))
    assert found == ([] if is_taken else [expected])


def test_every_pin_of_a_stack_is_a_source_that_manifests_describe() -> None:
    pins = get_args(get_args(Stack.model_fields["pins"].annotation)[0])
    assert set(pins) == set(SECTIONS)
    assert set(SECTIONS.values()) <= code.probe().keys()
