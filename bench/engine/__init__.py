"""The engine of language models, beside transformers, and a folder of real weights for it."""
