"""GroupNorm fused with an activation function."""
