"""When FedDPMS's decoder travels, and which one a client goes on with."""

import pytest
import torch

from contract.test_contract import Watched, same
from feddpms.algorithms import FedDPMS, Training
from feddpms.engine import Crew, Engine, simulate
from feddpms.models import split
from feddpms.privacy import Ledger
from feddpms.rng import Rng
from feddpms.types import Memory, Message, Task
from small import CLASSES, GOES_ON, LOOSE, client, small_net, three_shards, unseen

ROUNDS, PREPARED = 6, 5


def run(period: int, cohort: float = 1.0) -> Watched:
    spy = Watched(FedDPMS(**GOES_ON, preliminary_rounds=PREPARED, decoder_period=period))
    shards, task = dict(enumerate(three_shards())), Task(CLASSES, 3, ROUNDS, 6)
    local = Training(epochs=1, batch_size=16, lr=0.01)
    crew = Crew(spy, shards, unseen(), small_net(), task, local, LOOSE, Rng(0))
    simulate(crew, Engine(cohort=cohort), Ledger())
    return spy


def travels(spy: Watched) -> tuple[list[int], list[int]]:
    """Preliminary rounds in which the decoder went down to client 0, and up from it."""
    calls = [c for c in spy.calls if c[1].id == 0 and c[0].kind == "vae"]
    down = [me.round for ask, me, _ in calls if "decoder" in ask.trees]
    up = [me.round for _, me, reply in calls if "decoder" in reply.trees]
    return down, up


@pytest.mark.parametrize(
    ("period", "down", "up"),
    [
        (0, [1], [5]),
        (1, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
        (2, [1, 3, 5], [2, 4, 5]),
        (3, [1, 4], [3, 5]),
        (9, [1], [5]),
    ],
)
def test_the_decoder_travels_when_it_is_averaged(period, down, up):
    assert travels(run(period)) == (down, up)


@pytest.mark.parametrize("new", [True, False])
def test_a_client_goes_on_with_the_average_or_else_with_its_own_decoder(new):
    net = small_net()
    rest, decoder = split({k: v.clone() for k, v in net.state_dict().items()})
    own = {k: torch.full_like(v, 0.1) for k, v in decoder.items()}
    average = {k: torch.full_like(v, 0.2) for k, v in decoder.items()}
    ask = Message(
        "vae",
        {"decoder": average} if new else {},
        {"send_decoder": 1},
        inner=Message("train", {"model": rest}),
    )
    still = Training(epochs=1, batch_size=8, lr=1e-12)
    me = client(three_shards()[0], net, local=still, memory=Memory({"decoder": own}))
    reply, memory = FedDPMS(**GOES_ON).client(ask, me)
    for key, value in average.items():
        want = value if new else own[key]
        torch.testing.assert_close(memory.trees["decoder"][key], want)
        torch.testing.assert_close(reply.trees["decoder"][key], want)


def test_a_client_that_missed_averages_gets_the_latest_one():
    spy = run(1, cohort=0.7)
    averages = [after.averages for _, _, after in spy.served if after.prepared]
    assert averages[:PREPARED] == [1, 2, 3, 4, 5]
    seen: dict[int, int] = {}
    for ask, me, _ in spy.calls:
        if ask.kind == "vae":
            latest = spy.served[me.round - 1][0]  # the state before this round
            assert seen.get(me.id) != latest.averages
            assert same(ask.trees["decoder"], latest.decoder)
            seen[me.id] = latest.averages


def test_the_average_is_weighted_by_examples():
    spy = run(0)
    replies = {me.id: reply for _, me, reply in spy.calls if "decoder" in reply.trees}
    weights = [len(shard) for shard in three_shards()]
    after = next(after for _, _, after in spy.served if after.averages)
    for key, value in after.decoder.items():
        parts = [replies[c].trees["decoder"][key].double() * w for c, w in enumerate(weights)]
        want = torch.stack(parts).sum(0) / sum(weights)
        torch.testing.assert_close(value.double(), want, rtol=1e-6, atol=1e-7)
