"""The tables and figures of both papers as experiments, beside the numbers they print."""
