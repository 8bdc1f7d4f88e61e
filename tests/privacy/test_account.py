"""A client's account: one draw whatever happens, no byte above the budget, and no claim too good.

What is reserved counts for good, and what a secure source drew is sent again or never.
"""

import gc
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from feddpms.algorithms import FedAvg, FedDPMS, Training
from feddpms.errors import PrivacyError
from feddpms.models import NetSettings, build
from feddpms.privacy import Account, DpTraining, Ledger, Privacy, calibrate, claim, epsilon
from feddpms.privacy.ledger import read
from feddpms.privacy.mechanism import (
    COUNTS,
    MEANS,
    UPDATES,
    ClassSums,
    Histogram,
    event,
    gaussian,
)
from feddpms.privacy.noise import Secure, Seeded
from feddpms.rng import Rng
from feddpms.types import Event, Message
from small import CLASSES, LOOSE, client, small_net, three_shards

DELTA = 1e-5
FREE, SECURE = Privacy(), replace(LOOSE, noise="secure")


# A real process, killed at every step


class Machine:
    """The process that runs a client and kills it where it is told."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("client_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            text=True,
        )

    def __call__(self, ask, round, home, name="out", noise="secure", stop=None):
        """What became of an ask, and the bytes that left, if any did."""
        order = {"ask": ask, "round": round, "folder": str(home / "client"), "noise": noise}
        order |= {"outbox": str(home / name), "stop": stop}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        end = json.loads(self._process.stdout.readline())
        assert end["status"] != "failed", end["error"]
        path = home / name
        end["bytes"] = path.read_bytes() if path.exists() else b""
        return end

    def close(self):
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        self._process.stdout.close()


@pytest.fixture(scope="module")
def machine():
    pytest.importorskip("opendp")
    pytest.importorskip("opacus")
    process = Machine()
    yield process
    process.close()


@pytest.fixture(scope="module")
def clean(machine, tmp_path_factory):
    """Runs that nobody kills: of every ask, the folder before it, and how it ends."""
    made = {}

    def run(ask, round, noise="secure"):
        if (ask, round, noise) not in made:
            home = tmp_path_factory.mktemp(f"{ask}{round}{noise}")
            if round > 1:
                shutil.copytree(run(ask, round - 1, noise)[1] / "client", home / "client")
            end = machine(ask, round, home, noise=noise)
            assert end["status"] == "sent"
            made[ask, round, noise] = end, home
        return made[ask, round, noise]

    return run


def killed(machine, clean, tmp_path, ask, round, noise="secure"):
    """Homes of clients that were killed: the step, the home, and the bytes that had left.

    A kill leaves the disk alone, so of steps that leave the same on disk one is enough.
    """
    whole = clean(ask, round, noise)[0]
    steps, disks = whole["steps"], whole["disks"]
    stops = [i for i in range(len(steps)) if not i or disks[i] != disks[i - 1]]
    for stop in [*stops, len(steps)]:
        home = tmp_path / f"{round}-{stop}"
        home.mkdir()
        if round > 1:
            shutil.copytree(clean(ask, round - 1, noise)[1] / "client", home / "client")
        end = machine(ask, round, home, "first", noise, stop)
        if stop == len(steps):
            assert (end["status"], end["steps"]) == ("sent", steps)
            return
        assert end["status"] == "killed"
        yield f"{stop} ({steps[stop]})", home, end["bytes"]


def written(home) -> list:
    """The whole lines of a client's ledger, read without touching the file."""
    path = home / "client" / "ledger.jsonl"
    return read(path) if path.exists() else []


def spent(home) -> float:
    return epsilon([e.event for e in written(home) if e.state == "reserved"], DELTA)


