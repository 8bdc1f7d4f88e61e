import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from feddpms.algorithms import FedDPMS, Training
from feddpms.config import Run
from feddpms.data import Data, Partition
from feddpms.models import NetSettings
from feddpms.rng import Rng
from feddpms.runs import run

names = st.lists(st.one_of(st.integers(0, 9), st.sampled_from(["a", "b", "1"])), max_size=3)


def draw(generator: torch.Generator) -> list[float]:
    return torch.rand(4, generator=generator).tolist()


def test_the_same_name_gives_the_same_numbers():
    assert draw(Rng(3).torch("batches", 1)) == draw(Rng(3).torch("batches", 1))
    assert Rng(3).numpy("split").integers(2**40) == Rng(3).numpy("split").integers(2**40)


def test_each_call_gives_a_fresh_stream():
    rng = Rng(0)
    first, second = rng.torch("a"), rng.torch("a")
    draw(first)
    assert draw(second) == draw(rng.torch("a"))


def test_names_add_up_along_the_way():
    assert Rng(1).at("client", 2).at(7).number("x") == Rng(1).number("client", 2, 7, "x")
    assert Rng(1).at() == Rng(1)


@pytest.mark.parametrize(
    ("one", "other"), [((1,), ("1",)), (("a", "b"), ("ab",)), ((1, 2), (12,)), ((), ("",))]
)
def test_names_that_look_alike_are_different_streams(one, other):
    assert Rng(0).number(*one) != Rng(0).number(*other)


@settings(deadline=None, max_examples=40)
@given(names, names, st.integers(0, 3), st.integers(0, 3))
def test_streams_differ_where_seed_or_name_differ(one, other, seed, seed2):
    same = (seed, one) == (seed2, other)
    assert (Rng(seed).number(*one) == Rng(seed2).number(*other)) == same


@settings(deadline=None, max_examples=40)
@given(names)
def test_a_number_seeds_torch_and_numpy(path):
    number = Rng(0).number(*path)
    assert 0 <= number < 2**63
    assert Rng(0).torch(*path).initial_seed() == number


def test_streams_are_uncorrelated():
    streams = [torch.randn(4000, generator=Rng(0).torch("client", i)) for i in range(6)]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(6)
    assert correlation.abs().max() < 0.08


def test_drawing_more_of_one_stream_leaves_another_alone():
    rng = Rng(0)
    greedy = rng.torch("greedy")
    torch.rand(1000, generator=greedy)
    assert draw(rng.torch("other")) == draw(Rng(0).torch("other"))


def test_a_whole_run_leaves_the_global_generators_untouched():
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002
    run(
        Run(
            method=FedDPMS(),
            rounds=2,
            data=Data(fraction=0.1),
            partition=Partition(clients=3),
            net=NetSettings(width=0.25),
            local=Training(epochs=1),
        )
    )
    after = (torch.get_rng_state(), random.getstate(), np.random.get_state())  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    for one, other in zip(before[2], after[2], strict=True):
        assert np.array_equal(one, other)
