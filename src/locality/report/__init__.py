"""HTML reports of run folders."""

from locality.report.page import build_report as build_report
