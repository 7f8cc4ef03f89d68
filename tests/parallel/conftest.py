"""Groups of processes, which all tests of a run share."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_parallel_*.py"]


@pytest.fixture(scope="session")
def groups():
    """{size: group}; one that a failed test has left in the middle of a call is replaced."""
    found = {}
    yield found
    for ranks in found.values():
        ranks.__exit__()


@pytest.fixture
def two(groups):
    return _group(groups, 2)


@pytest.fixture
def four(groups):
    return _group(groups, 4)


def _group(groups, size):
    from ranks import Ranks

    if size in groups and groups[size].broken:
        groups.pop(size).__exit__()
    if size not in groups:
        groups[size] = Ranks(size)
    return groups[size]
