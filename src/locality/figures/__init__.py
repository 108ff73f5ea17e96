"""Figures from records: style, curves, attention maps and charts."""
