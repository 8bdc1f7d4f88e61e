"""The audit: it refutes false claims, spares true ones, and says how likely it was to."""

import math
from itertools import cycle

import numpy as np
import pytest
from scipy.stats import binomtest, norm

from feddpms.privacy.audit import audit, audit_scores, lower_limit, power, upper_limit

CLAIM = (2.0, 1e-5)
MU = 0.5016


def scored(rng, runs, factor=1.0, claim=CLAIM, mu=MU):
    """An audit of a worst pair whose noise is too small by the factor."""
    absent, present = rng.standard_normal((2, runs)) / factor
    return audit_scores(absent, present + mu, mu, *claim)


@pytest.mark.parametrize(
    ("runs", "median", "free"),
    [(500, 0.745, 0.16), (2000, 1.36, 0.28), (5000, 1.59, 0.33), (20000, 1.795, 0.364)],
)
def test_a_correct_release_gets_close_to_its_claim(runs, median, free):
    """Medians over 51 audits. At this threshold the bound for any release ends at ln(.6 / .4)."""
    rng = np.random.default_rng(0)
    audits = [scored(rng, runs) for _ in range(51)]
    assert np.median([a.epsilon_lower for a in audits]) == pytest.approx(median, abs=0.06)
    general = np.median([a.epsilon_lower_assumption_free for a in audits])
    assert general == pytest.approx(free, abs=0.02)
    assert {(a.runs, a.claimed_epsilon, a.delta, a.confidence) for a in audits} == {
        (runs, *CLAIM, 0.99)
    }


@pytest.mark.parametrize(("claim", "mu"), [(CLAIM, MU), ((0.5, 1e-2), 1 / 3.14685)])
def test_no_false_alarm_in_200_audits(claim, mu):
    """The exact rate is 1.2e-4 an audit at the first claim, so 1 seed in 40 has an alarm."""
    rng = np.random.default_rng(1)
    audits = [scored(rng, 2000, claim=claim, mu=mu) for _ in range(200)]
    assert max(a.epsilon_lower for a in audits) < claim[0]
    assert max(a.epsilon_lower_assumption_free for a in audits) < claim[0]
    assert max(a.mu_lower for a in audits) < mu
    assert 5e-5 < power(1.0, mu, *claim, 2000) < 2e-4


@pytest.mark.parametrize(
    ("runs", "factor", "least"),
    [(500, 2.0, 0.98), (2000, math.sqrt(2), 0.85), (500, math.sqrt(2), 0.1)],
)
def test_the_stated_power_is_the_rate_at_which_false_claims_are_caught(runs, factor, least):
    rng = np.random.default_rng(3)
    audits = [scored(rng, runs, factor) for _ in range(200)]
    caught = sum(a.epsilon_lower > a.claimed_epsilon for a in audits)
    stated = audits[0].doubled_mu_power if factor == 2 else audits[0].repeated_power
    assert stated == power(factor, MU, *CLAIM, runs)
    assert stated >= least
    assert binomtest(caught, 200, stated).pvalue > 1e-3


def test_a_pair_that_is_not_the_worst_has_less_power():
    rng = np.random.default_rng(4)
    weak = MU / 2
    absent, present = rng.standard_normal((2, 200, 2000)) / 2
    audits = [audit_scores(a, p + weak, weak, *CLAIM) for a, p in zip(absent, present, strict=True)]
    caught = sum(a.epsilon_lower > a.claimed_epsilon for a in audits)
    stated = audits[0].doubled_mu_power
    assert stated < 0.5 < power(2.0, MU, *CLAIM, 2000)
    assert binomtest(caught, 200, stated).pvalue > 1e-3


def release(rng, base, shift, std):
    """A Gaussian release in plain numpy."""
    return lambda present: base + present * shift + std * rng.standard_normal(len(base))


BASE = np.array([3.0, -40.0, 0.0, 7.0])
SHIFT = np.array([1.0, -2.0, 0.0, 0.5])
STD = np.array([4.0, 7.0, 1.0, 1.5])
STD = STD * np.linalg.norm(SHIFT / STD) / MU


def test_the_test_is_the_likelihood_ratio_of_the_claim():
    """Same outputs, same verdicts as densities give; numbers of unlike size in each coordinate."""
    draw = release(np.random.default_rng(5), BASE, SHIFT, STD)
    outputs = [(present, draw(present)) for _ in range(300) for present in (False, True)]

    def says_with(x):
        return norm.logpdf(x, BASE + SHIFT, STD).sum() > norm.logpdf(x, BASE, STD).sum()

    asked = []
    feed = cycle(outputs)

    def replay(present):
        asked.append(present)
        return next(feed)[1]

    a = audit(replay, BASE, SHIFT, STD, 300, *CLAIM)
    assert asked == [present for present, _ in outputs]
    assert a.true_positives == sum(bool(says_with(x)) for present, x in outputs if present)
    assert a.false_positives == sum(bool(says_with(x)) for present, x in outputs if not present)
    assert a.pair_mu == pytest.approx(MU)


def test_bounds_by_hand():
    """70 of 100 against 20 of 100: proportions from another routine, bounds by the formulas."""
    absent, present = np.zeros(100), np.zeros(100)
    absent[:20], present[:70] = 1, 1
    a = audit_scores(absent, present, MU, *CLAIM, alpha=0.1)
    low = binomtest(70, 100).proportion_ci(0.9).low
    high = binomtest(20, 100).proportion_ci(0.9).high
    assert (a.true_positives, a.false_positives, a.non_finite) == (70, 20, 0)
    assert a.confidence == 0.9
    mu = norm.ppf(low) - norm.ppf(high)
    assert a.mu_lower == pytest.approx(mu)
    delta = norm.cdf(mu / 2 - a.epsilon_lower / mu) - math.exp(a.epsilon_lower) * norm.cdf(
        -mu / 2 - a.epsilon_lower / mu
    )
    assert delta == pytest.approx(1e-5, rel=1e-6)
    assert a.epsilon_lower_assumption_free == pytest.approx(math.log((low - 1e-5) / high))
    b = audit_scores(absent, present, MU, 2.0, 0.3, alpha=0.1)
    assert b.epsilon_lower_assumption_free == pytest.approx(math.log((low - 0.3) / high))


