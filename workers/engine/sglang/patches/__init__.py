"""Corrections of SGLang. Without a correction, some results are wrong or a feature fails."""
