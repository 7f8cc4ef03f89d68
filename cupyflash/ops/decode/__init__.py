"""Decoding: attention with a cache, stacks of transformer blocks, embedding and sampling."""
