"""Audits of the shipped release and of finished runs: they pass what is right, and have power."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from feddpms import audits, config, runs
from feddpms.cli import main
from feddpms.errors import ConfigError, RunFolderError
from feddpms.prepare import prepare
from feddpms.privacy import Privacy, release
from feddpms.privacy.attack import auc_limit
from feddpms.privacy.mechanism import ClassSums, FixedMeans, gaussian
from feddpms.report import plots
from privacy.plant import planted
from small import GOES_ON

RUNS = 2000
CASES = {
    "class_sum": Privacy(),
    "class_sum, replace": Privacy(adjacency="replace_one"),
    "fixed_m_mean": Privacy(release="fixed_m_mean"),
    "fixed_m_mean, replace": Privacy(release="fixed_m_mean", adjacency="replace_one"),
    "the paper's target": Privacy(target_epsilon=0.5, target_delta=0.01),
}


def bound(privacy: Privacy, runs: int = RUNS, latent: int = 32, size: int = 100):
    return audits.audit_release(privacy, latent, size, runs)


@pytest.mark.parametrize("case", CASES)
def test_a_bound_on_the_release_is_below_its_claim(case):
    found = bound(CASES[case])
    assert found.epsilon_lower <= found.claimed_epsilon
    assert found.doubled_mu_power > 0.7
    assert found.non_finite == 0
    if case != "class_sum, replace":  # there, no pair moves both parts by all that was paid for
        assert found.pair_mu == pytest.approx(_claimed_mu(found), rel=1e-6)


def _claimed_mu(found) -> float:
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    return 1 / get_sigma_gaussian(found.claimed_epsilon, found.delta)


def test_a_bound_on_the_release_is_above_half_of_its_claim():
    found = bound(Privacy(), runs=5000)
    assert 1.0 < found.epsilon_lower <= 2.0


def test_the_secure_release_passes_too():
    found = bound(Privacy(noise="secure"), runs=1000)
    assert 0.1 < found.epsilon_lower <= 2.0


EXACT = "gaussian(exact, statistic, multiplier, source)"
MEAN_OF = f"sum({EXACT} for _ in range({{0}})) / {{0}}"
CLIP = "rows = rows * (self.l2_clip / norms.clamp(min=self.l2_clip))"
BUGS = {
    "sensitivity of one coordinate": (
        "fixed_m_mean",
        FixedMeans.l2_sensitivity,
        "both * self.latent",
        "both",
    ),
    "radius for diameter": (
        "class_sum, replace",
        ClassSums.l2_sensitivity,
        'if self.adjacency == "add_remove" else 2',
        "",
    ),
    "released twice": (
        "class_sum",
        release.class_statistics,
        f'{{"values": {EXACT}}}',
        f'{{"values": {MEAN_OF.format(2)}}}',
    ),
    "50 draws": (
        "class_sum",
        release.class_statistics,
        f'{{"values": {EXACT}}}',
        f'{{"values": {MEAN_OF.format(50)}}}',
    ),
    "divisor of the records that there are": (
        "fixed_m_mean",
        FixedMeans.value,
        "torch.stack(chosen) / self.size",
        "torch.stack(chosen) / int((labels == 0).sum().clamp(max=self.size))",
    ),
    "no clip": ("class_sum", ClassSums.value, CLIP, "pass"),
    "half the noise": (
        "class_sum",
        gaussian,
        "std = noise_multiplier",
        "std = 0.5 * noise_multiplier",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_exceeds_the_claim(bug):
    case, function, old, new = BUGS[bug]
    size = 10 if bug.startswith("divisor") else 100
    privacy = replace(CASES[case], l2_clip=0.5)  # below the radius of the cube: the clip matters
    with planted(function, old, new):
        found = bound(privacy, size=size)
    assert found.epsilon_lower > found.claimed_epsilon


def test_the_papers_release_has_no_claim_to_audit():
    with pytest.raises(ConfigError, match="paper"):
        bound(Privacy(release="paper"))


SMALL = {
    "rounds": 3,
    "data": {"name": "digits", "fraction": 0.15},
    "partition": {"kind": "iid", "clients": 2},
    "local": {"epochs": 2},
    "net": {"width": 0.5},
    "privacy": {"target_epsilon": 50.0, "count_noise_multiplier": 0.5, "min_class_count": 3.0},
    "method": {"name": "feddpms", **GOES_ON, "preliminary_rounds": 1},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run that released, and the same without."""
    folder = tmp_path_factory.mktemp("attack")
    runs.run(config.parse(SMALL), folder / "feddpms")
    runs.run(config.parse({**SMALL, "rounds": 1, "method": "fedavg"}), folder / "fedavg")
    return folder


