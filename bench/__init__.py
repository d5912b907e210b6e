"""Benchmarks that measure sglrl and its peers in the same run. README.md describes them."""
