"""Speed and memory beside a peer with the same weights, measured in the same process."""

from locality.benchmark.suite import BenchmarkConfig, run_benchmark, to_table

__all__ = ["BenchmarkConfig", "run_benchmark", "to_table"]
