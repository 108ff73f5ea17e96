"""Run requests: their cost, executors and resuming."""
