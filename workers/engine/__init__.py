"""Engines that produce tokens: ``protocol`` says what one is, ``fake`` is deterministic and needs
no torch, ``sglang`` is the real one."""
