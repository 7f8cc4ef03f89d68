"""All benchmarks share these: checks, providers, results, tables and pictures."""
