"""FedAvg with Flower's simulation engine: ServerApp and ClientApp over Ray."""

from typing import Any

from case import Case, Rounds, accuracy, arguments, load
from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from network import network, parameters


def server_app(given, case: Case, rounds: Rounds) -> ServerApp:
    """A server that evaluates the global model after each round, and notes when it ended."""
    settings, net, taken = case.settings, network(case.weights), list[int]()

    def add_up(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        told: list[Any] = [reply.metric_records["metrics"]["steps"] for reply in replies]
        taken.append(sum(told))
        return MetricRecord({"steps": taken[-1]})

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        net.load_state_dict(arrays.to_torch_state_dict())
        found = accuracy(net, case)
        if number:
            rounds.end(taken[-1], found)
        else:
            rounds.begin()
        return MetricRecord({"accuracy": found})

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=settings.cohort / settings.clients,
            fraction_evaluate=0.0,
            min_train_nodes=settings.cohort,
            min_available_nodes=settings.clients,
            train_metrics_aggr_fn=add_up,
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=settings.rounds,
            train_config=ConfigRecord({"case": str(given.case), "threads": given.threads}),
            evaluate_fn=evaluate,
        )

    return app


def main() -> None:
    """Run a case, one client a core at a time."""
    given, rounds = arguments(), Rounds()
    case = load(given.case)
    run_simulation(
        server_app=server_app(given, case, rounds),
        client_app=client_app,
        num_supernodes=case.settings.clients,
        backend_config={
            "init_args": {"num_cpus": given.processes, "log_to_driver": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    rounds.write(given.out, parameters(network(case.weights)))


if __name__ == "__main__":
    main()