def test_attacks_report_intervals_and_pictures(finished):
    found = audits.attack(finished / "feddpms")
    assert found.picture == finished / "feddpms" / "attack.png"
    assert found.picture.read_bytes().startswith(b"\x89PNG")
    said = json.loads((finished / "feddpms" / "attack.json").read_text())
    assert set(said) == {"model", "synthetic", "means", "baseline", "limit", "simulated"}
    assert said["simulated"] is True
    assert 0.5 < said["limit"] < 1
    for m in (found.model, found.synthetic, found.means, found.baseline):
        assert m is not None
        assert 0 <= m.auc_low <= m.auc <= m.auc_high <= 1
        assert 0 <= m.tpr_at_1_low <= m.tpr_at_1 <= m.tpr_at_1_high <= 1
    assert found.baseline.auc_low < 0.5 < found.baseline.auc_high
    assert said["model"]["auc"] == found.model.auc


def test_without_a_decoder_means_are_attacked_and_nothing_is_drawn(tmp_path, capsys, monkeypatch):
    method = {"name": "feddpms", "preliminary_rounds": 2}
    runs.run(config.parse({**SMALL, "method": method}), tmp_path / "resting")
    assert not any(
        k.startswith("decoder.") for k in load_file(tmp_path / "resting/model.safetensors")
    )
    monkeypatch.setattr("sys.argv", ["feddpms", "audit", "attack", str(tmp_path / "resting")])
    main()
    said = json.loads((tmp_path / "resting" / "attack.json").read_text())
    assert said["synthetic"] is None
    assert said["means"]["auc"] > 0
    assert said["limit"] > 0.5
    assert not (tmp_path / "resting" / "attack.png").exists()
    assert "no decoder was trained" in capsys.readouterr().out


def test_a_run_that_released_nothing_is_attacked_by_its_model_alone(finished):
    found = audits.attack(finished / "fedavg")
    assert found.synthetic is found.means is found.picture is None
    assert not (finished / "fedavg" / "attack.png").exists()


def test_an_overfitted_model_gives_its_records_away(tmp_path):
    """The attack has power: on 100 records learnt by heart, the AUC is far from 1/2."""
    local = {"epochs": 60, "lr": 5e-3}
    values = {**SMALL, "rounds": 1, "method": "central", "local": local, "net": {"width": 2.0}}
    values["data"] = {"name": "digits", "fraction": 0.07}
    runs.run(config.parse(values), tmp_path / "run")
    found = audits.attack(tmp_path / "run")
    assert found.model.auc_low > 0.7
    assert found.baseline.auc_low < 0.5 < found.baseline.auc_high


def test_means_without_noise_give_their_records_away(finished, tmp_path):
    """With each record's own code as a released mean, the distance to it finds the members."""
    settings = config.parse(SMALL)
    folder = tmp_path / "run"
    folder.mkdir()
    for file in ("run.toml", "model.safetensors"):
        (folder / file).write_bytes((finished / "feddpms" / file).read_bytes())
    data = runs.load(settings.data, runs.Rng(settings.seed))
    prepared = prepare(settings, data)
    net = audits.with_weights(prepared.net, load_file(folder / "model.safetensors"))
    leaked = {}
    for c, shard in enumerate(prepared.shards):
        leaked[f"{c}.classes"] = shard.y
        leaked[f"{c}.means"] = audits.encode(net, shard.x)
        leaked[f"{c}.counts"] = torch.zeros(10)
    save_file(leaked, folder / "released.safetensors")
    found = audits.attack(folder)
    assert found.means is not None
    assert found.means.auc_low > 0.95
    honest = audits.attack(finished / "feddpms").means
    assert honest is not None
    assert honest.auc_low < auc_limit(5)