def lost(home, round) -> set[str]:
    """Channels that were reserved, of which no bytes were kept."""
    folder, out = home / "client", set()
    for entry in written(home):
        channel = entry.event.channel
        if entry.state == "reserved" and (channel != UPDATES or entry.round == round):
            path = folder / f"{channel.replace(' ', '-')}.safetensors"
            whole = path.exists() and (
                channel != UPDATES or f'"round":"{round}"'.encode() in path.read_bytes()
            )
            out |= set() if whole else {channel}
    return out


def assert_sent_again_or_never(end, sent, gone, where):
    """After a kill: the bytes that left, or none; none only if what was drawn is gone."""
    assert end["status"] == ("refused" if gone else "sent"), where
    if gone:
        assert not sent, where
        assert not end["bytes"], where
        assert "is not drawn again" in end["error"], where
        assert any(f'"{channel}"' in end["error"] for channel in gone), where
    else:
        assert end["bytes"].startswith(sent), where


def test_a_share_that_was_killed_is_the_same_bytes_or_none(machine, clean, tmp_path):
    cost, ends = spent(clean("share", 1)[1]), []
    for where, home, sent in killed(machine, clean, tmp_path, "share", 1):
        before, gone = spent(home), lost(home, 1)
        second = machine("share", 1, home, "second")
        after = spent(home)
        third = machine("share", 2, home, "third")
        assert_sent_again_or_never(second, sent, gone, where)
        assert (third["status"], third["bytes"]) == (second["status"], second["bytes"]), where
        assert before <= after == spent(home) <= cost, where
        assert after == cost or gone, where
        ends.append((second["status"], bool(sent)))
    assert set(ends) == {("sent", False), ("sent", True), ("refused", False)}


def test_a_simulation_that_was_killed_draws_the_same_bytes_and_pays_once(machine, clean, tmp_path):
    whole, home = clean("share", 1, "seeded")
    cost, again = spent(home), 0
    for where, home, sent in killed(machine, clean, tmp_path, "share", 1, "seeded"):
        again += bool(lost(home, 1))
        second = machine("share", 1, home, "second", "seeded")
        assert second["bytes"] == whole["bytes"], where
        assert whole["bytes"].startswith(sent), where
        reserved = [e.event.channel for e in written(home) if e.state == "reserved"]
        assert reserved == [COUNTS, MEANS], where
        assert spent(home) == cost, where
    assert again


@pytest.mark.parametrize("round", [1, 2])
def test_a_training_round_that_was_killed_is_the_same_bytes_or_none(
    machine, clean, tmp_path, round
):
    """And the next round goes on, but for a client whose histogram is gone: it has no weight."""
    limits, ends = [spent(clean("train", r)[1]) for r in range(1, round + 2)], set()
    for where, home, sent in killed(machine, clean, tmp_path, "train", round):
        before, gone = spent(home), lost(home, round)
        second = machine("train", round, home, "second")
        after = spent(home)
        third = machine("train", round, home, "third")
        assert_sent_again_or_never(second, sent, gone, where)
        assert (third["status"], third["bytes"]) == (second["status"], second["bytes"]), where
        assert before <= after == spent(home) <= limits[round - 1], where
        following = machine("train", round + 1, home, "following")
        assert following["status"] == ("refused" if COUNTS in gone else "sent"), where
        assert after <= spent(home) <= limits[round], where
        ends.add((second["status"], following["status"], bool(sent)))
    want = {("sent", "sent", False), ("sent", "sent", True), ("refused", "sent", False)}
    assert ends == want | ({("refused", "refused", False)} if round == 1 else set())


def test_a_killed_round_that_is_not_asked_again_stays_paid(machine, clean, tmp_path):
    """The server went on without the client."""
    limit = spent(clean("train", 2)[1])
    for where, home, _ in killed(machine, clean, tmp_path, "train", 1):
        before, gone = spent(home), lost(home, 1)
        following = machine("train", 2, home, "following")
        assert following["status"] == ("refused" if COUNTS in gone else "sent"), where
        assert before <= spent(home) <= limit, where
        reserved = any((e.event.channel, e.round) == (UPDATES, 1) for e in written(home))
        late = machine("train", 1, home, "late")  # what was stored then is overwritten now
        never = reserved or COUNTS in gone
        assert late["status"] == ("refused" if never else "sent"), where
        assert spent(home) <= limit * (1 + 1e-9), where


