"""The pages of the shipped runs are what the runs say."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rlk_repro.spec import VimeWorkload
from tests.support.run_pages import FOLDER, INDEX, list_runs, render_pages
from tests.support.run_plans import list_all_plans

PAGES = render_pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_equals_its_run(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name], "make goldens"


def test_every_run_has_a_page_and_no_page_is_left_over() -> None:
    assert {path.name for path in FOLDER.iterdir()} == PAGES.keys() == {INDEX, *(f"{run}.md" for run in list_runs())}


@pytest.mark.parametrize(("name", "plan"), list_all_plans(), ids=lambda item: item if isinstance(item, str) else "")
def test_a_page_names_what_a_reader_needs(name: str, plan) -> None:
    page = PAGES[f"{plan.run.run}.md"]
    wanted = [plan.hardware.hardware, *plan.run.may_claim, *plan.run.may_not_claim]
    wanted += [pin.commit for pin in plan.stack.pins.values()]
    if plan.has_enabled:
        wanted += [
            f"| `{op}` | yes | {'not ' if reason else ''}eligible" for op, reason in plan.explain_operators().items()
        ]
    workload = plan.run.workload
    if isinstance(workload, VimeWorkload):
        sources = (workload.model.source, workload.data.source)
        wanted += [getattr(source, "revision", "") or "" for source in sources]
        wanted += ["`--global-batch-size`", f"`{workload.grpo.global_batch_size}`"]
    assert [text for text in wanted if text not in page] == []


@pytest.mark.parametrize("run", list_runs())
def test_the_commands_of_a_page_end_well(call, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLK_REPRO_RUNS", str(tmp_path))
    block = PAGES[f"{run}.md"].partition("```sh\n")[2].partition("```")[0]
    commands = [shlex.split(line) for line in block.splitlines()]
    assert commands
    for words in commands:
        assert words[0] == "rlk-repro"
        assert "--dry-run" in words or "--cluster" not in words  # on this machine every run without one is the CPU's
        code, _, error = call(*words[1:], *(() if "--dry-run" in words else ("--dry-run",)))
        assert code == 0, error


def test_unpinned_parts_are_named() -> None:
    assert "| data | hub, `zhuzilin/gsm8k`" in PAGES["qwen3-4b.md"]
    assert "**not pinned**" in PAGES["qwen3-4b.md"]
    assert "**not pinned**" not in PAGES["qwen3-30b-a3b.md"]
