"""The ledger and what may be said from it."""

import json

import pytest

from feddpms.errors import PrivacyError
from feddpms.privacy import Ledger, claim, epsilon
from feddpms.privacy.claim import table
from feddpms.privacy.ledger import Entry, of_folder, read
from feddpms.types import Event


def gaussian(channel="latent means", multiplier=2.0, digest="a", **more):
    values = {"l2_sensitivity": 1.0, "neighbours": "add_remove", "digest": digest, **more}
    return Event(channel, "gaussian", multiplier, **values)


def clear(*channels):
    return [Event(channel, "none") for channel in channels]


def updates(digest, **more):
    return gaussian("model updates", 1.5, digest, times=8, sample_rate=0.1, **more)


def test_a_channel_is_written_once_and_a_second_draw_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record(3, 0, [gaussian(), *clear("model")])
    ledger.record(4, 0, [gaussian(), *clear("model")])  # the stored release sent again
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["state"], e["round"], e["client"], e["channel"]) for e in lines] == [
        ("received", 3, 0, "latent means"),
        ("received", 3, 0, "model"),
    ]
    with pytest.raises(PrivacyError, match="client 0 released"):
        ledger.record(5, 0, [gaussian(digest="b")])
    ledger.close()
    assert len(path.read_text().splitlines()) == 2
    assert len(ledger.events()) == 2


def test_model_updates_are_written_once_a_round():
    ledger = Ledger()
    ledger.record(1, 0, [updates("a"), updates("a")])
    ledger.record(2, 0, [updates("b")])
    assert len(ledger.events(0)) == 2
    with pytest.raises(PrivacyError, match="again in round 2"):
        ledger.record(2, 0, [updates("c")])


def test_reserved_and_received_count_and_stored_does_not(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.append(Entry("reserved", 1, 0, gaussian(digest="")))
    ledger.append(Entry("stored", 1, 0, gaussian(digest="abc")))
    ledger.close()
    assert read(path) == ledger.entries
    assert ledger.events() == [gaussian(digest="")]


def test_a_torn_last_line_does_not_count_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record(1, 0, [gaussian()])
    ledger.close()
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    assert len(read(path)) == 1
    again = Ledger(path)
    again.record(1, 1, [gaussian(digest="b")])
    again.close()
    assert len(read(path)) == 2
    path.write_text("{}\n" + whole)
    with pytest.raises(PrivacyError, match="line 1, got something else"):
        read(path)
    with pytest.raises(PrivacyError, match="expected a ledger"):
        read(tmp_path / "none")


GOOD = {
    "state": "received",
    "round": 1,
    "client": 0,
    "channel": "latent means",
    "mechanism": "gaussian",
    "noise_multiplier": 2.0,
    "l2_sensitivity": 1.0,
    "neighbours": "add_remove",
    "times": 1,
    "sample_rate": 1.0,
    "simulated": True,
    "digest": "",
}


@pytest.mark.parametrize(
    "bad",
    [
        {"noise_multiplier": float("nan")},
        {"noise_multiplier": float("inf")},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": "2"},
        {"noise_multiplier": None},
        {"neighbours": None},
        {"neighbours": "banana"},
        {"sample_rate": 0.0},
        {"sample_rate": 2.0},
        {"times": 0},
        {"times": 0.5},
        {"mechanism": "laplace"},
        {"state": "spent"},
        {"channel": None},
        {"client": [1]},
        {"more": 1},
    ],
)
def test_a_line_whose_cost_is_not_defined_is_refused(tmp_path, bad):
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    assert len(read(path)) == 1
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **bad}) + "\n")
    with pytest.raises(PrivacyError, match="line 2, got something else"):
        read(path)


