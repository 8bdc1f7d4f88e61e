import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feddpms.data.shards import held_out


@given(st.lists(st.integers(0, 5), min_size=2, max_size=200).filter(lambda y: len(y) > len(set(y))))
def test_held_out_part_is_a_fifth_of_every_class(y):
    y = np.array(y)
    train, test = held_out(y, "set")
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(len(y)))
    for k in np.unique(y):
        n = (y == k).sum()
        assert (y[test] == k).sum() == (max(round(n / 5), 1) if n > 1 else 0)
        assert k in y[train]
