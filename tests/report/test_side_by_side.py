"""``report A B -o DIR``: one page with a column for each result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests import ROOT

Call = Callable[..., tuple[int, str, str]]
EVIDENCE = ROOT / "docs" / "evidence"
BUNDLES = [
    str(EVIDENCE / f"{name}-h200.tgz") for name in ("module-qwen3-4b-sessions", "module-qwen3-4b-tp2", "operators")
]


def test_several_bundles_have_one_page_with_a_column_each(call: Call, tmp_path: Path) -> None:
    code, _, err = call("report", *BUNDLES, "-o", str(tmp_path))
    page = (tmp_path / "index.html").read_text()
    assert (code, err) == (0, f"results side by side: {tmp_path / 'index.html'}\n")
    for number in (1, 2, 3):
        assert f'href="{number}/report.html"' in page
        assert (tmp_path / str(number) / "report.html").is_file()
    for text in ("faster, same memory", "no comparison", "23fb06c17127", "-78.10", "raw_reward", "≠"):
        assert text.replace(" ", "\N{NO-BREAK SPACE}") in page or text in page, text
    assert all(page.index(f">{title}</h2>") for title in ("Answers", "Effects", "Gates", "What ran"))
    assert '<td class="prose">with RL-Kernel' in page, "an answer is a sentence and wraps"


def test_one_bundle_has_no_such_page(call: Call, tmp_path: Path) -> None:
    assert call("report", BUNDLES[0], "-o", str(tmp_path))[0] == 0
    assert not (tmp_path / "index.html").exists()
