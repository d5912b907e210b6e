"""Tests with real worker processes, sockets and kills, plain actors and the fake engine."""
