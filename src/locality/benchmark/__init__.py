"""Speed and memory beside a peer with the same weights, measured in the same process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locality.lazy import lazily

if TYPE_CHECKING:
    from locality.benchmark.config import BenchmarkConfig as BenchmarkConfig
    from locality.benchmark.run import machine as machine
    from locality.benchmark.run import run_benchmark as run_benchmark
    from locality.benchmark.run import to_table as to_table

__all__, __getattr__ = lazily(__name__, __file__)
