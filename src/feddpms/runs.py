"""From settings to a finished run folder, and comparisons under equal conditions.

A run folder holds `run.toml` (the settings; running it again gives the same bytes),
`records.jsonl`, `ledger.jsonl`, `model.safetensors`, `released.safetensors` with the noisy values
that clients released, `images.safetensors` if the method made any, and `report.html`. With secure
noise, `clients/` holds each client's own ledger and what it released.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

import feddpms
from feddpms import config, records
from feddpms.algorithms import FedDPMS
from feddpms.algorithms.correction import require_optimizer
from feddpms.algorithms.precision import require_precision
from feddpms.algorithms.private import require_private_training
from feddpms.config import Run
from feddpms.data import Dataset, counts, describe, levels, load, split, table
from feddpms.engine import Crew, Outcome, Progress, Workers, cores, require_engine, simulate
from feddpms.engine.loop import size_of_cohort, visible
from feddpms.errors import ConfigError, RunFolderError
from feddpms.folder import CHECKPOINT, Writing, forget_checkpoint
from feddpms.models import Plan, build, trunk
from feddpms.privacy import Ledger, calibrate, claim, source
from feddpms.records import PartitionRecord, PrivacyRecord, RoundRecord, RunRecord
from feddpms.report import page, plots
from feddpms.report.load import find
from feddpms.rng import Rng
from feddpms.synthesis import Drawing
from feddpms.types import Memory, Shard, Task, Tree

OnRound = Callable[[RoundRecord], None]
WORTH_WORKERS = 200_000
"""examples to train on, all passes counted, that take longer than starting worker processes"""
SHEET = 8
"""images of a class on the sheet"""


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


@dataclass(frozen=True)
class Prepared:
    """What a run starts from."""

    shards: list[Shard]
    task: Task
    net: torch.nn.Module
    first: tuple[RunRecord | PartitionRecord, ...]


def prepare(settings: Run, data: Dataset, train: bool = True) -> Prepared:
    """Split the data, build the network, and check all that can be checked before training.

    Args:
        settings: what is run.
        data: on which data.
        train: check what is released as well; an audit draws no noise and needs no library for it.

    Raises:
        ConfigError: settings do not fit the data or one another.
    """
    rng, part = Rng(settings.seed), settings.partition
    labels = data.train.y.numpy()
    parts = split(labels, len(data.classes), part, rng)
    shards = [Shard(data.train.x[i], data.train.y[i]) for i in map(torch.from_numpy, parts)]
    net = build(_shape(data), len(data.classes), settings.net, rng.at("initial weights"))
    plan = Plan(_shape(data), len(data.classes), settings.net)
    task = Task(len(data.classes), len(shards), settings.rounds, net.latent, plan)
    require_optimizer(settings.method, settings.local)
    # Complains about settings that do not fit the run.
    settings.method.start(visible(settings.method, net.state_dict()), task)
    private, engine = settings.privacy.training.kind != "none", settings.engine
    require_precision(settings.local, engine.device, private, engine.clients_at_once > 1)
    if train:
        _check_privacy(settings)
    first = RunRecord(
        version=feddpms.__version__,
        method=config.method_name(settings.method),
        data=data.name,
        seed=settings.seed,
        clients=len(shards),
        rounds=settings.rounds,
        classes=data.classes,
        parameters=sum(v.numel() for v in trunk(dict(net.named_parameters())).values()),
        train_examples=sum(map(len, shards)),
        test_examples=len(data.test),
        partition=describe(part),
    )
    if settings.privacy.noise == "secure":  # clients that could be real: nobody knows their split
        return Prepared(shards, task, net, (first,))
    held = levels(counts(labels, parts, len(data.classes))).tolist()
    return Prepared(shards, task, net, (first, PartitionRecord(levels=tuple(map(tuple, held)))))


def _check_privacy(settings: Run) -> None:
    """Check that what is released, and how, fits together and its target."""
    method, privacy, training = settings.method, settings.privacy, settings.privacy.training
    norm = settings.net.norm if settings.net.kind == "conv" else "none"
    require_private_training(method, privacy, norm, settings.local)
    drawing = method.synthesis if isinstance(method, FedDPMS) else Drawing()
    if drawing.spread == "released" and privacy.release != "class_sum":
        raise ConfigError(
            'method.synthesis.spread="released" needs privacy.release=class_sum, got '
            f"{privacy.release}; choose one of them"
        )
    if privacy.max_epsilon and method.about.scope != "local":
        _check_budget(settings)
    calibrate(privacy, settings.rounds * settings.local.epochs * training.steps_per_epoch)
    source(privacy.noise, Rng(0).numpy())  # complains if its library is missing


def _check_budget(settings: Run) -> None:
    """Refuse a budget that the first reply would break."""
    privacy, method = settings.privacy, settings.method
    lacking = {
        "privacy.training.kind=dpsgd": privacy.training.kind != "none",
        "privacy.tuned_on=public": privacy.tuned_on == "public",
        "privacy.release other than paper": privacy.release != "paper",
        "a method other than central": method.about.scope != "pooled",
    }
    if not all(lacking.values()):
        needs = " and ".join(name for name, met in lacking.items() if not met)
        raise ConfigError(
            f"privacy.max_epsilon={privacy.max_epsilon:g} needs {needs}: no budget covers what is "
            "in the clear; set it, or lift the budget"
        )


def show_partition(settings: Run, picture: Path) -> tuple[str, Path]:
    """The class histogram of each client as text, and as a picture in a new file.

    Args:
        settings: data and partition.
        picture: a path that ends in .svg or .png.

    Raises:
        FeddpmsError: the data or the partition is not as it should be, or the file exists.
    """
    if picture.suffix not in (".svg", ".png"):
        raise RunFolderError(f"expected a picture name that ends in .svg or .png, got {picture}")
    if picture.exists():
        raise RunFolderError(f"{picture} exists; choose another name for the picture")
    data = load(settings.data, Rng(settings.seed))
    labels = data.train.y.numpy()
    parts = split(labels, len(data.classes), settings.partition, Rng(settings.seed))
    held = counts(labels, parts, len(data.classes))
    svg = picture.suffix == ".svg"
    drawn = (plots.partition_svg if svg else plots.partition_png)(held.tolist(), data.classes)
    try:
        records.write_file(picture, drawn.encode() if isinstance(drawn, str) else drawn)
    except OSError as error:
        raise RunFolderError(
            f"expected a place for a picture, got {picture}: {error.strerror}; choose another"
        ) from None
    return table(held, data.classes), picture


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
    _finish(folder, outcome, sheet(data, outcome.memories), settings.privacy.noise)
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


def sheet(data: Dataset, memories: Mapping[int, Memory]) -> dict[str, Tensor]:
    """Test images and synthetic images by class, as bytes; empty if no method made any.

    Of each client a few of a class, so that no more than one memory is looked at a time.

    Returns:
        `real` and `synthetic` uint8 [classes, SHEET, channels, height, width], and
        `synthetic_count` int64 [classes].
    """
    classes, pool = len(data.classes), list[Shard]()
    for client in sorted(memories):
        made = memories[client].synthetic
        if made is not None and len(made):
            pool.append(_few(made, classes, -(-10 * SHEET // len(memories))))
    if not pool:
        return {}
    real, _ = _rows(data.test, classes)
    every = Shard(torch.cat([s.x for s in pool]), torch.cat([s.y for s in pool]))
    synthetic, filled = _rows(every, classes)
    return {"real": real, "synthetic": synthetic, "synthetic_count": filled}


def _rows(shard: Shard, classes: int) -> tuple[Tensor, Tensor]:
    """Up to SHEET images of each class, evenly taken, and how many there are."""
    few = _few(shard, classes, SHEET)
    rows = torch.zeros(classes, SHEET, *shard.x.shape[1:], dtype=torch.uint8)
    filled = torch.bincount(few.y, minlength=classes)
    for c in range(classes):
        rows[c, : int(filled[c])] = (few.x[few.y == c] * 255).round().to(torch.uint8)
    return rows, filled


def _few(shard: Shard, classes: int, most: int) -> Shard:
    """Up to `most` examples of each class, evenly taken."""
    kept = []
    for c in range(classes):
        places = (shard.y == c).nonzero().flatten()
        kept.append(places[:: max(1, len(places) // most)][:most])
    chosen = torch.cat(kept)
    return Shard(shard.x[chosen], shard.y[chosen])


def _shape(data: Dataset) -> tuple[int, int, int]:
    """Channels, height, width of an image."""
    channels, height, width = data.train.x.shape[1:]
    return channels, height, width
