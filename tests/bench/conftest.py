"""Fixtures of the tests of benchmarks, which need torch and rich as the benchmarks do."""

import importlib.util

import pytest

if not all(map(importlib.util.find_spec, ("torch", "rich"))):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def benchmarks(monkeypatch, tmp_path):
    """Runs small benchmarks on the CPU; see small_benchmarks.py."""
    from small_benchmarks import Benchmarks

    return Benchmarks(monkeypatch, tmp_path)
