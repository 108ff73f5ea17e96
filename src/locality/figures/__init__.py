"""Figures from records: the look of all of them, curves, attention maps, charts."""
