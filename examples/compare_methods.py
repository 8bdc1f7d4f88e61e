"""Three methods on the same split of the digits, from a script, with typed settings."""

from dataclasses import replace

from feddpms import Data, FedAvg, FedDPMS, FedProx, Partition, Run, Training, run

base = Run(
    rounds=10,
    data=Data(name="digits"),
    partition=Partition(clients=10, beta=0.3),
    local=Training(epochs=5),
)


def main() -> None:
    for method in (FedAvg(), FedProx(mu=0.1), FedDPMS()):
        result = run(replace(base, method=method))
        print(f"{type(method).__name__:8s} {result.accuracy:.1%}")
    print(result.claim)


if __name__ == "__main__":
    main()
