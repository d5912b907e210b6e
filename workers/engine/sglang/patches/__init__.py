"""Corrections of SGLang. Without them, results would be wrong."""
