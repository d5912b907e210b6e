"""Import SGLang in the fork server of workers on CPUs."""

from __future__ import annotations

from .preload import load

load("cpu")
