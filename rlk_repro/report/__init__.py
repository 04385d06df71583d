"""Make the reports of one analysis: a terminal summary, Markdown and one HTML page.  They can be rebuilt; none is
packed.

Nothing is measured or computed here; every number comes from the ``Analysis``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rlk_repro.base.files import write_text
from rlk_repro.report.html import render_html
from rlk_repro.report.markdown import render_markdown
from rlk_repro.report.view import Context
from rlk_repro.rundir.results import Analysis

HTML_NAME: Final = "report.html"
MARKDOWN_NAME: Final = "report.md"

__all__ = ["Context", "ReportFiles", "write_report"]


@dataclass(frozen=True, kw_only=True)
class ReportFiles:
    html: Path
    markdown: Path


def write_report(analysis: Analysis, directory: Path, context: Context | None = None) -> ReportFiles:
    """Write the two files of a report into ``directory``, each complete or not at all, and nothing else.

    A report may be moved, so its commands name the bundle's file without its folder.
    """
    if context is not None:
        context = replace(context, bundle=Path(context.bundle).name)
    files = ReportFiles(html=directory / HTML_NAME, markdown=directory / MARKDOWN_NAME)
    write_text(files.html, render_html(analysis, context))
    write_text(files.markdown, render_markdown(analysis, context))
    return files
