"""Import SGLang in the fork server that forks workers for CPUs."""

from __future__ import annotations

from .preload import load

load("cpu")