@pytest.mark.parametrize(("ask", "channels"), [("share", [COUNTS, MEANS]), ("train", [UPDATES])])
def test_what_a_step_rests_on_is_on_disk_before_it(clean, ask, channels):
    """A kill leaves the page cache whole and a power cut does not; the order of syncs counts."""
    end, home = clean(ask, 1)
    names = end["steps"]
    at, ledger = 0, "ledger.jsonl"
    for channel in channels:
        file = f"{channel.replace(' ', '-')}.safetensors"
        for step in (
            f"after write {ledger}",  # reserved
            f"after sync {ledger}",
            "before draw",
            f"after write .{file}.part",
            f"after sync .{file}.part",
            f"before rename to {file}",
            f"after rename to {file}",
            "after sync client",  # the folder: the rename itself
            f"after write {ledger}",  # stored
            f"after sync {ledger}",
        ):
            assert step in names[at:], (step, names[at:])
            at = names.index(step, at) + 1
    assert "before send" in names[at:]
    drawn = [i for i, name in enumerate(names) if name == "before draw"]
    for i in drawn:  # what is written to the ledger is synced before anything is drawn
        said = [name for name in names[:i] if name.endswith(ledger)]
        assert said[-1] == f"after sync {ledger}"
    assert written(home)


# One folder, one account


def paid(channel=MEANS, multiplier=2.0, **more) -> Event:
    """The event of a secure release, as it is before the draw."""
    values = {"l2_sensitivity": 1.0, "neighbours": "add_remove", "simulated": False, **more}
    return Event(channel, "gaussian", multiplier, **values)


def tree(value=1.0):
    return {"values": torch.full((3,), value, dtype=torch.float64)}


def must_not_draw():
    pytest.fail("it was drawn")


@pytest.fixture
def opened():
    """Opens accounts, and closes them at the end, so that their folders are free again."""
    accounts = []

    def open_account(privacy, client=0, folder=None):
        accounts.append(Account(privacy, client, folder))
        return accounts[-1]

    yield open_account
    for account in accounts:
        account.close()


def lines(folder) -> list[str]:
    return (folder / "ledger.jsonl").read_text().splitlines()


def released(folder, *channels, round=1):
    """A folder in which these channels were released, and closed again."""
    account = Account(FREE, 0, folder)
    for i, channel in enumerate(channels):
        account.release(round, paid(channel), lambda i=i: tree(i))
    account.close()
    return folder


def test_a_folder_that_is_in_use_is_refused_in_one_line(opened, machine, tmp_path):
    """Here, and in another process."""
    account = opened(FREE, 0, tmp_path / "client")
    with pytest.raises(PrivacyError, match="in use by another process; stop it first") as caught:
        opened(FREE, 0, tmp_path / "client")
    assert "\n" not in str(caught.value)
    end = machine("share", 1, tmp_path)
    assert (end["status"], end["error"], end["bytes"]) == ("refused", str(caught.value), b"")
    account.close()
    assert machine("share", 1, tmp_path)["status"] == "sent"


def test_a_release_is_sent_again_from_the_folder(opened, tmp_path):
    account = opened(FREE, 0, tmp_path)
    first, events = account.release(1, paid(), lambda: tree(0.25))
    account.close()
    again, same = opened(FREE, 0, tmp_path).release(4, paid(), must_not_draw)
    assert torch.equal(first["values"], again["values"])
    assert events == same
    assert len(lines(tmp_path)) == 2


