"""The HTML page is complete, self-contained and accessible, and a run's texts cannot change its markup."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_repro.base.files import dump_json
from rlk_repro.base.findings import Finding, Level
from rlk_repro.report import Context, write_report
from rlk_repro.report import evidence as evidence_module
from rlk_repro.report.answer import describe_words
from rlk_repro.report.html import load_style, render_html
from rlk_repro.report.labels import clean
from rlk_repro.rundir.manifest import Manifest, Unknown
from rlk_repro.rundir.results import Analysis
from rlk_repro.workloads import WORKLOADS
from tests.support.analysis_examples import (
    EXAMPLES,
    HOSTILE,
    all_fallback,
    faster,
    hostile,
    huge,
    missing_metrics,
    not_comparable,
    small,
    with_failures,
)

REFERENCE = WORKLOADS["reference"]

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


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_word_headline_and_every_trial(pages: dict[str, Page], name: str) -> None:
    analysis = EXAMPLES[name]()
    text = pages[name].text
    assert describe_words(analysis) in pages[name].words
    assert clean(analysis.verdict.headline.removeprefix(f"{analysis.verdict.word}: "))[1:] in text
    for trial in analysis.trials:
        assert clean(trial.name) in text
        assert clean(trial.reason) in text


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
    assert "rlk-repro verify 'a b'\"'\"'; rm -rf ~/.tgz'" in page.text


def test_a_number_leads_to_the_steps_and_lines_it_came_from() -> None:
    html = render_html(faster(), Context(run_directory=".."))
    assert '<a href="#metric-0-trial-9">' in html
    column = '<th scope="col" id="metric-0-trial-9" class="number"><a href="../trials/09-p1-enabled/stdout.log">'
    assert f"{column}09-p1-enabled</a></th>" in html
    assert "<code>trials/09-p1-enabled/stdout.log:120-414</code>" in html
    value = faster().trials[0].series[0].values[3]
    assert f'<th scope="row">3</th><td>{value:.2f} <small>:162</small></td>' in html


def test_a_missing_metric_is_named_as_missing() -> None:
    text = Page(render_html(missing_metrics())).text
    assert "raw_reward higher not recorded 0 not recorded 0 rollout/raw_reward" in text
    for sentence in (
        "raw_reward: not recorded.",
        "train_rollout_logprob_abs_diff: not recorded.",
        "Module times: not recorded.",
        "Peak memory: not recorded.",
    ):
        assert sentence in text


def test_failed_trials_and_lost_pairs_stay_in_the_tables_with_their_reasons() -> None:
    text = Page(render_html(with_failures())).text
    assert "09-p1-enabled 1004 out of memory 7 of 22 6 min 53 s not recorded not recorded missing" in text
    assert "rank 3: torch.OutOfMemoryError while allocating 2.32 GiB" in text
    assert "19-p6-baseline 1009 missing 0 of 22 not recorded" in text
    assert "p3 AB void" in text
    assert "p1 AB dropped not recorded not recorded not recorded a trial did not finish" in text
    assert "nodes.node-1.gpu.driver warning 575.57.08 580.65.06" in text


def test_a_failed_gate_comes_first_in_what_the_verdict_rests_on() -> None:
    text = Page(render_html(not_comparable())).text
    assert "gates 1 failed (raw_reward), 1 undecided (train_rollout_logprob_abs_diff), 6 passed" in text


def test_only_reference_trainer_reports_warn_that_they_do_not_measure_vime() -> None:
    assert Page(render_html(all_fallback())).text.count(REFERENCE.WORDS.scope) == 2
    assert REFERENCE.WORDS.scope not in Page(render_html(small())).text


def test_an_exploratory_run_says_so_before_its_verdict() -> None:
    analysis = small()
    verdict = dataclasses.replace(analysis.verdict, is_exploratory=True)
    text = Page(render_html(dataclasses.replace(analysis, verdict=verdict))).text
    assert text.index("Exploratory: the measurement plan was changed") < text.index("Effects")


def test_the_page_shows_how_to_check_and_run_again() -> None:
    text = Page(render_html(small(), Context(bundle="runs/x/bundle.tgz"))).text
    for command in (
        "mkdir check && tar xzf runs/x/bundle.tgz -C check",
        "(cd check && sha256sum -c --quiet SHA256SUMS)",
        "rlk-repro verify runs/x/bundle.tgz",
        "rlk-repro replay runs/x/bundle.tgz --analyze-only",
        "rlk-repro replay runs/x/bundle.tgz run the same experiment",
    ):
        assert command in text


def test_manifests_findings_and_claims_of_the_context_are_shown() -> None:
    context = Context(
        manifests=(
            Manifest(node="n1", sections={"gpu": {"driver": "575", "count": 8, "nccl": Unknown("no library loaded")}}),
            Manifest(node="n2", sections={"gpu": {"driver": "580", "count": 8, "nccl": Unknown("no library loaded")}}),
        ),
        findings=(Finding(Level.BLOCKING, "gpu.count", "8", "4"),),
        may_claim=("speed of the training step",),
        may_not_claim=("speed of other models",),
    )
    text = Page(render_html(small(), context)).text
    assert "gpu.count 8 gpu.driver (n1) 575 gpu.driver (n2) 580 gpu.nccl unknown (no library loaded)" in text
    assert "gpu.count blocking 8 4" in text
    assert "speed of the training step What this report does not show:" in text
    assert "speed of other models" in text


def test_steps_beyond_the_limit_are_left_to_the_analysis_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "MAX_VALUES", 32)
    text = Page(render_html(small())).text
    assert "The table has the first 2 of 4 steps; the bundle's analysis file has all steps." in text


def test_tables_are_headed_and_plots_are_described(pages: dict[str, Page]) -> None:
    page = pages["faster"]
    assert len(page.values("scope")) == page.tags["th"]
    assert page.values("role").count("img") == page.tags["svg"] == 8
    assert page.tags["desc"] == 8
    assert page.tags["figcaption"] == page.tags["figure"] == 8
    assert [word for tag, name, word in page.attributes if (tag, name) == ("html", "lang")] == ["en"]
    assert page.tags["h1"] == 1


def test_a_large_run_stays_readable_by_a_browser() -> None:
    analysis = huge()
    began = time.process_time()
    html = render_html(analysis)
    assert time.process_time() - began < 15
    assert len(html) < 8_000_000
    assert "242 steps; the bundle" in html


def _themes() -> dict[str, dict[str, str]]:
    light, dark, *_ = re.findall(r":root \{(.*?)\}", load_style(), re.DOTALL)
    return {
        name: dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block))
        for name, block in (("light", light), ("dark", dark))
    }


def _contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast_and_so_have_marks(theme: str) -> None:
    colours = _themes()[theme]
    for ink in ("ink", "muted", "link", "good", "bad", "open"):
        for ground in ("page", "card"):
            assert _contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for mark in ("baseline", "enabled"):
        for ground in ("page", "shade"):
            assert _contrast(colours[mark], colours[ground]) >= 3, (mark, ground)


def test_a_report_is_two_files_and_nothing_else(tmp_path: Path) -> None:
    page = write_report(small(), tmp_path / "report")
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == ["report.html", "report.md"]
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>\n")
    assert page.with_suffix(".md").read_text(encoding="utf-8").startswith("# qwen3-30b-a3b: inconclusive\n")
