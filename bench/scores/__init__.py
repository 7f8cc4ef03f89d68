"""Benchmarks of scores and masks of the caller's own."""
