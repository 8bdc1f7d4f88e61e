"""The ways in which implementations of differential privacy are known to fail, one test each.

Each class of failure has a check that the product passes, and a bug that, planted in the product's
own code, makes the check fail; both are run. Classes that show in what a client sends or says are
checked over the whole client path by record and replay, and name the bugs that are planted there.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from plant import planted
from test_replay import BUGS, PAID_BUGS

from feddpms.algorithms import FedDPMS, Training
from feddpms.algorithms.batches import poisson
from feddpms.algorithms.method import Client
from feddpms.errors import PrivacyError
from feddpms.privacy import Account, DpTraining, Ledger, Privacy, accountant, claim, epsilon
from feddpms.privacy.calibrate import training_multiplier
from feddpms.privacy.mechanism import ClassSums, FixedMeans, Histogram, gaussian
from feddpms.privacy.noise import Secure, Seeded
from feddpms.synthesis.paper import paper_release
from feddpms.types import Event, Message
from small import LOOSE, client, small_net, three_shards


def event(channel="latent means", nm=2.0, neighbours="add_remove", **more) -> Event:
    return Event(channel, "gaussian", nm, l2_sensitivity=1.0, neighbours=neighbours, **more)


def share(account: Account, privacy: Privacy = LOOSE, round: int = 3) -> Message:
    """A client's answer to a share ask."""
    method, shard, net = FedDPMS(), three_shards()[1], small_net()
    me = client(shard, net, round=round, privacy=privacy, account=account)
    model = {k: v.clone() for k, v in small_net(seed=5).state_dict().items()}
    return method.client(Message("share", {"model": model}), me)[0]


def vector_sensitivity():
    """1: opposite corners of the cube are as far apart as the sensitivity says, as vectors."""
    for latent in (1, 2, 32, 128):
        corners = torch.tensor([[0.0], [1.0]]).expand(2, latent)
        zero = torch.tensor([0])
        for statistic in (FixedMeans(1, latent), ClassSums(math.sqrt(latent) / 2, "replace_one")):
            a, b = (statistic.value(code[None], zero, 1) for code in corners)
            assert float((a - b).norm()) == pytest.approx(statistic.l2_sensitivity, abs=1e-6)


def sensitivity_follows_the_clip():
    """2: twice the clip is twice the noise."""
    for clip in (0.5, 1.0, 4.0):
        for adjacency in ("add_remove", "replace_one"):
            one, two = (ClassSums(c, adjacency).l2_sensitivity for c in (clip, 2 * clip))
            assert two == 2 * one


def every_draw_is_paid():
    """3: the paper's many draws are all in its event, and a release asked twice is drawn once."""
    privacy = Privacy(release="paper", mean_size=10, paper_draws=6)
    account = Account(privacy)
    reply = share(account, privacy)
    (paid,) = [e for e in reply.events if e.mechanism == "gaussian"]
    assert paid.times == 6
    again = share(account, privacy, round=4)
    assert again.events == reply.events


def a_release_is_drawn_once():
    """3: asked again, a client sends what it has stored."""
    account = Account(LOOSE)
    first, again = share(account), share(account, round=4)
    assert first.events == again.events
    assert torch.equal(first.trees["release"]["means"], again.trees["release"]["means"])


def outputs_lie_on_one_grid():
    """10: whatever the records, a released number is a multiple of 2^-32."""
    noise = Secure()
    for exact in (0.0, 0.01, 0.3):
        value = torch.full((400,), exact, dtype=torch.float64)
        out = gaussian(value, ClassSums(0.1), 2.0, noise)
        assert torch.equal(out * 2.0**32, (out * 2.0**32).round())


def no_seed_repeats_secure_noise():
    """11: not even that of every global generator."""
    draws = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.random.manual_seed(0)
            np.random.default_rng(0)
            draws.append(Secure().floating(torch.zeros(50, dtype=torch.float64), 1.0))
            draws.append(Secure().uniform(50))
    assert not (draws[0] == draws[2]).any()
    assert not (draws[1] == draws[3]).any()