@pytest.mark.parametrize("channel", [MEANS, UPDATES])
def test_a_stored_release_that_was_changed_is_refused(opened, tmp_path, channel):
    path = released(tmp_path, channel) / f"{channel.replace(' ', '-')}.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    account = opened(FREE, 0, tmp_path)
    with pytest.raises(PrivacyError, match=f'stored "{channel}" is not what its ledger says'):
        account.release(1, paid(channel), must_not_draw)
    assert len(lines(tmp_path)) == 2
    path.write_bytes(whole)
    account.release(1, paid(channel), must_not_draw)


@pytest.mark.parametrize("broken", ["empty", "half", "garbled"])
def test_a_stored_release_that_is_no_release_is_refused_in_one_line(opened, tmp_path, broken):
    path = released(tmp_path, MEANS) / "latent-means.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "half": whole[:60], "garbled": b"\xff" * 40}[broken])
    with pytest.raises(PrivacyError, match="latent means") as caught:
        opened(FREE, 0, tmp_path).release(1, paid(), must_not_draw)
    assert "\n" not in str(caught.value)


def test_a_stored_release_of_another_channel_is_refused(opened, tmp_path):
    released(tmp_path, COUNTS, MEANS)
    shutil.copy(tmp_path / "class-histogram.safetensors", tmp_path / "latent-means.safetensors")
    with pytest.raises(PrivacyError, match="is not what its ledger says"):
        opened(FREE, 0, tmp_path).release(1, paid(), must_not_draw)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see the next test
def test_a_broken_line_of_the_ledger_is_named_and_nothing_is_drawn(opened, tmp_path):
    path = released(tmp_path, COUNTS, MEANS) / "ledger.jsonl"
    kept = lines(tmp_path)
    for broken in (kept[1][:50], kept[1].replace('"stored"', "stored"), "[]", "{}", ""):
        path.write_text("\n".join([kept[0], broken, *kept[2:]]) + "\n")
        with pytest.raises(PrivacyError, match="line 2, got something else"):
            opened(FREE, 0, tmp_path)
        gc.collect()


def test_a_folder_whose_ledger_was_mended_is_free_again(opened, tmp_path):
    path = released(tmp_path, MEANS) / "ledger.jsonl"
    whole = path.read_text()
    path.write_text("{}\n" + whole)
    with pytest.raises(PrivacyError, match="line 1") as caught:
        opened(FREE, 0, tmp_path)
    path.write_text(whole)
    try:
        opened(FREE, 0, tmp_path)
    finally:
        del caught
        gc.collect()


def test_a_torn_last_line_is_cut_and_does_not_count(opened, tmp_path):
    path = released(tmp_path, COUNTS) / "ledger.jsonl"
    whole = path.read_bytes()
    reserved = whole.splitlines(keepends=True)[0].replace(COUNTS.encode(), MEANS.encode())
    for torn in (reserved[:1], reserved[:50], reserved[:-1]):
        path.write_bytes(whole + torn)
        account = opened(FREE, 0, tmp_path)
        assert path.read_bytes() == whole
        assert [e.channel for e in account.ledger.events()] == [COUNTS]
        account.close()
    opened(FREE, 0, tmp_path).release(1, paid(), tree)
    assert len(read(path)) == 4


@pytest.mark.parametrize("channel", [MEANS, UPDATES])
def test_a_stored_release_that_is_gone_is_not_drawn_again(opened, tmp_path, channel):
    path = released(tmp_path, channel) / f"{channel.replace(' ', '-')}.safetensors"
    path.unlink()
    kept, account = lines(tmp_path), opened(FREE, 0, tmp_path)
    for _ in range(2):
        with pytest.raises(PrivacyError, match="counts as spent and is not drawn again"):
            account.release(1, paid(channel), must_not_draw)
    assert lines(tmp_path) == kept
    assert account.ledger.events() == [paid(channel)]


def test_a_draw_that_broke_off_is_not_drawn_again(opened):
    account, calls = opened(FREE), []

    def breaks():
        calls.append(1)
        raise MemoryError

    with pytest.raises(MemoryError):
        account.release(1, paid(), breaks)
    with pytest.raises(PrivacyError, match="not drawn again"):
        account.release(1, paid(), must_not_draw)
    assert (calls, account.ledger.events()) == ([1], [paid()])


