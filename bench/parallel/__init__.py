"""Benchmarks of attention over the tokens of several GPUs."""
