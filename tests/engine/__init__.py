"""A real SGLang on CPU, against Hugging Face transformers."""
