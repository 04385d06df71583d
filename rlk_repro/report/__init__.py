"""Make the reports of one analysis: a terminal summary, Markdown and one HTML page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from rlk_repro.base.files import write_text
from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.report.view import Context
from rlk_repro.rundir.results import Analysis

HTML_NAME: Final = "report.html"
MARKDOWN_NAME: Final = "report.md"

__all__ = ["Context", "write_report"]


def write_report(analysis: Analysis, directory: Path, context: Context | None = None) -> Path:
    """Write a report as HTML and Markdown into ``directory``, and return the path of the HTML page.

    The commands in the report name the bundle's file without its folder, because a reader may move the report.
    """
    if context is not None:
        context = replace(context, bundle=Path(context.bundle).name)
    page = directory / HTML_NAME
    write_text(page, render_html(analysis, context))
    write_text(directory / MARKDOWN_NAME, render_markdown(analysis, context))
    return page
