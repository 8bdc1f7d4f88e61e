"""The contract on the other kinds of network: fully connected, which every method takes; LeNet."""

import inspect
from dataclasses import replace

import pytest

from contract import test_contract as contract
from feddpms.algorithms import (
    PFNM,
    FedAvg,
    FedDA,
    FedDG,
    FedDPMS,
    FedMA,
    FedMix,
    Moon,
    Scaffold,
    Sharing,
)
from feddpms.algorithms.neurons import Prior
from small import small_lenet, small_mlp, three_shards, unseen

BOTH = {"fedavg": FedAvg(), "fedma": FedMA(), "feddpms": FedDPMS(**contract.DPMS)}
CASES = {
    "mlp": {
        **BOTH,
        "pfnm": PFNM(),
        "pfnm, map": PFNM(posterior="map", prior=Prior(sigma0=10.0)),
        "fedmix+pfnm": FedMix(inner=PFNM()),
        "sharing+pfnm": Sharing(inner=PFNM()),
    },
    "lenet": {
        **BOTH,
        "scaffold": Scaffold(with_adam="decoupled"),
        "moon": Moon(),
        "fedmix": FedMix(),
        "feddg": FedDG(),
        "sharing": Sharing(),
        "fedda": FedDA(preliminary_rounds=2),
    },
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


def larger(shard):
    """The same images with pixels of 4x4."""
    return replace(shard, x=shard.x.repeat_interleave(4, 2).repeat_interleave(4, 3))


@pytest.fixture(scope="module", params=CASES)
def kind(request):
    """A kind of network, on which the contract's own helpers work from now on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "CASES", CASES[request.param])
        patch.setattr(contract, "FEDERATED", CASES[request.param])
        if request.param == "mlp":
            patch.setattr(contract, "small_net", small_mlp)
        else:
            patch.setattr(contract, "small_net", small_lenet)
            patch.setattr(contract, "three_shards", lambda: list(map(larger, three_shards())))
            patch.setattr(contract, "unseen", lambda: larger(unseen()))
        yield request.param


@pytest.fixture(scope="module")
def watched(kind):
    runs = {}
    for name, method in CASES[kind].items():
        spy = contract.Watched(method)
        runs[name] = (spy, *contract.go(spy))
    return runs


@pytest.mark.parametrize("check", CHECKS)
def test_on(kind, check, watched):
    for name in CASES[kind]:
        if not (name == "pfnm, map" and check in SHRINKS):
            takes_runs = "watched" in inspect.signature(check).parameters
            check(name, watched) if takes_runs else check(name)


def test_every_method_starts_from_the_same_weights(kind):
    contract.test_every_method_starts_from_the_same_weights()
