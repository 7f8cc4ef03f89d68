"""Attention over the tokens of several GPUs, by torch.distributed."""
