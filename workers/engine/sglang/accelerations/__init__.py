"""Faster replacements for parts of SGLang. The results stay the same, except for rounding."""