def test_a_stored_release_without_a_ledger_still_counts(opened, tmp_path):
    """Whoever deletes the ledger does not get the budget back."""
    (released(tmp_path, MEANS) / "ledger.jsonl").unlink()
    account = opened(FREE, 0, tmp_path)
    try:
        account.release(1, paid(), must_not_draw)
    except PrivacyError:
        return
    assert epsilon(account.ledger.events(), DELTA) == epsilon([paid()], DELTA)


@pytest.mark.parametrize(
    "other", [{"multiplier": 20.0}, {"simulated": True}, {"neighbours": "replace_one"}]
)
def test_a_stored_release_is_not_sent_under_other_parameters(opened, tmp_path, other):
    """Settings that changed after the draw do not change what it cost."""
    account = opened(FREE, 0, released(tmp_path, MEANS))
    with pytest.raises(PrivacyError, match="latent means"):
        account.release(1, paid(**other), must_not_draw)


def test_a_lost_release_is_not_drawn_under_other_parameters(opened, tmp_path):
    (released(tmp_path, MEANS) / "latent-means.safetensors").unlink()
    account = opened(FREE, 0, tmp_path)
    with pytest.raises(PrivacyError, match="latent means"):
        account.release(1, paid(multiplier=20.0), must_not_draw)


# A seeded source


def test_a_simulation_draws_a_lost_release_again_in_the_same_process(opened, tmp_path):
    statistic = ClassSums(1.0)
    for folder in (None, tmp_path / "client"):
        account, drawn = opened(LOOSE, 0, folder), []

        def draw(broken, drawn=drawn, statistic=statistic):
            noise = Seeded(np.random.default_rng(3))
            values = gaussian(torch.zeros(4, dtype=torch.float64), statistic, 2.0, noise)
            drawn.append(values)
            if broken:
                raise RuntimeError
            return {"values": values}

        what = event(MEANS, statistic, 2.0, Seeded(np.random.default_rng(0)))
        with pytest.raises(RuntimeError):
            account.release(1, what, lambda draw=draw: draw(True))
        got, _ = account.release(1, what, lambda draw=draw: draw(False))
        assert torch.equal(drawn[0], got["values"])
        assert account.ledger.events() == [what]


# Once


def test_statistics_are_released_once_for_life_and_model_updates_once_a_round(opened, tmp_path):
    account, values, sent = opened(FREE, 0, tmp_path), itertools.count(), {}
    for round in (1, 1, 2, 2, 3):
        for channel in (COUNTS, MEANS, UPDATES):
            got = account.release(round, paid(channel), lambda: tree(next(values)))
            before = sent.setdefault((channel, round if channel == UPDATES else 0), got)
            assert torch.equal(before[0]["values"], got[0]["values"])
            assert before[1] == got[1]
    assert next(values) == len(sent) == 5
    assert len({e[0].digest for _, e in sent.values()}) == 5
    channels = [e.channel for e in account.ledger.events()]
    assert sorted(channels) == sorted([COUNTS, MEANS, *[UPDATES] * 3])


def test_the_same_draw_has_the_same_digest():
    """In memory a simulation computes a round's updates again; what it drew is what it was."""
    account = Account(LOOSE)
    what = paid(UPDATES, simulated=True)
    assert len({account.release(1, what, tree)[1] for _ in range(40)}) == 1


def test_a_round_that_is_over_is_not_drawn_again(opened, tmp_path):
    account = opened(FREE, 0, tmp_path)
    for round in (1, 2):
        account.release(round, paid(UPDATES), tree)
    with pytest.raises(PrivacyError, match="not drawn again"):
        account.release(1, paid(UPDATES), must_not_draw)


# The budget