def test_a_clients_own_ledger_stands_in_for_what_arrived(tmp_path):
    """What was reserved and never arrived counts as well."""
    run = Ledger(tmp_path / "ledger.jsonl")
    run.record(1, 0, [gaussian("class histogram", 10.0)])
    run.record(1, 1, [gaussian("class histogram", 10.0)])
    run.close()
    (tmp_path / "clients" / "0").mkdir(parents=True)
    own = Ledger(tmp_path / "clients" / "0" / "ledger.jsonl")
    own.append(Entry("reserved", 1, 0, gaussian("class histogram", 10.0, digest="")))
    own.append(Entry("reserved", 1, 0, updates("")))
    own.close()
    found = of_folder(tmp_path)
    assert epsilon(found.events(0), 1e-5) == epsilon(own.events(), 1e-5)
    assert len(found.events(1)) == 1


def test_the_papers_release_is_never_covered():
    ledger = Ledger()
    ledger.record(1, 0, [gaussian("latent means as in the paper", 0.5), *clear("class list")])
    words = claim(ledger, 1e-5)
    assert "Covered" not in words
    assert "Not covered: latent means as in the paper" in words
    assert table(ledger, 1e-5)[-1][-1].endswith("of its noise alone")


def test_a_ledger_that_is_in_use_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(PrivacyError, match="in use by another process"):
        Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    Ledger(tmp_path / "ledger.jsonl").close()


def test_a_claim_names_unit_neighbours_delta_covered_and_not_covered():
    ledger = Ledger()
    events = [gaussian(multiplier=2.0347), gaussian("class histogram", 10.0)]
    ledger.record(1, 0, [*events, *clear("model", "example count")])
    words = claim(ledger, 1e-5)
    for part in (
        "class histogram, latent means are together",
        "(2, 1e-05)",
        "each record",
        "unit: one record",
        "one record added or removed",
        "any fixed broadcast model",
        "Not covered, sent in the clear: example count, model",
        "no finite total epsilon",
        "It rests on: a person has one record",
        "Simulated",
    ):
        assert part in words
    assert "everything" not in words


def test_a_claim_over_everything_needs_that_nothing_was_in_the_clear():
    ledger = Ledger()
    secure = {"simulated": False}
    ledger.record(1, 0, [updates("a", **secure), gaussian(**secure)])
    words = claim(ledger, 1e-5)
    total = epsilon([updates("a"), gaussian()], 1e-5)
    assert "everything a client sent in the whole run" in words
    assert f"({total:.4g}, 1e-05)" in words
    assert "Not covered" not in words
    assert "fixed broadcast" not in words  # the encoder's training is paid for
    assert "Simulated" not in words
    assert "gradient noise is floating-point" in words


def test_the_neighbours_of_a_claim_are_those_of_the_events():
    ledger = Ledger()
    ledger.record(1, 0, [gaussian(neighbours="replace_one")])
    assert "one record replaced by any other" in claim(ledger, 1e-5)
    with pytest.raises(PrivacyError, match="one neighbouring relation"):
        epsilon([gaussian(), gaussian("b", neighbours="replace_one")], 1e-5)


def test_a_claim_is_that_of_the_client_that_spent_most():
    ledger = Ledger()
    ledger.record(1, 0, [gaussian(multiplier=5.0)])
    ledger.record(1, 1, [gaussian(multiplier=1.0)])
    assert f"({epsilon([gaussian(multiplier=1.0)], 1e-5):.4g}, 1e-05)" in claim(ledger, 1e-5)
    assert "Not covered" not in claim(ledger, 1e-5)


def test_without_events_nothing_left():
    assert "ledger is empty" in claim(Ledger(), 1e-5)


def test_the_table_has_a_row_for_each_channel():
    ledger = Ledger()
    for round in (1, 2):
        ledger.record(round, 0, [updates(str(round)), *clear("training loss")])
    ledger.record(2, 0, [gaussian()])
    head, *rows = table(ledger, 1e-5)
    assert head[-1] == "epsilon at 1e-05"
    by_name = {row[0]: row for row in rows}
    assert by_name["training loss"][-1] == "infinite"
    assert by_name["model updates"][3] == "16"
    cost = epsilon([updates("1"), updates("2")], 1e-5)
    assert by_name["model updates"][-1] == f"{cost:.4g}"
    assert by_name["latent means"][-1] == f"{epsilon([gaussian()], 1e-5):.4g}"
