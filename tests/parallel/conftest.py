"""Groups of processes, which start once for all tests of a module."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_parallel_*.py"]


@pytest.fixture(scope="module")
def two():
    from ranks import Ranks

    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four():
    from ranks import Ranks

    with Ranks(4) as ranks:
        yield ranks
