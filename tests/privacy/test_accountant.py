"""What events add up to, and what a target buys: against closed forms and published numbers."""

import math

import dp_accounting
import pytest
from dp_accounting.rdp import RdpAccountant

from feddpms.errors import ConfigError
from feddpms.privacy import DpTraining, Privacy, calibrate, epsilon
from feddpms.privacy.accountant import composed
from feddpms.privacy.calibrate import training_multiplier
from feddpms.types import Event


def gaussian(multiplier, channel="latent means", neighbours="add_remove", **more):
    values = {"l2_sensitivity": 1.0, "neighbours": neighbours, **more}
    return Event(channel, "gaussian", multiplier, **values)


def analytic_delta(mu: float, epsilon: float) -> float:
    """Balle and Wang (2018), theorem 8."""
    phi = lambda t: 0.5 * math.erfc(-t / math.sqrt(2))  # noqa: E731
    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


def test_epsilon_is_the_closed_form():
    events = [gaussian(2.0347), gaussian(10.0, "class histogram")]
    mu = math.sqrt(sum(1 / e.noise_multiplier**2 for e in events))
    e = epsilon(events, 1e-5)
    assert e == pytest.approx(2.0, abs=1e-4)
    assert analytic_delta(mu, e) == pytest.approx(1e-5, rel=1e-4)


def test_epsilon_grows_with_every_event_and_is_infinite_in_the_clear():
    one = [gaussian(2.0)]
    assert 0 == epsilon([], 1e-5) < epsilon(one, 1e-5) < epsilon([*one, gaussian(2.0, "b")], 1e-5)
    assert epsilon([*one, Event("model", "none")], 1e-5) == math.inf
    assert epsilon([gaussian(0.0)], 1e-5) == math.inf


@pytest.mark.parametrize("neighbours", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("nm", "times"), [(2.0, 1), (2.0, 7), (5.0, 200)])
def test_privacy_loss_distributions_agree_with_the_closed_form(neighbours, nm, times):
    """Sampling at a rate of 1 is no sampling; PLD rounds up, and by little."""
    for delta in (1e-2, 1e-5):
        closed = epsilon([gaussian(nm, times=times)], delta)
        pld = composed(0.0, ((nm, 1.0, times),), neighbours, delta)
        assert closed - 1e-6 <= pld <= closed + 2e-3


def test_neighbours_are_accounted_once():
    """The same noise over the whole sensitivity costs the same under either relation.

    The accounting library doubles a sensitivity under replacement on its own; taken as it is, the
    cost of a release calibrated for replacement would be counted twice.
    """
    a, b = (epsilon([gaussian(2.5, neighbours=n)], 1e-5) for n in ("add_remove", "replace_one"))
    assert a == b == pytest.approx(1.555, abs=1e-3)
    mixed = [composed(0.16, ((2.5, 1.0, 1),), n, 1e-5) for n in ("add_remove", "replace_one")]
    assert mixed[0] == pytest.approx(mixed[1], abs=1e-3)


def test_sampled_steps_agree_with_an_accountant_of_another_kind():
    """Between a lower bound (one step) and the looser Renyi bound."""
    steps = gaussian(1.0, "model updates", times=2000, sample_rate=0.0128)
    rdp = RdpAccountant()
    step = dp_accounting.PoissonSampledDpEvent(0.0128, dp_accounting.GaussianDpEvent(1.0))
    rdp.compose(dp_accounting.SelfComposedDpEvent(step, 2000))
    total = epsilon([steps], 1e-5)
    assert total == pytest.approx(3.398, abs=2e-3)
    assert total < rdp.get_epsilon(1e-5) == pytest.approx(3.749, abs=2e-3)