def test_what_would_cost_more_than_the_budget_is_not_drawn(opened, tmp_path):
    cost = epsilon([paid(COUNTS), paid(MEANS)], DELTA)
    privacy = Privacy(max_epsilon=cost * (1 - 1e-6))
    account = opened(privacy, 7, tmp_path)
    account.release(1, paid(COUNTS), tree)
    kept = lines(tmp_path)
    with pytest.raises(PrivacyError) as caught:
        account.release(2, paid(MEANS), must_not_draw)
    said = str(caught.value)
    for part in (
        f"{cost:.4g}",
        "delta 1e-05",
        f"max_epsilon {privacy.max_epsilon:g}",
        "client 7",
        f'"{MEANS}"',
    ):
        assert part in said
    assert "\n" not in said
    assert lines(tmp_path) == kept
    assert account.ledger.events() == [paid(COUNTS)]
    assert not (tmp_path / "latent-means.safetensors").exists()
    account.release(3, paid(COUNTS), must_not_draw)  # what is paid for is still sent
    account.close()
    again = opened(privacy, 7, tmp_path)  # a new start is no new budget
    with pytest.raises(PrivacyError, match="above the budget"):
        again.release(2, paid(MEANS), must_not_draw)


def test_a_budget_that_is_just_enough_is_enough(opened):
    cost = epsilon([paid(COUNTS), paid(MEANS)], DELTA)
    account = opened(Privacy(max_epsilon=cost))
    account.release(1, paid(COUNTS), tree)
    account.release(1, paid(MEANS), tree)
    assert epsilon(account.ledger.events(), DELTA) == cost


@pytest.mark.parametrize("target", [0.5, 1.0, 2.0, 8.0, 10.0, 5.0, 50.0])
def test_a_budget_of_the_target_is_enough(opened, target):
    """Though what the calibrated multipliers cost is the target only up to rounding."""
    privacy = Privacy(target_epsilon=target, max_epsilon=target, count_noise_multiplier=50.0)
    account, noise = opened(privacy), Seeded(np.random.default_rng(0))
    multipliers = calibrate(privacy)
    account.release(1, event(COUNTS, Histogram(), multipliers.counts, noise), tree)
    account.release(1, event(MEANS, ClassSums(2.0), multipliers.latent, noise), tree)


def test_a_budget_counts_what_was_drawn_and_lost(opened):
    account = opened(Privacy(max_epsilon=epsilon([paid(MEANS)], DELTA)))
    with pytest.raises(ZeroDivisionError):
        account.release(1, paid(COUNTS), lambda: 1 / 0)
    with pytest.raises(PrivacyError, match="above the budget"):
        account.release(1, paid(MEANS), must_not_draw)


def test_nothing_leaves_in_the_clear_with_a_budget(opened, tmp_path):
    account = opened(Privacy(max_epsilon=1e6), 3, tmp_path)
    with pytest.raises(PrivacyError, match=r"client 3 has a budget .*1e.06.*model, example count"):
        account.in_the_clear(1, "model", "example count")
    assert lines(tmp_path) == []
    me = client(three_shards()[1], small_net(), privacy=replace(LOOSE, max_epsilon=60.0))
    broadcast = {k: v.clone() for k, v in small_net().state_dict().items()}
    with pytest.raises(PrivacyError, match="in the clear, which no epsilon covers"):
        FedAvg().client(Message("train", {"model": broadcast}), me)
    assert me.account.ledger.entries == []


def test_what_left_in_the_clear_before_there_was_a_budget_breaks_it(opened, tmp_path):
    account = opened(FREE, 0, tmp_path)
    account.in_the_clear(1, "model")
    account.in_the_clear(2, "model", "example count")
    assert len(lines(tmp_path)) == 2
    account.close()
    with pytest.raises(PrivacyError, match="to inf at delta"):
        opened(Privacy(max_epsilon=1e6), 0, tmp_path).release(3, paid(), must_not_draw)


