"""Render sections as one HTML page without external files or unescaped text; a report also has no script.

The page's content security policy also forbids network access and any script but the page's own, in case escaping
fails.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from rlk_repro.report.blocks import Section
from rlk_repro.report.labels import clean, prose
from rlk_repro.report.sections import make_sections
from rlk_repro.report.view import Context, make_view
from rlk_repro.rundir.results import Analysis

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_html(analysis: Analysis, context: Context | None = None) -> str:
    return render_page(make_sections(make_view(analysis, context)))


def render_page(sections: Sequence[Section], script: str = "") -> str:
    """Render a page; ``script`` names a file of this package, and the page's policy allows these bytes alone."""
    first, *rest = sections
    policy, code = POLICY, ""
    if script:
        code = _read(script)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    page = _load_template().render(first=first, rest=rest, policy=policy, css=_read("report.css"), script=code)
    return page + "\n"


@cache
def _load_template() -> Template:
    """Load the template, in which forgetting to escape is impossible: every text is cleaned and escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_finalize)
    environment.filters["code"] = lambda text: Markup(escape(clean(text)))  # noqa: S704
    environment.filters["beside"] = lambda row, kinds: zip(row[1:], kinds[1:], strict=True)
    environment.filters["kind"] = lambda block: type(block).__name__
    return environment.from_string(_read("report.html.j2"))


def _finalize(value: Any) -> Any:
    return value if isinstance(value, Markup) else prose(str(value))


def _read(name: str) -> str:
    return resources.files("rlk_repro.report").joinpath(name).read_text(encoding="utf-8")