def noise_is_never_used_twice():
    """12: purposes, clients and rounds have noise of their own."""
    shard, net = three_shards()[0], small_net()
    names = ("class histogram", "latent means", "training", "batches")
    clients = [client(shard, net, round=r, id=i) for r in (1, 2) for i in (0, 1)]
    zeros = torch.zeros(400, dtype=torch.float64)
    draws = np.stack([me.noise(n).floating(zeros, 1.0).numpy() for me in clients for n in names])
    assert np.abs(np.corrcoef(draws) - np.eye(len(draws))).max() < 0.3


def a_lost_draw_is_not_made_again():
    """13: after a crash between reservation and store, a secure source is not asked again."""
    account, drawn = Account(Privacy(noise="secure")), []
    secure = event(simulated=False)

    def crash():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        account.release(1, secure, crash)
    assert account.ledger.events() == [secure]
    with pytest.raises(PrivacyError, match="lost what it drew"):
        account.release(2, secure, lambda: {"x": torch.zeros(len(drawn) + 1)})
    assert account.ledger.events() == [secure]


def neighbours_are_counted_once():
    """14: noise over the whole sensitivity costs the same under either relation."""
    gaussians = [epsilon([event(neighbours=n)], 1e-5) for n in ("add_remove", "replace_one")]
    assert gaussians[0] == gaussians[1]
    sampled = [
        epsilon([event(neighbours=n, sample_rate=1 - 1e-9, times=3)], 1e-5)
        for n in ("add_remove", "replace_one")
    ]
    assert sampled[0] == pytest.approx(sampled[1], abs=1e-3)
    assert ClassSums(1.0, "replace_one").l2_sensitivity == 2 * ClassSums(1.0).l2_sensitivity


def tuning_on_records_voids_the_claim():
    """15: settings chosen on private records leave no finite total."""
    account = Account(Privacy(tuned_on="private"))
    _, events = account.release(1, event(), lambda: {"x": torch.zeros(1)})
    ledger = Ledger()
    ledger.record(1, 0, events)
    assert epsilon(ledger.events(), 1e-5) == math.inf
    assert "No claim" in claim(ledger, 1e-5)


def composition_is_never_too_cheap():
    """17: many steps cost at least what a loose lower bound says, and more with more of them."""
    accountant.composed.cache_clear()
    closed = epsilon([event(times=7)], 1e-5)
    assert accountant.composed(0.0, ((2.0, 1.0, 7),), "add_remove", 1e-5) >= closed - 1e-6
    assert epsilon([event(), event("class histogram")], 1e-5) >= epsilon([event(times=2)], 1e-5)
    step = event("model updates", 1.0, sample_rate=0.0128, times=2000)
    assert epsilon([step], 1e-5) == pytest.approx(3.398, abs=2e-3)
    both = epsilon([step, event()], 1e-5)
    assert both > max(epsilon([step], 1e-5), epsilon([event()], 1e-5)) + 0.1


def batches_are_poisson():
    """18: the size of a batch varies as a sum of coins does, at the rate that is paid for."""
    training = DpTraining(kind="dpsgd", expected_batch_size=8, expected_examples=32)
    privacy, shard = Privacy(training=training), three_shards()[1]
    me = client(shard, small_net(), privacy=privacy, local=Training(epochs=200))
    sizes = np.array([len(own.y) for own, _ in poisson(me)])
    n, q = len(shard), training.sample_rate
    assert abs(sizes.mean() - n * q) < 5 * math.sqrt(n * q * (1 - q) / len(sizes))
    spread = sizes.var() / (n * q * (1 - q))
    assert abs(spread - 1) < 5 * math.sqrt(2 / len(sizes))


def noise_is_that_of_the_sensitivity():
    """20: the standard deviation is noise multiplier times sensitivity, to 2 %."""
    noise = Seeded(np.random.default_rng(0))
    for statistic in (ClassSums(0.3), ClassSums(0.3, "replace_one"), Histogram("replace_one")):
        out = gaussian(torch.zeros(40_000, dtype=torch.float64), statistic, 3.0, noise)
        assert float(out.std()) == pytest.approx(3.0 * statistic.l2_sensitivity, rel=0.02)


@dataclass(frozen=True)
class Failure:
    """A class of failure: its number, a check, and where a bug makes the check fail."""

    number: int
    check: object
    change: tuple


