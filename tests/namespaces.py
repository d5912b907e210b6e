"""Hosts with links that tests can break (``bench.network``).

::

    with two_hosts() as (one, two):
        server = two.run(PROGRAM, "serve", two.address)
        client = one.run(PROGRAM, "connect", two.address)
        assert client.says() == {"connected": True}
        two.loses = True

``another_host`` and ``other_hosts`` join namespaces to the test's own, so that the test itself can
be one end.

This needs root. Without it the test is skipped. With the environment variable CI set it fails
instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.network import Host, Program, may_make_namespaces, pair, star

__all__ = ["Host", "Program", "another_host", "need_namespaces", "other_hosts", "two_hosts"]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two namespaces that are joined to each other, and to nothing else."""
    need_namespaces()
    with pair(2) as hosts:
        yield hosts


@contextmanager
def another_host() -> Iterator[tuple[Host, Host]]:
    """Yield the test's own namespace, and another one that is joined to it."""
    need_namespaces()
    with pair(1) as hosts:
        yield hosts


@contextmanager
def other_hosts(count: int) -> Iterator[tuple[Host, list[Host]]]:
    """Yield the test's own namespace, and others that are joined to it and to each other."""
    need_namespaces()
    with star(count) as hosts:
        yield hosts


def need_namespaces() -> None:
    """Skip the test, or fail in CI, if this process may not make namespaces."""
    if not may_make_namespaces():
        reason = "network namespaces need root"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
