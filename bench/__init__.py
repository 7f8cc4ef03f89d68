"""Benchmarks of cupyflash beside its peers; bench/README.md holds the protocol and the commands."""
