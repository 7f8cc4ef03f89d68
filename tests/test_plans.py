"""How many plans are kept: the latest ones, and of packed sequences few (no GPU needed)."""

import concurrent.futures

from cupyflash.runtime import plan as kernel_plan


def test_the_oldest_plan_makes_room():
    plans = {}
    for number in range(10):
        kernel_plan.keep(plans, (number,), f"plan {number}", most=3)
    assert list(plans) == [(7,), (8,), (9,)]
    kernel_plan.keep(plans, (0,), "again", most=3)
    assert plans[0,] == "again" and (7,) not in plans


def test_threads_that_keep_plans():
    plans = {}

    def fill(start):
        for number in range(2000):
            kernel_plan.keep(plans, (start, number), None, most=5)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(fill, range(8)))
    assert len(plans) == 5
