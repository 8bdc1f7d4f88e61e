"""FedAvg with pfl's simulated backend, in one process or several under torchrun."""

from functools import partial

import torch
import torch.nn.functional as F
from case import EVALUATED, Case, Rounds, Sgd, arguments, load
from network import Network, parameters
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.model.pytorch import PyTorchModel


class Model(Network):
    """The network with the loss and the metrics that pfl asks of it."""

    def loss(self, x, y):
        """Mean cross entropy."""
        if not self.training:
            self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        """Accuracy."""
        if self.training:
            self.eval()
        return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}


class Stopwatch(TrainingProcessCallback):
    """Notes when each iteration ended; it is the last of the callbacks."""

    def __init__(self, rounds: Rounds):
        self.rounds, self.taken = rounds, 0

    def on_train_begin(self, *, model):
        """The first iteration begins."""
        self.rounds.begin()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """An iteration has ended, and from the second on, the evaluation of its model."""
        found = dict(aggregate_metrics).get(StringMetricName("Central val | accuracy"))
        self.rounds.end(Sgd.taken - self.taken, found.overall_value if found else 0.0)
        self.taken = Sgd.taken
        return False, Metrics()


def model(case: Case) -> PyTorchModel:
    """The network with a server that adds the mean update, and clients with their optimiser."""
    net = Model()
    net.load_state_dict(case.weights)
    return PyTorchModel(
        net.to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
        local_optimizer_create=partial(Sgd, momentum=case.settings.momentum),
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )


def run(case: Case, trained: PyTorchModel, rounds: Rounds) -> None:
    """All rounds."""
    settings, users = case.settings, range(case.settings.clients)
    held = [(x, y) for x, y in zip(case.x, case.y, strict=True)]
    data = FederatedDataset.from_slices(held, get_user_sampler("minimize_reuse", users))
    evaluating = NNEvalHyperParams(local_batch_size=EVALUATED)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=settings.rounds,
            evaluation_frequency=settings.rounds,  # clients evaluate in the first round alone
            train_cohort_size=settings.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model=trained,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=settings.epochs,
            local_learning_rate=settings.lr,
            local_batch_size=settings.batch_size,
        ),
        model_eval_params=evaluating,
        callbacks=[
            CentralEvaluationCallback(Dataset((case.test_x, case.test_y)), evaluating),
            Stopwatch(rounds),
        ],
    )


def main() -> None:
    """Run a case; the first process writes what it saw, and the steps of all."""
    given, rounds = arguments(), Rounds()
    torch.set_num_threads(given.threads)
    case = load(given.case)
    trained = model(case)
    run(case, trained, rounds)
    steps = torch.tensor(rounds.steps)
    if given.processes > 1:
        torch.distributed.all_reduce(steps)
    if given.processes == 1 or torch.distributed.get_rank() == 0:
        rounds.steps = steps.tolist()
        rounds.write(given.out, parameters(trained.pytorch_model))
    if given.processes > 1:  # a process that ends before the others makes them abort
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
