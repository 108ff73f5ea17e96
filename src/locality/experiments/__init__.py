"""The drawings of both papers' figures."""