@pytest.mark.parametrize(
    "wrong",
    ["noise of half the size", "shift of twice the size", "drawn twice", "no noise", "as claimed"],
)
def test_a_release_is_refuted_if_and_only_if_its_claim_is_false(wrong):
    rng = np.random.default_rng(6)
    shift = SHIFT * (2 if wrong.startswith("shift") else 1)
    shrink = {"noise of half the size": 2, "no noise": math.inf, "drawn twice": math.sqrt(2)}
    a = audit(release(rng, BASE, shift, STD / shrink.get(wrong, 1)), BASE, SHIFT, STD, 5000, *CLAIM)
    assert (a.epsilon_lower > a.claimed_epsilon) == (wrong != "as claimed")
    assert a.epsilon_lower > 0.5 * a.claimed_epsilon
    assert a.repeated_power > 0.99


def test_evidence_in_the_wrong_direction_is_not_evidence():
    """Outputs that move against the claim, and outputs without noise that never move."""
    rng = np.random.default_rng(7)
    against = audit(release(rng, BASE, -SHIFT, STD), BASE, SHIFT, STD, 2000, *CLAIM)
    still = audit(release(rng, BASE, 0 * SHIFT, STD), BASE, SHIFT, STD, 2000, *CLAIM)
    nothing = audit(lambda present: BASE, BASE, SHIFT, STD, 50, *CLAIM)
    assert against.mu_lower < -0.4
    assert nothing.mu_lower == -math.inf
    for a in (against, still, nothing):
        assert a.epsilon_lower == a.epsilon_lower_assumption_free == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_output_that_breaks_with_the_record_gives_it_away(bad):
    """Whether one coordinate breaks or all do; -inf is no evidence for "without"."""
    draw = release(np.random.default_rng(8), BASE, SHIFT, STD)
    for broken in (SHIFT < 0, SHIFT > 0, SHIFT == 0, SHIFT < 9):
        a = audit(
            lambda present, at=broken: np.where(at & present, bad, draw(present)),
            *(BASE, SHIFT, STD, 500, *CLAIM),
        )
        assert a.true_positives == a.non_finite == 500
        assert a.epsilon_lower > a.claimed_epsilon


def test_an_output_too_large_to_score_gives_the_record_away():
    draw = release(np.random.default_rng(8), BASE, SHIFT, STD)
    a = audit(
        lambda present: np.full(4, 1e308) if present else draw(present),
        *(BASE, SHIFT, STD * [1, 1e-3, 1, 1], 500, *CLAIM),
    )
    assert a.true_positives == a.non_finite == 500


def test_outputs_that_are_never_numbers_are_counted_and_bound_nothing():
    a = audit(lambda present: np.full(4, math.nan), BASE, SHIFT, STD, 20, *CLAIM)
    assert a.true_positives == a.false_positives == 20
    assert a.non_finite == 40
    assert a.epsilon_lower == 0


@pytest.mark.parametrize("trials", [1, 7, 50])
def test_limits_of_a_proportion(trials):
    """Against another routine, at every count; 0 and 1 are reached at the ends and only there."""
    hits = np.arange(trials + 1)
    exact = [binomtest(k, trials).proportion_ci(0.98) for k in hits.tolist()]
    np.testing.assert_allclose(lower_limit(hits, trials, 0.01), [e.low for e in exact], rtol=1e-9)
    np.testing.assert_allclose(upper_limit(hits, trials, 0.01), [e.high for e in exact], rtol=1e-9)


def test_a_bound_just_above_0_is_a_small_epsilon():
    """Five runs more at a time are found: no warning, and never out of order."""
    found = []
    for true in range(400, 600, 5):
        absent, present = np.zeros(1000), np.zeros(1000)
        absent[:450], present[:true] = 1, 1
        found.append(audit_scores(absent, present, MU, *CLAIM).epsilon_lower)
    assert found == sorted(found)
    assert found[0] == 0 < found[-1]


@pytest.mark.parametrize("mu", [1e-12, 2.5e-5, 2.5475908339041152e-05, 1e-4])
def test_the_epsilon_of_a_tiny_mu_is_tiny(mu):
    from feddpms.privacy.audit import _epsilon

    assert 0 <= _epsilon(mu, 1e-5) <= 4 * mu


@pytest.mark.parametrize(
    "bad",
    [
        {"std": STD * 0},
        {"std": STD[:3]},
        {"shift": SHIFT * 0},
        {"shift": SHIFT * math.nan},
        {"base": BASE[:1]},
        {"base": 0.0, "shift": 1.0, "std": 1.0},
        {"runs": 0},
        {"alpha": 0.0},
        {"claimed_epsilon": 0.0},
        {"claimed_epsilon": math.inf},
        {"delta": 1.0},
        {"draw": lambda present: np.zeros(1)},
    ],
)
def test_what_cannot_be_audited_is_refused(bad):
    fine = {"draw": lambda present: BASE, "base": BASE, "shift": SHIFT, "std": STD, "runs": 2}
    with pytest.raises(ValueError, match=r"^expected .* got |^expected a std"):
        audit(**(fine | {"claimed_epsilon": 2.0, "delta": 1e-5} | bad))
