"""What each method costs over a whole run, in time and bytes, relative to FedAvg."""

from typing import Annotated

import typer
from common import Turns, in_turn, ratios, run, save, spread

from feddpms import config, runs
from feddpms.config import Run

DEFAULT = "fedavg,local,fedprox,moon,fedmix,feddpms"


def cell(method: str, settings: list[str]) -> Run:
    """A default run of a method."""
    values = config.override({"method": method}, settings)
    return config.parse(values)


def main(
    methods: Annotated[str, typer.Option(help="Names, with commas between.")] = DEFAULT,
    turns: Turns = 3,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="A.B=C", help="A setting; repeatable.")
    ] = [],  # noqa: B006
    name: Annotated[str, typer.Option(help="Write results/method_cost-NAME.json, too.")] = "",
) -> None:
    """Print the ratios of each method to FedAvg."""
    names = list(dict.fromkeys(["fedavg", *methods.split(",")]))
    cells = {method: cell(method, settings) for method in names}
    sent: dict[str, int] = {}

    def side(method: str):
        def whole() -> None:
            rounds = runs.run(cells[method]).rounds
            sent[method] = sum(r.bytes_up + r.bytes_down for r in rounds)

        return whole

    seconds = in_turn({method: side(method) for method in names}, turns)
    others = [method for method in names if method != "fedavg"]
    time = {method: ratios(seconds[method], seconds["fedavg"]) for method in others}
    size = {method: sent[method] / sent["fedavg"] for method in others}
    if name:
        save(f"method_cost-{name}", {"seconds": seconds, "time": time, "bytes": size})
    for method in others:
        print(f"{method} / fedavg: time {spread(time[method])}, bytes {size[method]:.3f}")


if __name__ == "__main__":
    run(main)
