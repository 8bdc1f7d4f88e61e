"""What the verbs of the command share: options as values, and a progress bar."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feddpms.errors import ConfigError

if TYPE_CHECKING:
    from feddpms.config import Run
    from feddpms.records import RoundRecord


def absolute(path: str) -> str:
    """A path that stays right when `run.toml` is run from another folder."""
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:
        raise ConfigError(f"expected a path, got {path}: {error}; give it in full") from None


def numbers_or_names(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """A comma-separated option."""
    try:
        items = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError:
        items = []
    if (
        not items
        or len(set(items)) < len(items)
        or any(isinstance(i, int) and i < 0 for i in items)
    ):
        what = "different numbers >= 0" if kind is int else "different names"
        raise ConfigError(f'{option}: expected {what} with commas between, got "{text}"')
    return items


def count(workers: str) -> int | None:
    """A number of processes; None for auto."""
    if workers != "auto" and not (workers.isascii() and workers.isdigit() and int(workers)):
        raise ConfigError(f"--workers: expected auto or a number above 0, got {workers}")
    return None if workers == "auto" else int(workers)


def free(parent: Path, name: str, suffix: str = "") -> Path:
    """The first of name, name-2, name-3 ... that does not exist."""
    path, n = parent / f"{name}{suffix}", 1
    while path.exists():
        n += 1
        path = parent / f"{name}-{n}{suffix}"
    return path


class ShownProgress:
    """A bar with round, accuracy, loss and time left; silent where nobody watches."""

    def __enter__(self) -> Callable[["Run"], Callable[["RoundRecord"], None] | None]:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("round {task.fields[round]}"),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} images/s"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.bar.start()
        return self._start

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def _start(self, run: "Run") -> Callable[["RoundRecord"], None]:
        from feddpms.config import method_name

        name = f"{method_name(run.method)} seed {run.seed}"
        task = self.bar.add_task(
            name, total=run.rounds, round=f"0/{run.rounds}", accuracy="-", loss="-", speed="-"
        )

        def show(record: "RoundRecord") -> None:
            self.bar.update(
                task,
                completed=record.round,
                round=f"{record.round}/{run.rounds}",
                accuracy=f"{record.test_accuracy:.1%}",
                loss=f"{record.test_loss:.3f}",
                speed=f"{record.timing.get('images_per_second', 0):,.0f}",
            )

        return show
