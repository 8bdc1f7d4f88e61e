"""A method of your own, whole: FedAvg whose server moves only part of the way.

w <- w + server_lr * (mean of the clients' models - w). It runs from a script as it stands; moved to
`src/feddpms/algorithms/` with one import line, it is on the command line too.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from annotated_types import Gt

from feddpms import Run, run
from feddpms.algorithms import About, Client
from feddpms.algorithms.fit import fit
from feddpms.algorithms.method import State
from feddpms.algorithms.trees import average
from feddpms.types import Memory, Message, Task, Tree, settings


@settings
class HalfStep:
    """FedAvg with a server learning rate."""

    about: ClassVar[About] = About("aggregation", "an example")

    server_lr: Annotated[float, Gt(0)] = 0.5
    """how far the server moves towards the mean"""

    def start(self, model: Tree, task: Task) -> State:
        return State(model)

    def ask(self, state: State, client: int, round: int) -> Message:
        return Message("train", {"model": state.model})

    def client(self, ask: Message, me: Client) -> tuple[Message, Memory]:
        return fit(me, ask.trees["model"]).reply(me), me.memory

    def server(self, state: State, replies: Mapping[int, Message]) -> State:
        old, mean = state.model, average(replies)
        moved = {
            k: old[k] + self.server_lr * (mean[k] - old[k])
            if mean[k].is_floating_point()
            else mean[k]
            for k in old
        }
        return State(moved)


def main() -> None:
    for server_lr in (0.5, 1.0):
        result = run(Run(method=HalfStep(server_lr=server_lr), rounds=5))
        print(f"server_lr {server_lr}: {result.accuracy:.1%}")


if __name__ == "__main__":
    main()
