"""What a reader sees without scrolling, asked of a browser: the verdict, its size, what to do now, and the plot."""

from __future__ import annotations

import json
import re
import shutil
from html import unescape
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.replay.recorded import load_result
from rlk_repro.report.html import render_html
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
WANTED = ("#verdict-word", "#verdict .answer", "#verdict .next", "#verdict figure svg")
SCRIPT = """<script>document.title = JSON.stringify({height: document.documentElement.scrollHeight,
bottoms: %s.map(name => document.querySelector(name)?.getBoundingClientRect().bottom)})</script></body>"""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine: install the package chromium"),
]


def measure(page: str, folder: Path, width: int, height: int) -> tuple[int, list[float]]:
    """The height of the page, and how far down each wanted part ends, as a browser of this size lays it out."""
    page = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", SCRIPT % json.dumps(WANTED))
    (folder / "page.html").write_text(page)
    frame = f'<iframe src="page.html" style="width:{width}px;height:{height}px"></iframe>'
    (folder / "frame.html").write_text(
        f"<body>{frame}<script>onload = () => document.title = frames[0].document.title</script></body>"
    )
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--virtual-time-budget=9000",
    )
    place = (folder / "frame.html").as_uri()
    done = proc.run(
        [BROWSER, *flags, "--virtual-time-budget=9000", f"--user-data-dir={folder / 'profile'}", "--dump-dom", place],
        timeout_s=60,
    )
    (title,) = re.findall("<title>(.*?)</title>", done.stdout)
    found = json.loads(unescape(title))
    return found["height"], found["bottoms"]


@pytest.mark.parametrize("name", ["faster", "inconclusive", "not-comparable"])
@pytest.mark.parametrize(("width", "height", "num_parts"), [(1280, 800, 4), (390, 844, 3)])
def test_the_first_screen_holds_the_answer(name: str, width: int, height: int, num_parts: int, tmp_path: Path) -> None:
    """On a telephone the plot begins there and ends below."""
    _, bottoms = measure(render_html(EXAMPLES[name]()), tmp_path, width, height)
    assert max(bottoms[:num_parts]) <= height, bottoms


@pytest.mark.parametrize("name", ["vime-live-h200", "vime-train-only-r3-h200", "module-qwen3-4b-sessions-h200"])
def test_a_folded_page_is_short(name: str, tmp_path: Path) -> None:
    analysis, context = load_result(ROOT / "docs" / "evidence" / f"{name}.tgz", is_linked=False)
    height, bottoms = measure(render_html(analysis, context), tmp_path, 1280, 800)
    assert height <= 8000
    assert all(bottom <= 800 for bottom in bottoms)
