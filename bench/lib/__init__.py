"""What the benchmarks share: clock, checks, providers, results, tables, pictures."""
