"""From settings to a finished run folder, and comparisons under equal conditions.

A run folder holds `run.toml` (the settings; running it again gives the same bytes),
`records.jsonl`, `ledger.jsonl`, `model.safetensors`, `released.safetensors` with the noisy values
that clients released, `images.safetensors` if the method made any, and `report.html`. With secure
noise, `clients/` holds each client's own ledger and what it released.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from feddpms import config, records
from feddpms.config import Run
from feddpms.data import Dataset, load
from feddpms.engine import Crew, Outcome, Progress, Workers, cores, require_engine, simulate
from feddpms.engine.loop import size_of_cohort
from feddpms.errors import ConfigError, RunFolderError
from feddpms.folder import CHECKPOINT, Writing, forget_checkpoint
from feddpms.prepare import Prepared, prepare
from feddpms.privacy import Ledger, claim
from feddpms.records import PrivacyRecord, RoundRecord
from feddpms.report import page
from feddpms.report.load import find
from feddpms.rng import Rng
from feddpms.sheets import sheet
from feddpms.types import Tree

OnRound = Callable[[RoundRecord], None]
WORTH_WORKERS = 200_000
"""examples to train on, all passes counted, that take longer than starting worker processes"""


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        settings: what was run.
        model: the final global model; of a run that diverged, the last one that could be used.
        rounds: one record a round; fewer than planned if the run diverged.
        claim: what may be said of privacy, in words.
        folder: where it was written, or None.
    """

    settings: Run
    model: Tree
    rounds: tuple[RoundRecord, ...]
    claim: str
    folder: Path | None

    @property
    def accuracy(self) -> float:
        """Test accuracy after the last round, in [0, 1]; NaN if the run diverged."""
        return math.nan if self.diverged else self.rounds[-1].test_accuracy

    @property
    def diverged(self) -> str:
        """Why the run ended before its end, and in which round; empty for a sound run."""
        last = self.rounds[-1]
        return f"{last.diverged} in round {last.round}" if last.diverged else ""


def run(
    settings: Run,
    out: Path | str | None = None,
    on_round: OnRound | None = None,
    workers: int | None = 1,
) -> Result:
    """Run once.

    Args:
        settings: what to run.
        out: a new or empty folder to write to, or None to write nothing.
        on_round: called with each round's record.
        workers: processes to use, at least 1; None for what this machine and the run's length
            suggest. The result is the same for any number. A script that uses several keeps what it
            does under `if __name__ == "__main__"`, since they import it.

    Raises:
        FeddpmsError: a setting, a data file or the folder is not as it should be; nothing is
            written then.
    """
    require_engine(settings.engine, settings.privacy, workers or 1)
    data = load(settings.data, Rng(settings.seed))
    with _workers(workers, settings, len(data.train), 1) as crew:
        return _run(settings, data, out, on_round, crew)


def compare(
    settings: Run,
    methods: Sequence[config.Values],
    seeds: Sequence[int],
    out: Path | str,
    on_start: Callable[[Run], OnRound | None] = lambda run: None,
    workers: int | None = 1,
) -> list[Result]:
    """Run several methods on the same data, split, network and initial weights, for each seed.

    Args:
        settings: what all have in common.
        methods: the values of each method, as `config.parse` takes them.
        seeds: one run for each method and seed.
        out: a new or empty folder; each run gets a folder in it, and `report.html` compares them.
        on_start: called before each run; what it returns is called with each round's record.
        workers: as for `run`.

    Raises:
        FeddpmsError: as `run`.
    """
    require_engine(settings.engine, settings.privacy, workers or 1)
    folder, results = Path(out), list[tuple[Run, Path]]()
    built = [config.build_method(values, "method") for values in methods]
    names = [config.method_name(method) for method in built]
    if len(set(names)) < len(names):
        raise ConfigError(f"expected different methods, got {', '.join(names)}; leave one out")
    cells = [replace(settings, method=m, seed=seed) for seed in seeds for m in built]
    data = load(settings.data, Rng(seeds[0]))
    for cell in cells[: len(built)]:
        prepare(cell, data)  # complains before anything is written
    new_folder(folder)
    for cell in cells:
        own = new_folder(folder / f"{config.method_name(cell.method)}-seed{cell.seed}")
        records.write_file(own / "run.toml", config.text(cell).encode())
        results.append((cell, own))
    with _workers(workers, settings, len(data.train), len(cells)) as crew:
        done = _go_on_all(results, on_start, crew)
    page.write(find([folder]), folder / "report.html")
    return done


def resume(
    folder: Path | str,
    on_start: Callable[[Run], OnRound | None] = lambda run: None,
    workers: int | None = 1,
) -> list[Result]:
    """Go on with what was stopped: a run, or a comparison. It ends in the same bytes.

    Args:
        folder: of a run, or of a comparison; runs in it that are finished are left alone.
        on_start: as for `compare`.
        workers: as for `run`.

    Returns:
        The runs that were finished now.

    Raises:
        FeddpmsError: there is no run, or it began with other data or under another version.
    """
    folder = Path(folder)
    files = [f for f in (folder / "run.toml", *sorted(folder.glob("*/run.toml"))) if f.exists()]
    if not files:
        raise RunFolderError(f"expected a folder of a run or of a comparison, got {folder}")
    unfinished = [
        (config.parse(config.load(file)), file.parent)
        for file in files
        if not (file.parent / "report.html").exists() or (file.parent / CHECKPOINT).exists()
    ]
    if not unfinished:
        return []
    settings, _ = unfinished[0]
    require_engine(settings.engine, settings.privacy, workers or 1)
    examples = len(load(settings.data, Rng(settings.seed)).train)
    with _workers(workers, settings, examples, len(unfinished)) as crew:
        done = _go_on_all(unfinished, on_start, crew)
    if files[0].parent != folder:
        page.write(find([folder]), folder / "report.html")
    return done


