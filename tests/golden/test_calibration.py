"""Calibration of the global classifier against plain NumPy, and its place in the rounds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from contract.test_contract import Watched, same
from feddpms.algorithms import FedAvg, FedDPMS, Training
from feddpms.engine import Crew, Engine, simulate
from feddpms.models import trunk
from feddpms.privacy import Ledger
from feddpms.rng import Rng
from feddpms.synthesis import Calibration, calibrated
from feddpms.synthesis.calibration import DRAWS, pooled_means
from small import CLASSES, LOOSE, TASK, small_net, three_shards, unseen

LATENT = 6
HOW = Calibration(steps=7, lr=0.03, spread=0.4)


def released(classes, seed, counts=(9.0, 5.0, 7.0)):
    g = torch.Generator().manual_seed(seed)
    means = torch.rand(len(classes), LATENT, generator=g)
    return {"classes": torch.tensor(classes), "means": means, "counts": torch.tensor(counts)}


BANK = {4: released([0, 2], 1), 1: released([0, 1], 2, (1.5, -3.0, 20.0)), 2: released([1], 3)}
BANK[1]["counts"][1] = 2.5


def pooled(bank):
    """Mean over clients weighted by noisy counts [classes, latent], float64."""
    sums, total = np.zeros((CLASSES, LATENT)), np.zeros(CLASSES)
    for tree in bank.values():
        for c, mean in zip(tree["classes"].tolist(), tree["means"].double().numpy(), strict=True):
            sums[c] += float(tree["counts"][c]) * mean
            total[c] += float(tree["counts"][c])
    return sums / total[:, None]


def leaky(a):
    return np.where(a > 0, a, 0.1 * a)


def trained(weights, means, how, draws):
    """Adam on two linear layers with a leaky ReLU between, down the mean cross entropy."""
    w = {k: v.double().numpy().copy() for k, v in weights.items()}
    first, second = ({k: np.zeros_like(v) for k, v in w.items()} for _ in range(2))
    y = np.repeat(np.arange(CLASSES), DRAWS)
    for step in range(1, how.steps + 1):
        noise = torch.randn(len(y), LATENT, generator=draws).double().numpy()
        z = np.clip(means[y] + how.spread * noise, 0, 1)
        x = (z - 0.5) * np.sqrt(12)
        a = x @ w["body.0.weight"].T + w["body.0.bias"]
        h = leaky(a)
        logits = h @ w["head.weight"].T + w["head.bias"]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        d = (p - np.eye(CLASSES)[y]) / len(y)
        back = (d @ w["head.weight"]) * np.where(a > 0, 1, 0.1)
        gradient = {
            "head.weight": d.T @ h,
            "head.bias": d.sum(0),
            "body.0.weight": back.T @ x,
            "body.0.bias": back.sum(0),
        }
        for k, g in gradient.items():
            first[k] = 0.9 * first[k] + 0.1 * g
            second[k] = 0.999 * second[k] + 0.001 * g**2
            rate = how.lr * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            w[k] -= rate * first[k] / (np.sqrt(second[k]) + 1e-8 * np.sqrt(1 - 0.999**step))
    return w


def model():
    return trunk({k: v.clone() for k, v in small_net().state_dict().items()})


def test_means_are_pooled_by_noisy_counts():
    got = pooled_means(BANK, CLASSES)
    np.testing.assert_allclose(got.numpy(), pooled(BANK), rtol=1e-6)


def test_the_classifier_is_that_of_the_formulas():
    before = model()
    weights = {k[len("classifier.") :]: v for k, v in before.items() if "classifier" in k}
    want = trained(weights, pooled(BANK), HOW, Rng(0).torch("calibration", 1, 2, 4))
    got = calibrated(TASK, before, BANK, HOW)
    assert got.keys() == {f"classifier.{k}" for k in want}
    for k, v in want.items():
        np.testing.assert_allclose(got[f"classifier.{k}"].numpy(), v, rtol=1e-4, atol=1e-5)
        assert not np.allclose(v, weights[k].numpy(), atol=0.01)
    assert same(before, model())  # nothing is changed in place


def test_no_class_may_be_missing():
    assert calibrated(TASK, model(), {k: BANK[k] for k in (1, 2)}, HOW) == {}
    assert calibrated(TASK, model(), {}, HOW) == {}
    assert calibrated(TASK, model(), BANK, replace(HOW, steps=0)) == {}


def watched(method, rounds=6, cohort=1.0):
    spy = Watched(method)
    task = replace(TASK, rounds=rounds)
    local = Training(epochs=1, batch_size=16, lr=0.01)
    crew = Crew(
        spy, dict(enumerate(three_shards())), unseen(), small_net(), task, local, LOOSE, Rng(0)
    )
    return spy, simulate(crew, Engine(cohort=cohort), Ledger())


def test_clients_train_as_without_and_only_the_end_is_calibrated():
    _, outcome = watched(FedDPMS(preliminary_rounds=4))
    _, plain = watched(FedAvg(), 4)
    assert [r.phase for r in outcome.rounds] == ["classify"] * 4 + ["share", "rest"]
    for got, want in zip(outcome.rounds, plain.rounds, strict=False):
        assert (got.train_loss, got.test_accuracy) == (want.train_loss, want.test_accuracy)
        assert (got.bytes_up, got.bytes_down) == (want.bytes_up, want.bytes_down)
    kept = {k: v for k, v in trunk(outcome.model).items() if "classifier" not in k}
    assert same(kept, {k: v for k, v in plain.model.items() if "classifier" not in k})
    assert not same(outcome.model["classifier.head.weight"], plain.model["classifier.head.weight"])
    last = outcome.rounds[-1]
    assert (last.bytes_up, last.bytes_down, last.numbers["steps"]) == (0, 0, 0)
    assert last.test_accuracy == outcome.rounds[-2].test_accuracy


def test_the_head_is_trained_on_all_releases_so_far_from_the_averaged_one():
    spy, outcome = watched(FedDPMS(preliminary_rounds=2), rounds=9, cohort=0.4)
    state = spy.served[-1][2]
    assert len(state.releases) == 3
    assert state.head
    assert same(state.head, calibrated(TASK, state.inner.model, state.releases, Calibration()))
    assert same(outcome.model, {**state.decoder, **state.inner.model, **state.head})


def test_who_goes_on_is_sent_the_averaged_classifier():
    method = FedDPMS(secondary="train", preliminary_rounds=2)
    spy, outcome = watched(method)
    plain, uncalibrated = watched(replace(method, calibration=Calibration(steps=0)))
    assert spy.served[-1][2].head
    assert same(spy.served[-1][2].inner.model, plain.served[-1][2].inner.model)
    assert not same(outcome.model, uncalibrated.model)


@pytest.mark.parametrize(
    ("secondary", "rounds", "first"),
    [("rest", 2, 1), ("rest", 10, 9), ("rest", 25, 24), ("rest", 50, 48), ("train", 50, 20)],
)
def test_how_many_rounds_come_before_sharing(secondary, rounds, first):
    method = FedDPMS(secondary=secondary)
    state = method.start(small_net().state_dict(), replace(TASK, rounds=rounds))
    assert method._left(state) == first
