"""A browser shows without scrolling the verdict, its size, the next command and the plot."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import pytest

from rlk_repro.base import proc
from rlk_repro.replay.recorded import load_result
from rlk_repro.report.html import render_html
from rlk_repro.report.index import render_index
from rlk_repro.report.view import Context
from rlk_repro.rundir.results import Analysis
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
WANTED = ("#verdict-word", "#verdict .answer", "#verdict .next", "#verdict figure svg")
SCRIPT = """<script>document.title = JSON.stringify({height: document.documentElement.scrollHeight,
boxes: %s.map(name => document.querySelector(name)?.getBoundingClientRect())})</script></body>"""

SCREENS = ((1280, 800), (390, 844))

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine: install the package chromium"),
]


def measure(
    page: str, folder: Path, width: int, height: int, wanted: Sequence[str] = WANTED
) -> tuple[int, list[dict[str, float]]]:
    """Return the height of the page, and the box of each wanted part, in a browser of this size."""
    page = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", SCRIPT % json.dumps(wanted))
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
    assert None not in found["boxes"], wanted
    return found["height"], found["boxes"]


def require_seen(boxes: Sequence[dict[str, float]], width: int, height: int) -> None:
    """Require that no part is below or beside the screen."""
    assert max(box["bottom"] for box in boxes) <= height, boxes
    assert max(box["right"] for box in boxes) <= width, boxes


def load(name: str) -> tuple[Analysis, Context]:
    return load_result(ROOT / "docs" / "evidence" / f"{name}.tgz", is_linked=False)


@pytest.mark.parametrize("name", ["faster", "inconclusive", "not-comparable", "all-fallback", "evidence"])
@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_the_first_screen_holds_the_answer(name: str, width: int, height: int, tmp_path: Path) -> None:
    """On a telephone the plot begins on the screen and ends below; ``all-fallback`` is a demo without RL-Kernel."""
    page = render_html(*load("qwen3-4b-random-h200")) if name == "evidence" else render_html(EXAMPLES[name]())
    _, boxes = measure(page, tmp_path, width, height)
    *parts, plot = boxes
    require_seen(parts, width, height)
    assert (plot["bottom"] if width > height else plot["top"]) <= height


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_the_first_screen_of_operators_holds_their_sizes_and_a_plot(width: int, height: int, tmp_path: Path) -> None:
    page = render_html(*load("operators-h200"))
    assert "as a multiple of vime&#x27;s speed: logp 3.05 to 15.6" in page
    require_seen(measure(page, tmp_path, width, height)[1], width, height)


@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_the_first_screen_of_the_index_holds_verdict_size_and_interval(width: int, height: int, tmp_path: Path) -> None:
    found = [load(name) for name in ("qwen3-4b-random-h200", "qwen3-4b-random-live-h200")]
    page = render_index(found)
    assert "-2.37 % (-3.22 % to -1.52 %)" in page.replace("\u00a0", " ")
    wanted = [f"tbody tr:nth-child({row}) > :nth-child({cell})" for row in (1, 2) for cell in range(1, 8)]
    require_seen(measure(page, tmp_path, width, height, wanted)[1], width, height)


@pytest.mark.parametrize(
    "name", ["qwen3-4b-random-live-h200", "qwen3-4b-agreement-h200", "module-qwen3-4b-sessions-h200"]
)
def test_a_folded_page_is_short(name: str, tmp_path: Path) -> None:
    height, boxes = measure(render_html(*load(name)), tmp_path, 1280, 800)
    assert height <= 8000
    require_seen(boxes, 1280, 800)
