"""The engine of language models: real weights for it."""
