"""What was planned and why: the `Report` and its renderers. Imports no torch."""

from __future__ import annotations

from autoremat.reporting.curve import CurvePoint, PointKind
from autoremat.reporting.fields import ReportError
from autoremat.reporting.formula import PeakFormula, Piece, SizeSymbol, Term
from autoremat.reporting.model import (
    ASSUMED,
    CHECKPOINTS,
    COMMUNICATED,
    LEFT_OUT,
    NO_THROUGHPUT,
    OTHERWISE,
    SCHEMA,
    SIZES,
    WOULD_WAIT,
    Fact,
    Fallback,
    GraphReport,
    Report,
    ValueAction,
    ValueReport,
)
from autoremat.reporting.remedies import Remedy
from autoremat.reporting.reserved import ReservedCase, ReservedMemory
from autoremat.reporting.resident import ResidentParts
from autoremat.reporting.text import one_line, summary
from autoremat.reporting.throughput import AtBudget, Throughput
from autoremat.reporting.timeline import MemoryTimeline, Span, SpanKind, Step

__all__ = [
    "ASSUMED",
    "CHECKPOINTS",
    "COMMUNICATED",
    "LEFT_OUT",
    "NO_THROUGHPUT",
    "OTHERWISE",
    "SCHEMA",
    "SIZES",
    "WOULD_WAIT",
    "AtBudget",
    "CurvePoint",
    "Fact",
    "Fallback",
    "GraphReport",
    "MemoryTimeline",
    "PeakFormula",
    "Piece",
    "PointKind",
    "Remedy",
    "Report",
    "ReportError",
    "ReservedCase",
    "ReservedMemory",
    "ResidentParts",
    "SizeSymbol",
    "Span",
    "SpanKind",
    "Step",
    "Term",
    "Throughput",
    "ValueAction",
    "ValueReport",
    "one_line",
    "summary",
]
