"""Engines that produce tokens.

``protocol`` defines the interface. ``fake`` is deterministic and needs no torch. ``sglang`` runs
models with SGLang.
"""
