"""What was planned and why: the `Report` and its renderers. Imports no torch."""

from __future__ import annotations

from autoremat.reporting.fields import ReportError
from autoremat.reporting.model import (
    SCHEMA,
    GraphReport,
    Report,
    ValueAction,
    ValueReport,
)
from autoremat.reporting.text import format_nbytes, one_line, summary

__all__ = [
    "SCHEMA",
    "GraphReport",
    "Report",
    "ReportError",
    "ValueAction",
    "ValueReport",
    "format_nbytes",
    "one_line",
    "summary",
]
