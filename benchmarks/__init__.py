"""What plait itself costs: `python -m benchmarks` measures, writes results.json and the table in docs/benchmarks.md."""
