"""Scores and transcripts to one self-contained HTML file.

``write_report`` takes score records (the lines of a scores file) with their transcripts and writes a page that
needs no network, runs no text of a rollout, and works by keyboard, in light and dark, and on paper.
"""

from trace_fast.report.page import write_report
from trace_fast.report.record import ReportEntry

__all__ = ["ReportEntry", "write_report"]
