"""Reports: run folders in, one page out."""

from locality.report.page import build_report as build_report
