"""Steps of decoding: attention to a cache, stacks of transformer blocks."""
