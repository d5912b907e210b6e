"""Benchmarks that measure sglrl and its peers in the same run: see README.md."""
