"""FedAvg with fluke, which trains its clients in turn in one process."""

from typing import Any

import torch
from case import EVALUATED, Case, Rounds, Sgd, arguments, load
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver, ServerObserver
from network import network, parameters
from torchmetrics import Accuracy


class Stopwatch(FederationObserver, ServerObserver):
    """Notes when each round ended, its evaluation included."""

    def __init__(self, rounds: Rounds):
        self.rounds, self.taken = rounds, 0
        self.accuracy: Any = 0.0

    def start_round(self, round, global_model):
        """A round begins."""
        if round == 1:
            self.rounds.begin()

    def server_evaluation(self, round, eval_type, evals: Any, **kwargs):
        """The global model was evaluated."""
        self.accuracy = evals["accuracy"]

    def end_round(self, round):
        """A round has ended."""
        self.rounds.end(Sgd.taken - self.taken, self.accuracy)
        self.taken = Sgd.taken


def splitter(case: Case) -> DataSplitter:
    """The case's images in memory, at the clients that hold them."""
    size = case.settings.batch_size
    clients = [
        FastDataLoader(x, y, num_labels=10, batch_size=size, shuffle=True)
        for x, y in zip(case.x, case.y, strict=True)
    ]
    test = FastDataLoader(case.test_x, case.test_y, num_labels=10, batch_size=EVALUATED)
    untested: Any = [None] * len(clients)
    return DataSplitter(DummyDataContainer(clients, untested, test, 10))


def algorithm(case: Case) -> FedAVG:
    """FedAvg whose clients forget model and optimiser after a round, since they keep no state."""
    settings = case.settings
    client = {
        "batch_size": settings.batch_size,
        "local_epochs": settings.epochs,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": Sgd, "lr": settings.lr, "momentum": settings.momentum},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
        "persistency": False,
    }
    values = DDict(model=network(case.weights), client=client, server={"weighted": True})
    return FedAVG(settings.clients, splitter(case), values)


def main() -> None:
    """Run a case."""
    given, rounds = arguments(), Rounds()
    torch.set_num_threads(given.threads)
    case = load(given.case)
    settings, environment = case.settings, FlukeENV()
    right = Accuracy(task="multiclass", num_classes=10)
    environment.set_evaluator(ClassificationEval(eval_every=1, n_classes=10, accuracy=right))
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=True)
    run = algorithm(case)
    run.set_callbacks(Stopwatch(rounds))
    run.run(settings.rounds, settings.cohort / settings.clients)
    rounds.write(given.out, parameters(run.server.model))


if __name__ == "__main__":
    main()
