"""Whole transformer blocks in one launch: ``cuda_src/transformer``."""
