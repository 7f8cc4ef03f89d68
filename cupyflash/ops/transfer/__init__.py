"""Rows that GPUs write into each other's memory, and sums of what they have written."""
