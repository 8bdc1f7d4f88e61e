import time

import pytest

from feddpms.clock import Clock


def test_time_counts_for_the_innermost_part():
    clock = Clock()
    time.sleep(0.05)  # in no part
    with clock.part("train"):
        time.sleep(0.1)
        with clock.part("synthesis"):
            time.sleep(0.2)
        time.sleep(0.1)
    spent = clock.taken()
    assert spent["train"] == pytest.approx(0.2, abs=0.08)
    assert spent["synthesis"] == pytest.approx(0.2, abs=0.08)
    assert sum(spent.values()) == pytest.approx(0.4, abs=0.12)
    assert not clock.taken()


def test_a_part_that_fails_is_closed():
    clock = Clock()
    with pytest.raises(ZeroDivisionError), clock.part("train"):
        1 / 0  # noqa: B018
    with clock.part("evaluate"):
        pass
    assert set(clock.taken()) == {"train", "evaluate"}
