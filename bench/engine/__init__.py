"""The engine of language models, beside transformers."""
