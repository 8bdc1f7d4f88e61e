"""FedAvg with feddpms' own engine."""

from contextlib import ExitStack, closing

import torch
from case import Case, Rounds, arguments, load
from network import network, parameters

from feddpms.algorithms import FedAvg, Training
from feddpms.engine import Crew, Engine, Workers, simulate
from feddpms.models import NetSettings, build, trunk
from feddpms.privacy import Ledger, Privacy
from feddpms.records import RoundRecord
from feddpms.rng import Rng
from feddpms.types import Shard, Task


def own_network(case: Case):
    """The default network with the case's weights, once it is shown to be that of the rivals."""
    net = build((1, 28, 28), 10, NetSettings(), Rng(0))
    net.load_state_dict({**net.state_dict(), **case.weights})
    theirs = network(case.weights).eval()
    with torch.no_grad():
        same = torch.allclose(net.eval()(case.test_x), theirs(case.test_x), atol=1e-5)
    trained = trunk(dict(net.named_parameters()))
    count = sum(p.numel() for p in trained.values())
    if not same or count != parameters(theirs):
        raise SystemExit("the network of the rivals is not the default network of feddpms")
    return net, count


def crew(case: Case, net) -> Crew:
    """Clients that hold the case's images."""
    settings = case.settings
    shards = {c: Shard(x, y) for c, (x, y) in enumerate(zip(case.x, case.y, strict=True))}
    local = Training(
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        optimizer="sgd",
        lr=settings.lr,
        lr_decay=1.0,
        momentum=settings.momentum,
    )
    task = Task(10, settings.clients, settings.rounds, net.latent)
    test = Shard(case.test_x, case.test_y)
    return Crew(FedAvg(), shards, test, net, task, local, Privacy(), Rng(0))


def main() -> None:
    """Run a case."""
    given, rounds = arguments(), Rounds()
    case = load(given.case)
    net, count = own_network(case)
    share = case.settings.cohort / case.settings.clients

    def note(record: RoundRecord, progress: object) -> None:
        rounds.end(int(record.numbers["steps"]), record.test_accuracy)

    with ExitStack() as stack:
        several = given.processes > 1
        workers = stack.enter_context(closing(Workers(given.processes))) if several else None
        rounds.begin()
        simulate(crew(case, net), Engine(cohort=share), Ledger(), note, workers)
    rounds.write(given.out, count)


if __name__ == "__main__":
    main()
