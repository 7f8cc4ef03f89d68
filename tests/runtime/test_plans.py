"""How many plans are kept: the latest ones, and of packed sequences few (no GPU needed)."""

import concurrent.futures

from cupyflash.runtime.operation import Plans


def test_the_oldest_plan_makes_room():
    plans = Plans(most=3)
    for number in range(10):
        assert plans.add((number,), f"plan {number}") == f"plan {number}"
    assert list(plans) == [(7,), (8,), (9,)]
    plans.add((0,), "again")
    assert plans[0,] == "again" and (7,) not in plans


def test_threads_that_keep_plans():
    plans = Plans(most=5)

    def fill(start):
        for number in range(2000):
            plans.add((start, number), None)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(8)))
    assert len(plans) == 5
