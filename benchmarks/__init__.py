"""Benchmarks of plait: `python -m benchmarks` writes results.json and the table in docs/benchmarks.md."""