FAILURES = [
    Failure(1, vector_sensitivity, (FixedMeans.l2_sensitivity, "both * self.latent", "both")),
    Failure(2, sensitivity_follows_the_clip, (ClassSums.l2_sensitivity, "self.l2_clip *", "1.0 *")),
    Failure(3, every_draw_is_paid, (paper_release, "times=privacy.paper_draws", "times=1")),
    Failure(
        3,
        a_release_is_drawn_once,
        (Account.release, "if stored is None:", "if True:"),
    ),
    Failure(
        10,
        outputs_lie_on_one_grid,
        (gaussian, "return source.discrete(value, std)", "return source.floating(value, std)"),
    ),
    Failure(
        11,
        no_seed_repeats_secure_noise,
        (
            Secure.floating,
            "normals = sum(ndtri(_uniform(value.numel())) for _ in range(4)) / 2",
            "normals = torch.randn(value.numel(), dtype=torch.float64).numpy()",
        ),
    ),
    Failure(
        12,
        noise_is_never_used_twice,
        (Client.noise, 'self.rng.numpy("privacy noise", purpose)', 'self.rng.numpy("noise")'),
    ),
    Failure(
        13,
        a_lost_draw_is_not_made_again,
        (Account._reserve, "if before and stored is None", "if False"),
    ),
    Failure(
        14,
        neighbours_are_counted_once,
        (accountant.composed.__wrapped__, "factor = 2 if replace else 1", "factor = 1"),
    ),
    Failure(
        15,
        tuning_on_records_voids_the_claim,
        (Account._voided, 'if self._privacy.tuned_on == "public":', "if True:"),
    ),
    Failure(
        17,
        composition_is_never_too_cheap,
        (
            accountant.composed.__wrapped__,
            "accountant.compose(dp_accounting.SelfComposedDpEvent(step, times))",
            "accountant.compose(step)",
        ),
    ),
    Failure(
        18,
        batches_are_poisson,
        (
            poisson,
            "own = (coins.uniform(n) < training.sample_rate).nonzero().flatten()",
            "own = coins.uniform(n).argsort()[: round(n * training.sample_rate)]",
        ),
    ),
    Failure(
        20,
        noise_is_that_of_the_sensitivity,
        (gaussian, "noise_multiplier * statistic.l2_sensitivity", "noise_multiplier"),
    ),
]
REPLAYED = {
    1: ["sensitivity of one coordinate", "radius for diameter"],
    3: ["drawn again until it is near", "steps by the number of records"],
    4: ["codes of the local model", "encoding in train mode"],
    5: ["exact divisor of a sum", "exact divisor of a mean", "normaliser of the true batch"],
    6: ["means of present classes", "counts of present classes"],
    7: [
        "exact counts sent",
        "the truly most abundant classes",
        "number of examples sent",
        "training loss sent",
    ],
    8: ["means that the local classifier calls by their class", "drawn again by the records"],
    9: ["NaN let through", "NaN let through to fixed means", "a broken gradient let through"],
    16: ["a norm printed", "a count logged for debugging", "a warning about a class"],
    18: ["all records in every batch"],
    19: ["a coordinate without noise", "a layer without noise", "a class without noise"],
    20: ["the sum clipped", "the sum of gradients clipped", "nothing clipped"],
}


CAUGHT = (AssertionError, PrivacyError, pytest.fail.Exception)
"""what a check ends in: it failed, or the product itself noticed"""


def name(failure: Failure) -> str:
    return f"{failure.number} {failure.check.__name__}"


@pytest.mark.parametrize("failure", FAILURES, ids=name)
def test_the_product_passes(failure):
    failure.check()


@pytest.mark.parametrize("failure", FAILURES, ids=name)
def test_the_check_fails_with_the_bug_planted(failure):
    accountant.composed.cache_clear()
    training_multiplier.cache_clear()
    with planted(*failure.change), pytest.raises(CAUGHT):
        failure.check()
    accountant.composed.cache_clear()


def test_every_class_of_failure_has_a_bug_that_is_caught():
    assert {f.number for f in FAILURES} | set(REPLAYED) == set(range(1, 21))
    for bugs in REPLAYED.values():
        for bug in bugs:
            assert bug in BUGS or bug in PAID_BUGS, bug
