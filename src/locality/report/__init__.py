"""Reports: run folders in, one page or one picture out."""

from locality.report.page import build_report as build_report
from locality.report.page import draw_summary as draw_summary