def test_an_unfinished_run_is_refused(finished, tmp_path):
    (tmp_path / "run.toml").write_bytes((finished / "feddpms" / "run.toml").read_bytes())
    with pytest.raises(RunFolderError, match=r"finished run with model\.safetensors"):
        audits.attack(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        {"foo": torch.zeros(1)},
        {"abc.means": torch.zeros(1, 32)},
        {"0.classes": torch.tensor([1]), "0.means": torch.zeros(1, 7)},
        {"0.classes": torch.tensor([99]), "0.means": torch.zeros(1, 32)},
        {"0.classes": torch.tensor([1]), "0.means": torch.full((1, 32), math.nan)},
        {"0.means": torch.zeros(1, 32)},
    ],
)
def test_a_release_that_is_none_is_refused(finished, tmp_path, broken):
    for file in ("run.toml", "model.safetensors"):
        (tmp_path / file).write_bytes((finished / "feddpms" / file).read_bytes())
    save_file(broken, tmp_path / "released.safetensors")
    with pytest.raises(RunFolderError, match=r"expected what the clients of run\.toml released"):
        audits.attack(tmp_path)
    assert not (tmp_path / "attack.json").exists()


def test_the_model_of_another_run_is_refused(finished, tmp_path):
    for file, of in (("run.toml", "feddpms"), ("released.safetensors", "feddpms")):
        (tmp_path / file).write_bytes((finished / of / file).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(
        (finished / "fedavg" / "model.safetensors").read_bytes()
    )
    with pytest.raises(RunFolderError, match=r"expected the model of run\.toml"):
        audits.attack(tmp_path)


def test_local_models_are_not_attacked(tmp_path):
    runs.run(config.parse({**SMALL, "rounds": 1, "method": "local"}), tmp_path / "run")
    with pytest.raises(ConfigError, match="local, which sends none"):
        audits.attack(tmp_path / "run")


def test_the_papers_means_are_attacked_too(tmp_path):
    privacy = {**SMALL["privacy"], "release": "paper", "mean_size": 5, "paper_draws": 3}
    result = runs.run(config.parse({**SMALL, "privacy": privacy}), tmp_path / "run")
    assert "Covered" not in result.claim
    assert "Not covered: latent means as in the paper" in result.claim
    assert not any("counts" in k for k in load_file(tmp_path / "run" / "released.safetensors"))
    found = audits.attack(tmp_path / "run")
    assert found.means is not None
    assert found.limit is None


def test_a_grid_of_pictures_has_a_row_and_a_column_for_each():
    rows = {"a": np.random.default_rng(0).random((3, 1, 4, 4)), "b": np.zeros((3, 3, 4, 4))}
    picture = plots.grid_png(rows, ["x", "y", "z"], "title")
    assert picture.startswith(b"\x89PNG")
    assert picture == plots.grid_png(rows, ["x", "y", "z"], "title")


def test_the_worst_pair_moves_the_release_by_its_whole_sensitivity():
    for case in ("class_sum", "fixed_m_mean", "fixed_m_mean, replace"):
        privacy = CASES[case]
        a, b = (audits._exact(privacy, *side) for side in audits.worst_pair(privacy, 16, 100))
        values = np.linalg.norm((b - a)[:-2])
        assert values == pytest.approx(release.shape(privacy, 16).l2_sensitivity, rel=1e-6)
        counts = 1.0 if privacy.adjacency == "add_remove" else math.sqrt(2)
        assert np.linalg.norm((b - a)[-2:]) == pytest.approx(counts)