def test_more_steps_less_noise_and_higher_rates_cost_more():
    def cost(nm=1.5, times=100, rate=0.05, delta=1e-5):
        return epsilon([gaussian(nm, times=times, sample_rate=rate)], delta)

    assert cost() < cost(times=200)
    assert cost() < cost(nm=1.4)
    assert cost() < cost(rate=0.06)
    assert cost() < cost(delta=1e-6)
    one = gaussian(1.5, times=100, sample_rate=0.05)
    assert cost(times=200) == epsilon([one, one], 1e-5)
    assert epsilon([one, gaussian(2.0)], 1e-5) > max(cost(), epsilon([gaussian(2.0)], 1e-5))


@pytest.mark.parametrize(
    ("target", "delta", "total"),
    [
        (0.5, 1e-2, 3.1469),
        (1, 1e-2, 1.8779),
        (0.5, 1e-5, 7.0318),
        (1, 1e-5, 3.7306),
        (2, 1e-5, 1.9938),
        (4, 1e-5, 1.0812),
        (8, 1e-5, 0.6002),
        (2, 1e-6, 2.2305),
    ],
)
def test_calibration_spends_the_target_and_no_more(target, delta, total):
    m = calibrate(Privacy(target_epsilon=target, target_delta=delta, count_noise_multiplier=20.0))
    assert m.total == pytest.approx(total, abs=5e-5)
    mu = math.sqrt(1 / m.latent**2 + 1 / m.counts**2)
    assert analytic_delta(mu, target) == pytest.approx(delta, rel=1e-6)


def test_latent_multipliers_beside_a_histogram():
    """The split of (2, 1e-5) at 5, 10, 20, 50 counts of noise."""
    for counts, latent in [(5, 2.1741), (10, 2.0347), (20, 2.0038), (50, 1.9954)]:
        assert calibrate(Privacy(count_noise_multiplier=counts)).latent == pytest.approx(
            latent, abs=5e-5
        )


@pytest.mark.parametrize(("target", "multiplier"), [(2, 3.805), (4, 2.088), (8, 1.278)])
def test_a_target_for_the_whole_run_gives_the_noise_of_training(target, multiplier):
    """5,000 examples, batches of 64, 250 epochs, beside latent means at 8 and a histogram at 20."""
    got = training_multiplier(target, 1e-5, 64 / 5000, 19_531, 1 / 64 + 1 / 400, "add_remove")
    assert got == pytest.approx(multiplier, abs=1e-3)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_a_calibrated_run_stays_within_its_target(adjacency):
    training = DpTraining(kind="dpsgd", expected_examples=200)
    privacy = Privacy(target_epsilon=4, training=training, adjacency=adjacency)
    steps = 30 * training.steps_per_epoch
    m = calibrate(privacy, steps)
    assert m.training is not None
    run = [
        gaussian(m.latent, neighbours=adjacency),
        gaussian(m.counts, "class histogram", adjacency),
        gaussian(
            m.training, "model updates", adjacency, times=steps, sample_rate=training.sample_rate
        ),
    ]
    assert 3.98 <= epsilon(run, 1e-5) <= 4


def test_sampling_rate_and_steps_are_public():
    training = DpTraining(expected_batch_size=64, expected_examples=500)
    assert training.sample_rate == 0.128
    assert training.steps_per_epoch == 8
    assert DpTraining(expected_batch_size=64, expected_examples=10).sample_rate == 1


def test_releases_that_spend_all_are_refused():
    with pytest.raises(ConfigError, match=r"count_noise_multiplier must be above .* got 1; "):
        calibrate(Privacy(target_epsilon=0.5, count_noise_multiplier=1.0))
    training = DpTraining(kind="dpsgd", release_noise_multiplier=1.0)
    with pytest.raises(ConfigError, match=r"release_noise_multiplier must be above .* got 1; "):
        calibrate(Privacy(training=training), steps=10)


@pytest.mark.parametrize(
    "bad", [{"target_epsilon": 0}, {"target_delta": 1}, {"l2_clip": math.nan}, {"l2_clip": -1}]
)
def test_impossible_targets_are_refused(bad):
    from pydantic import ValidationError

    with pytest.raises(ValidationError):
        Privacy(**bad)
    with pytest.raises(ValidationError):
        Privacy(l2_sensitivity=1.0)  # pyright: ignore
