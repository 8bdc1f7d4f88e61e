"""The contract on a fully connected network, the only kind that every method takes."""

import inspect

import pytest

from contract import test_contract as contract
from feddpms.algorithms import PFNM, FedAvg, FedDPMS, FedMA, FedMix
from feddpms.algorithms.neurons import Prior
from small import small_mlp

CASES = {
    "fedavg": FedAvg(),
    "pfnm": PFNM(),
    "pfnm, map": PFNM(posterior="map", prior=Prior(sigma0=10.0)),
    "fedma": FedMA(),
    "fedmix+pfnm": FedMix(inner=PFNM()),
    "feddpms": FedDPMS(**contract.DPMS),
}
CHECKS = [
    contract.test_inputs_are_not_changed,
    contract.test_the_same_seed_gives_the_same_bits,
    contract.test_a_client_rule_does_not_depend_on_what_the_network_held,
    contract.test_the_order_of_replies_does_not_matter,
    contract.test_replies_equal_to_the_broadcast_change_nothing,
    contract.test_one_client_is_local_training,
    contract.test_a_missing_reply_is_survived,
    contract.test_a_client_may_come_late,
    contract.test_training_lowers_the_loss,
    contract.test_what_comes_from_data_has_an_event,
    contract.test_every_method_takes_the_same_number_of_steps,
    contract.test_a_method_trains_only_what_it_should,
]
SHRINKS = (
    contract.test_replies_equal_to_the_broadcast_change_nothing,
    contract.test_one_client_is_local_training,
)
"""what a posterior mean does not keep"""


@pytest.fixture(scope="module", autouse=True)
def on_an_mlp():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "small_net", small_mlp)
        patch.setattr(contract, "CASES", CASES)
        yield


@pytest.fixture(scope="module")
def watched(on_an_mlp):
    runs = {}
    for name, method in CASES.items():
        spy = contract.Watched(method)
        runs[name] = (spy, *contract.go(spy))
    return runs


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check.__name__.removeprefix('test_')}")
        for name in CASES
        for check in CHECKS
        if not (name == "pfnm, map" and check in SHRINKS)
    ],
)
def test_on_an_mlp(name, check, watched):
    takes_runs = "watched" in inspect.signature(check).parameters
    check(name, watched) if takes_runs else check(name)


def test_every_method_starts_from_the_same_weights(monkeypatch):
    monkeypatch.setattr(contract, "FEDERATED", CASES)
    contract.test_every_method_starts_from_the_same_weights()
