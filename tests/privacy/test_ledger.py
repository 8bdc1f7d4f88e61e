"""The ledger and what may be said from it."""

import io
import json
import math

import pytest
from test_release import analytic_delta

from feddpms.errors import PrivacyError
from feddpms.privacy import Ledger, claim, epsilon, in_the_clear
from feddpms.types import Event


def gaussian(channel="latent means", multiplier=2.0, digest="a"):
    return Event(channel, "gaussian", multiplier, 1.0, "add_remove", True, digest)


def test_epsilon_is_the_closed_form():
    events = [gaussian(multiplier=2.0347), gaussian("class histogram", 10.0)]
    mu = math.sqrt(sum(1 / e.noise_multiplier**2 for e in events))
    e = epsilon(events, 1e-5)
    assert e == pytest.approx(2.0, abs=1e-4)
    assert analytic_delta(mu, e) == pytest.approx(1e-5, rel=1e-4)


def test_epsilon_grows_with_every_event_and_is_infinite_in_the_clear():
    one = [gaussian()]
    assert 0 == epsilon([], 1e-5) < epsilon(one, 1e-5) < epsilon([*one, gaussian("b")], 1e-5)
    assert epsilon([*one, *in_the_clear("model")], 1e-5) == math.inf
    assert epsilon([gaussian(multiplier=0.0)], 1e-5) == math.inf


def test_a_channel_is_written_once_and_a_second_draw_is_refused():
    file = io.StringIO()
    ledger = Ledger(file)
    ledger.record(3, 0, [gaussian(), *in_the_clear("model")])
    ledger.record(4, 0, [gaussian(), *in_the_clear("model")])  # the stored release sent again
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [(e["round"], e["client"], e["channel"]) for e in lines] == [
        (3, 0, "latent means"),
        (3, 0, "model"),
    ]
    with pytest.raises(PrivacyError, match="client 0 released"):
        ledger.record(5, 0, [gaussian(digest="b")])
    assert len(file.getvalue().splitlines()) == 2
    assert len(ledger.events()) == 2


def test_a_claim_names_unit_neighbours_delta_covered_and_not_covered():
    ledger = Ledger()
    events = [gaussian(multiplier=2.0347), gaussian("class histogram", 10.0)]
    ledger.record(1, 0, [*events, *in_the_clear("model", "example count")])
    words = claim(ledger, 1e-5)
    for part in (
        "class histogram and latent means",
        "(2, 1e-05)",
        "each record",
        "one record added or removed",
        "any fixed broadcast model",
        "Not covered, sent in the clear: example count, model",
        "no finite total epsilon",
        "Simulated",
    ):
        assert part in words


def test_a_claim_is_that_of_the_client_that_spent_most():
    ledger = Ledger()
    ledger.record(1, 0, [gaussian(multiplier=5.0)])
    ledger.record(1, 1, [gaussian(multiplier=1.0)])
    assert f"({epsilon([gaussian(multiplier=1.0)], 1e-5):.4g}, 1e-05)" in claim(ledger, 1e-5)
    assert "Not covered" not in claim(ledger, 1e-5)


def test_without_events_nothing_left():
    assert "Nothing" in claim(Ledger(), 1e-5)