def _go_on_all(
    runs: Sequence[tuple[Run, Path]],
    on_start: Callable[[Run], OnRound | None],
    workers: Workers | None,
) -> list[Result]:
    """Begin or go on with runs in their folders, in order."""
    done, loaded = [], None
    for settings, folder in runs:
        key = (settings.data, settings.seed)
        if loaded is None or loaded[0] != key:
            loaded = (key, load(settings.data, Rng(settings.seed)))
        data = loaded[1]
        prepared = prepare(settings, data)
        done.append(_go_on(settings, prepared, data, folder, on_start(settings), workers))
    return done


def new_folder(path: Path) -> Path:
    """Make a folder, or take an empty one.

    Raises:
        RunFolderError: something is there, and is left as it is; or no folder can be made.
    """
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        if not taken:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"expected a place for a new folder, got {path}: {error.strerror}; choose another"
        ) from None
    if taken:
        raise RunFolderError(
            f"expected a new or empty folder, got {path}, which holds something; choose another"
        )
    return path


@contextmanager
def _workers(
    count: int | None, settings: Run, examples: int, runs: int
) -> Iterator[Workers | None]:
    """Worker processes for runs of this length; None where they would not pay for their start."""
    cohort = size_of_cohort(settings.engine.cohort, settings.partition.clients)
    if count is None:
        passes = examples * settings.local.mean_epochs * settings.rounds * runs
        worth = passes > WORTH_WORKERS and not settings.engine.one_process
        count = min(cores(), cohort) if worth else 1
    if count < 1:
        raise ConfigError(f"--workers: expected auto or a number above 0, got {count}")
    count = min(count, cohort)  # a further one would have nothing to do
    if count == 1:
        yield None
        return
    with closing(Workers(count)) as workers:
        yield workers


def _run(
    settings: Run,
    data: Dataset,
    out: Path | str | None,
    on_round: OnRound | None,
    workers: Workers | None,
) -> Result:
    """Run on loaded data."""
    prepared = prepare(settings, data)
    if out is None:
        ledger = Ledger()
        outcome = _simulate(settings, prepared, data, ledger, on_round, workers)
        return _result(settings, outcome, outcome.rounds, ledger, None)
    folder = new_folder(Path(out))
    records.write_file(folder / "run.toml", config.text(settings).encode())
    return _go_on(settings, prepared, data, folder, on_round, workers)


def _go_on(
    settings: Run,
    prepared: Prepared,
    data: Dataset,
    folder: Path,
    on_round: OnRound | None,
    workers: Workers | None,
) -> Result:
    """Begin a run in its folder, or go on from its last checkpoint."""
    with closing(Writing(folder, settings.method, prepared.first)) as writing:
        outcome = _simulate(
            settings, prepared, data, writing.ledger, on_round, workers, writing, folder / "clients"
        )
        result = _result(settings, outcome, writing.rounds(), writing.ledger, folder)
        writing.finish(PrivacyRecord(claim=result.claim))
    images = sheet(data, outcome.memories, prepared.task, outcome.model)
    _finish(folder, outcome, images, settings.privacy.noise)
    forget_checkpoint(folder)
    return result


def _simulate(
    settings: Run,
    prepared: Prepared,
    data: Dataset,
    ledger: Ledger,
    on_round: OnRound | None,
    workers: Workers | None,
    writing: Writing | None = None,
    accounts: Path | None = None,
) -> Outcome:
    """All rounds that are not done."""
    crew = Crew(
        settings.method,
        dict(enumerate(prepared.shards)),
        data.test,
        prepared.net,
        prepared.task,
        settings.local,
        settings.privacy,
        Rng(settings.seed),
        accounts,
    )

    def note(record: RoundRecord, progress: Progress) -> None:
        if writing:
            writing.note(record, progress)
        if on_round:
            on_round(record)

    begin, memories = (writing.progress, writing.memories) if writing else (None, None)
    return simulate(crew, settings.engine, ledger, note, workers, begin, memories)


def _result(
    settings: Run,
    outcome: Outcome,
    rounds: tuple[RoundRecord, ...],
    ledger: Ledger,
    folder: Path | None,
) -> Result:
    """What a run came to."""
    words = claim(ledger, settings.privacy.target_delta)
    return Result(settings, outcome.model, rounds, words, folder)


def _finish(folder: Path, outcome: Outcome, images: dict[str, Tensor], noise: str) -> None:
    """Write what exists only at the end."""
    simulated = {"simulated": str(noise == "seeded").lower()}
    whole = {k: v.contiguous() for k, v in outcome.model.items()}
    records.write_file(folder / "model.safetensors", save(whole, simulated))
    if outcome.released:
        named = {f"{c}.{k}": v for c, tree in outcome.released.items() for k, v in tree.items()}
        records.write_file(folder / "released.safetensors", save(named, simulated))
    if images:
        records.write_file(folder / "images.safetensors", save(images, simulated))
    page.write(find([folder]), folder / "report.html")
