import copy

import pytest
import torch
from torch import nn

from feddpms.synthesis import Drawing, extend, generate
from feddpms.types import Shard

CLASSES, LATENT = 4, 3


class Sorter(nn.Module):
    """Decodes a code to an image that holds it; the class is in its first number, in quarters.

    In training mode the classes are the wrong way round, and every call changes a buffer.
    """

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def decode(self, z):
        self.calls += self.training
        return z.view(-1, 1, 1, LATENT)

    def forward(self, x):
        quarter = (x[:, 0, 0, 0] * CLASSES).floor().clamp(0, CLASSES - 1).long()
        right = nn.functional.one_hot(quarter, CLASSES).float()
        return -right if self.training else right


class Never(Sorter):
    """Calls everything class 0."""

    def forward(self, x):
        return nn.functional.one_hot(torch.zeros(len(x), dtype=torch.int64), CLASSES).float()


def matched(*classes, inside=0.5):
    """Means in the middle of the quarters of these classes, told apart by the second number."""
    rows = [[(c + inside) / CLASSES, (i + 1) / 10, 0.9] for i, c in enumerate(classes)]
    deficits = torch.full((len(classes),), 10_000)
    return {"classes": torch.tensor(classes), "means": torch.tensor(rows), "deficits": deficits}


def stream(seed=0):
    return torch.Generator().manual_seed(seed)


def make(classes=(1, 3), net=None, seed=0, **drawing):
    drawing = Drawing(**{"per_class": 20, "spread": 0.2, "filter": "global", **drawing})
    return generate(net or Sorter(), matched(*classes), drawing, stream(seed))


def test_what_is_kept_is_called_by_its_label_in_eval_mode():
    net = Sorter()
    made = make(net=net, spread=0.4)
    assert made.tried > made.accepted
    assert torch.equal(net.eval()(made.shard.x).argmax(1), made.shard.y)


def test_each_class_gets_exactly_what_was_asked_for_in_order():
    made = make((3, 1, 2))
    assert made.shard.y.tolist() == [1] * 20 + [2] * 20 + [3] * 20
    assert made.accepted == len(made.shard) == 60


def test_images_stay_with_their_labels():
    made = make((3, 1, 2), spread=0)
    for x, y in zip(made.shard.x, made.shard.y.tolist(), strict=True):
        assert x[0, 0, 0].item() == pytest.approx((y + 0.5) / CLASSES)


@pytest.mark.parametrize("tries", [1, 2, 5])
def test_tries_bound_what_is_decoded(tries):
    made = make(net=Never(), tries=tries)
    assert made.tried == tries * 20 * 2


def test_each_pass_decodes_only_what_is_still_missing():
    def tried(tries):
        return make(spread=0.4, tries=tries)

    once, twice = tried(1), tried(2)
    assert 0 < once.accepted < 40
    assert twice.tried == 40 + (40 - once.accepted)
    assert once.accepted < twice.accepted <= 40


def test_nothing_more_is_decoded_once_all_is_there():
    assert make(spread=0, tries=10).tried == 40


def test_spread_zero_decodes_exactly_the_mean():
    made = make((2,), spread=0)
    assert torch.equal(made.shard.x.flatten(1), matched(2)["means"].expand(20, -1))


def test_draws_have_the_asked_for_spread_around_the_mean_and_stay_in_the_unit_range():
    made = make((1,), net=Sorter(), per_class=2000, spread=0.02)
    codes = made.shard.x.flatten(1)
    assert codes[:, 0].mean().item() == pytest.approx(1.5 / CLASSES, abs=0.002)
    assert codes[:, 0].std().item() == pytest.approx(0.02, rel=0.1)
    wide = make((1,), spread=3).shard.x
    assert wide.min() >= 0
    assert wide.max() <= 1


@pytest.mark.parametrize(("per_class", "shares"), [(6, [2, 2, 2]), (7, [3, 2, 2]), (2, [1, 1, 0])])
def test_several_means_of_a_class_are_used_in_turn(per_class, shares):
    made = make((1, 1, 1), spread=0, per_class=per_class)
    seconds = made.shard.x[:, 0, 0, 1]
    assert [int(torch.isclose(seconds, torch.tensor(v)).sum()) for v in (0.1, 0.2, 0.3)] == shares


@pytest.mark.parametrize(("amount", "expected"), [("deficit", [4, 1, 6]), ("per_class", [6] * 3)])
def test_a_class_is_filled_to_its_deficit_or_to_the_number_for_every_class(amount, expected):
    means = matched(0, 1, 1, 3, inside=0.5)
    means["deficits"] = torch.tensor([4, 1, 1, 50])
    made = generate(Sorter(), means, Drawing(per_class=6, spread=0, amount=amount), stream())
    assert made.shard.y.bincount(minlength=4)[[0, 1, 3]].tolist() == expected


def test_each_class_draws_around_its_own_means():
    made = make((2, 1, 2), spread=0, per_class=2)
    assert made.shard.y.tolist() == [1, 1, 2, 2]
    torch.testing.assert_close(made.shard.x[:, 0, 0, 1], torch.tensor([0.2, 0.2, 0.1, 0.3]))


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_left_as_it_was(training):
    net = Sorter().train(training)
    before = copy.deepcopy(net.state_dict())
    make(net=net)
    assert net.training is training
    assert torch.equal(net.calls, before["calls"])


def test_no_accepted_example_is_an_empty_shard_of_the_right_shape():
    made = make(net=Never())
    assert made.accepted == len(made.shard) == 0
    assert made.shard.x.shape == (0, 1, 1, LATENT)
    assert made.shard.y.dtype == torch.int64


def test_the_same_stream_gives_the_same_bits():
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(one.shard.x, same.shard.x)
    assert not torch.equal(one.shard.x, other.shard.x)


def test_without_a_filter_every_draw_is_kept_at_once():
    made = make(net=Never(), filter="none", spread=0.4)
    assert (made.tried, made.accepted) == (40, 40)
    assert made.shard.y.tolist() == [1] * 20 + [3] * 20


def test_the_filter_is_off_unless_asked_for():
    assert generate(Never(), matched(1), Drawing(per_class=5), stream()).accepted == 5


def test_images_carry_no_gradient():
    assert not make().shard.x.requires_grad


def test_the_weight_is_carried():
    assert make(weight=0.25).shard.weight == 0.25


def test_extending_keeps_what_was_made_before():
    old = Shard(torch.full((2, 1, 1, LATENT), 0.7), torch.tensor([2, 2]), 0.25)
    drawing = Drawing(per_class=3, spread=0, weight=0.25, filter="global")
    shard, counts = extend(old, Sorter(), matched(1), drawing, stream())
    assert shard.y.tolist() == [2, 2, 1, 1, 1]
    assert torch.equal(shard.x[:2], old.x)
    assert shard.weight == 0.25
    assert counts == {"synthetic_tried": 3, "synthetic_kept": 3}


def test_extending_nothing_is_generating():
    shard, _ = extend(None, Sorter(), matched(1), Drawing(per_class=3, filter="global"), stream())
    assert torch.equal(shard.x, make((1,), per_class=3, spread=0.3).shard.x)


def test_without_a_filter_every_draw_is_kept():
    made = generate(Sorter(), matched(1), Drawing(per_class=5), stream())
    assert made.tried == made.accepted == len(made.shard) == 5
