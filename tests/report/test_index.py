"""The page over several bundles is made from the published evidence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.report.test_html import ALLOWED_TAGS, Page
from tests.support.bundle_examples import make_run_dir

Call = Callable[..., tuple[int, str, str]]
BUNDLES = [str(path) for path in sorted((ROOT / "docs" / "evidence").glob("module-*.tgz"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rlk_repro.replay.recorded import load_result
    from rlk_repro.report.index import write_index

    folder = tmp_path_factory.mktemp("site")
    loaded = [load_result(Path(bundle), is_linked=False) for bundle in BUNDLES]
    write_index(loaded[::-1], folder)
    return folder


def test_every_link_leads_to_a_report_of_that_bundle(site: Path) -> None:
    page = (site / "index.html").read_text()
    links = re.findall(r'href="([0-9a-f]{64})/report\.html"', page)
    assert len(set(links)) == len(BUNDLES)
    for bundle_id in links:
        assert (site / bundle_id / "report.html").is_file()
        assert f"<code>{bundle_id[:12]}</code>" in page


def test_the_page_needs_no_network_and_is_well_formed(site: Path) -> None:
    page = (site / "index.html").read_text()
    found = Page(page)
    assert set(found.tags) <= ALLOWED_TAGS
    assert found.values("src") == []
    assert not any(value.startswith("http") for value in found.values("href"))
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
