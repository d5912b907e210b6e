"""Tests of a real SGLang engine on CPU against Hugging Face transformers."""
