"""Benchmarks against the peers, measured in the same run: see README.md."""