def training(rounds, **more) -> tuple[Privacy, float]:
    """Private training, and what it costs with its histogram in this many rounds."""
    dp = DpTraining(kind="dpsgd", expected_batch_size=40, expected_examples=40)
    privacy = Privacy(weights="noisy", training=dp, **more)
    step = calibrate(privacy, 5).training
    events = [paid(UPDATES, step)] * rounds + [paid(COUNTS, privacy.count_noise_multiplier)]
    return privacy, epsilon(events, DELTA)


def test_private_training_stops_at_the_budget(opened, monkeypatch):
    """Two rounds are paid for; the third does not compute a gradient."""
    pytest.importorskip("opacus")
    privacy, cost = training(2)
    privacy = replace(privacy, max_epsilon=cost * (1 + 1e-9))
    settings = NetSettings(width=0.25, latent=6, hidden=8, norm="group")
    net = build((1, 4, 4), CLASSES, settings, Rng(0))
    broadcast = {k: v.clone() for k, v in net.state_dict().items()}
    account, local = opened(privacy), Training(epochs=1, lr=0.01)

    def train(round):
        more = {"account": account, "privacy": privacy, "local": local}
        me = client(three_shards()[1], net, round, **more)
        return FedAvg().client(Message("train", {"model": broadcast}), me)[0]

    for round in (1, 2):
        reply = train(round)
        assert {e.mechanism for e in reply.events} == {"gaussian"}
    kept = list(account.ledger.entries)
    assert epsilon(account.ledger.events(), DELTA) == pytest.approx(cost)
    monkeypatch.setattr("feddpms.algorithms.fit._train", lambda *_: must_not_draw())
    with pytest.raises(PrivacyError) as caught:
        train(3)
    _, over = training(3)
    for part in (f"epsilon per record to {over:.4g}", "delta 1e-05", f"max_epsilon {cost:g}"):
        assert part in str(caught.value)
    assert "round 3" in str(caught.value)
    assert account.ledger.entries == kept


# Settings that were chosen on private records


def test_settings_tuned_on_private_records_void_every_finite_claim():
    me = client(three_shards()[1], small_net(), privacy=replace(LOOSE, tuned_on="private"))
    broadcast = {k: v.clone() for k, v in small_net().state_dict().items()}
    reply, _ = FedDPMS().client(Message("share", {"model": broadcast}), me)
    (voided,) = [e for e in reply.events if e.mechanism == "none"]
    assert "tuned on private" in voided.channel
    assert {e.channel for e in reply.events} == {COUNTS, MEANS, voided.channel}
    server = Ledger()
    server.record(1, 0, reply.events)
    for ledger in (server, me.account.ledger):
        assert math.isinf(epsilon(ledger.events(), DELTA))
        words = claim(ledger, DELTA)
        assert words.startswith("No claim: clips or other settings were chosen by looking at")
        assert "Covered" not in words


def test_settings_tuned_on_private_records_keep_no_budget(opened):
    privacy = replace(LOOSE, tuned_on="private", max_epsilon=1e6)
    account = opened(privacy)
    with pytest.raises(PrivacyError, match="tuned on private records"):
        account.release(1, paid(), must_not_draw)
    assert account.ledger.events() == []


# Secure from end to end


def test_a_secure_release_is_sent_again_and_is_no_simulation(opened, tmp_path):
    pytest.importorskip("opendp")
    assert isinstance(client(three_shards()[1], small_net(), privacy=SECURE).noise("x"), Secure)
    replies = []
    for round in (1, 2):
        account = opened(SECURE, 0, tmp_path)
        me = client(three_shards()[1], small_net(), round, privacy=SECURE, account=account)
        broadcast = {k: v.clone() for k, v in small_net().state_dict().items()}
        replies.append(FedDPMS().client(Message("share", {"model": broadcast}), me)[0])
        account.close()
    first, again = replies
    assert first.events == again.events
    assert not any(e.simulated for e in first.events)
    for key, value in first.trees["release"].items():
        assert torch.equal(again.trees["release"][key], value)
