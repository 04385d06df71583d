"""The HTML page is complete, self-contained and accessible, and a run's texts cannot change its markup."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.base.files import dump_json
from rlk_repro.report import Context
from rlk_repro.report.html import render_html
from rlk_repro.report.labels import clean
from rlk_repro.rundir.results import Analysis
from tests import ROOT
from tests.support.analysis_examples import EXAMPLES, HOSTILE, faster, hostile, made, small
from tests.support.make_run import make_run_dir

VOID = {"meta", "br", "hr", "img", "input", "link"}
ALLOWED_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "nav", "details", "summary"),
    *("a", "h1", "h2", "h3", "p", "div", "dl", "dt", "dd", "ul", "li", "code", "small", "figure", "figcaption"),
    *("table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "desc", "g", "clippath", "circle", "polygon", "polyline", "line", "rect", "path", "text"),
}
NAMES = [name for name in EXAMPLES if name != "huge"]


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"] and data.strip():
            self.words.append(data.replace("\N{NO-BREAK SPACE}", " "))

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {name: Page(render_html(EXAMPLES[name]())) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_well_formed_and_loads_nothing(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    assert set(page.tags) <= ALLOWED_TAGS
    assert page.values("src") == []
    assert [name for _, name, _ in page.attributes if name.startswith("on")] == []
    assert all(value.startswith("#") for value in page.values("href"))
    assert page.values("content")[0].startswith("default-src 'none'; style-src 'unsafe-inline'")


@pytest.mark.parametrize("name", NAMES)
def test_every_link_inside_the_page_has_a_target(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    ids = Counter(page.values("id"))
    assert [key for key, number in ids.items() if number > 1] == []
    assert {value[1:] for value in page.values("href")} <= set(ids)
    assert {part for value in page.values("aria-labelledby") for part in value.split()} <= set(ids)


def test_the_same_analysis_gives_the_same_bytes_fresh_or_from_its_file() -> None:
    fresh = render_html(faster())
    assert render_html(dataclasses.replace(faster())) == fresh
    assert render_html(Analysis.from_json(json.loads(dump_json(faster().to_json())))) == fresh


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=80))
def test_no_text_of_a_run_becomes_markup(text: str) -> None:
    analysis = small()
    trial = dataclasses.replace(analysis.trials[0], name=text, reason=text)
    verdict = dataclasses.replace(analysis.verdict, headline=text, reasons=(text,))
    changed = dataclasses.replace(
        analysis, verdict=verdict, run=text, facts={text: text}, trials=(trial, *analysis.trials[1:])
    )
    page = Page(render_html(changed))
    assert set(page.tags) <= ALLOWED_TAGS
    assert page.tags["td"] == Page(render_html(dataclasses.replace(changed, run="x"))).tags["td"]


def test_hostile_names_stay_text_also_in_links_to_files() -> None:
    page = Page(render_html(hostile(), Context(run_directory="..", bundle="a b'; rm -rf ~/.tgz")))
    assert set(page.tags) <= ALLOWED_TAGS
    assert clean(HOSTILE) in page.text
    files = [value for value in page.values("href") if not value.startswith("#")]
    assert files
    assert all(re.fullmatch(r"\.\./[\w./%~-]+", value) for value in files)
    assert "rlk-repro replay 'a b'\"'\"'; rm -rf ~/.tgz'" in page.text


def test_a_large_run_stays_readable_by_a_browser() -> None:
    analysis = made("huge")
    began = time.process_time()
    html = render_html(analysis)
    assert time.process_time() - began < 15
    assert len(html) < 8_000_000
    assert "242 steps; the bundle" in html


# The page over several bundles is made from the published evidence.


Call = Callable[..., tuple[int, str, str]]
BUNDLES = [str(path) for path in sorted((ROOT / "docs" / "evidence").glob("module-*.tgz"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlk_repro.replay.recorded import load_result
    from rlk_repro.report.index import make_entry, write_index

    folder = tmp_path_factory.mktemp("site")
    loaded = [make_entry(*load_result(Path(bundle), is_linked=False)) for bundle in BUNDLES]
    write_index(loaded[::-1], folder)
    return folder


def test_every_link_leads_to_a_report_of_that_bundle(site: Path) -> None:
    page = (site / "index.html").read_text()
    links = re.findall(r'href="([a-z0-9-]+-([0-9a-f]{12}))/report\.html"', page)
    assert len(set(links)) == len(BUNDLES)
    for folder, bundle_id in links:
        report = (site / folder / "report.html").read_text()
        assert "<script" not in report
        assert "script-src" not in report
        assert f"<code>{bundle_id}</code>" in page


def test_the_index_needs_no_network_and_is_well_formed(site: Path) -> None:
    page = (site / "index.html").read_text()
    found = Page(page)
    assert set(found.tags) <= ALLOWED_TAGS | {"script"}
    assert found.values("src") == []
    assert not any(value.startswith("http") for value in found.values("href"))
    # the one script is allowed by its hash, so that no other script runs if escaping ever fails
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in unescape(page)
    assert "default-src" in page
    assert "prefers-color-scheme: dark" in page


def test_the_command_gives_the_same_bytes_in_any_order(call: Call, site: Path, tmp_path: Path) -> None:
    code, out, _ = call("index", *BUNDLES, "-o", str(tmp_path / "site"), "--json")
    assert code == 0
    assert len(json.loads(out)["bundles"]) == len(BUNDLES)
    assert (tmp_path / "site" / "index.html").read_bytes() == (site / "index.html").read_bytes()


def test_an_unsealed_run_is_refused(call: Call, tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    code, _, err = call("index", str(run_dir.root), "-o", str(tmp_path / "site"))
    assert code != 0
    assert err.startswith("rlk-repro: ")
    assert not (tmp_path / "site").exists()
