"""Reports: run folders in, one page or one picture out."""

from locality.report.page import build_report, draw_summary

__all__ = ["build_report", "draw_summary"]
