"""The privacy verbs of `feddpms`: ledger, calibrate, audit."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from feddpms.errors import ConfigError

audit = typer.Typer(
    help="Try to break what is claimed: of the release, or of a finished run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Release = Literal["class_sum", "fixed_m_mean"]
Adjacency = Literal["add_remove", "replace_one"]
NOISE = Literal["seeded", "secure"]
EpsilonOption = Annotated[float, typer.Option(help="Target epsilon, per record.")]
DeltaOption = Annotated[float, typer.Option(help="Target delta.")]
ReleaseOption = Annotated[Release, typer.Option(help="What is released.")]
AdjacencyOption = Annotated[Adjacency, typer.Option(help="Who counts as neighbours.")]
LatentOption = Annotated[int, typer.Option(help="Latent length.")]
ClipOption = Annotated[float, typer.Option("--l2-clip", help="class_sum: radius R of a code.")]
MeanSizeOption = Annotated[int, typer.Option(help="fixed_m_mean: m, records in a mean.")]
CountsOption = Annotated[
    float, typer.Option("--count-noise-multiplier", help="Noise multiplier of the histogram.")
]


def ledger(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or of a client.", metavar="DIR")],
    delta: Annotated[
        float | None, typer.Option(help="Default: the run's target delta, else 1e-5.")
    ] = None,
) -> None:
    """Say what a ledger proves: each channel's cost, and the claim in words."""
    from feddpms.privacy import claim
    from feddpms.privacy.claim import table
    from feddpms.privacy.ledger import of_folder

    at = _delta(folder, delta)
    found = of_folder(folder)
    said, rows = claim(found, at), table(found, at)
    if (folder / "run.toml").exists() and not (folder / "report.html").exists():
        typer.echo(
            "This run did not come to its end; more may have been sent than is written here."
        )
    typer.echo(columns(rows))
    typer.echo(f"\n{len(found.clients())} clients; each row: the client that spent most.")
    typer.echo(f"\n{said}")


def calibrate(
    epsilon: EpsilonOption = 2.0,
    delta: DeltaOption = 1e-5,
    release: ReleaseOption = "class_sum",
    adjacency: AdjacencyOption = "add_remove",
    latent: LatentOption = 32,
    class_size: Annotated[int, typer.Option(help="Records of a class, to say its noise.")] = 500,
    l2_clip: ClipOption = 2.0,
    mean_size: MeanSizeOption = 100,
    count_noise_multiplier: CountsOption = 10.0,
    rounds: Annotated[
        int, typer.Option(help="Rounds of private training; 0 for releases alone.")
    ] = 0,
    local_epochs: Annotated[int, typer.Option(help="Local epochs in a round.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Public expected batch size.")] = 64,
    examples: Annotated[int, typer.Option(help="Public guess of a client's examples.")] = 500,
    release_noise_multiplier: Annotated[
        float, typer.Option(help="Of the latent means, beside private training.")
    ] = 8.0,
    paper: Annotated[
        bool, typer.Option("--paper", help="Print what the paper's own noise costs, and exit.")
    ] = False,
) -> None:
    """From a target (epsilon, delta) to noise, without a run."""
    if paper:
        typer.echo(_paper())
        return
    from feddpms import config
    from feddpms.privacy import calibrate as solve

    training = {
        "kind": "dpsgd" if rounds else "none",
        "expected_batch_size": batch_size,
        "expected_examples": examples,
        "release_noise_multiplier": release_noise_multiplier,
    }
    settings = config.parse(
        {
            "rounds": rounds or 1,
            "local": {"epochs": local_epochs},
            "privacy": {
                **_release(epsilon, delta, release, adjacency, l2_clip, mean_size),
                "count_noise_multiplier": count_noise_multiplier,
                "training": training,
            },
        }
    )
    _between(1, 65_536, latent=latent)
    _between(1, 10**9, class_size=class_size, examples=examples)
    _between(0, 10**6, rounds=rounds)
    privacy = settings.privacy
    steps = rounds * local_epochs * privacy.training.steps_per_epoch
    found = solve(privacy, steps)
    typer.echo(
        f"Target: epsilon {epsilon:g} at delta {delta:g} (unit: one record of a client; "
        f"neighbours: {adjacency}), over everything below together."
    )
    typer.echo(columns(_multipliers(found, privacy, latent, class_size, steps)))


@audit.command("release")
def audit_release(
    epsilon: EpsilonOption = 2.0,
    delta: DeltaOption = 1e-5,
    release: ReleaseOption = "class_sum",
    adjacency: AdjacencyOption = "add_remove",
    latent: LatentOption = 32,
    l2_clip: ClipOption = 2.0,
    mean_size: MeanSizeOption = 100,
    size: Annotated[
        int | None, typer.Option(help="Records of the class; default 20, or the mean's size.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Releases drawn on each of the two data sets.")] = 5000,
    noise: Annotated[NOISE, typer.Option(help="Source of the noise.")] = "seeded",
    seed: Annotated[int, typer.Option(help="Of a seeded source.")] = 0,
) -> None:
    """Audit the release on its worst pair of data sets: a lower bound on its true epsilon.

    A bound above the claim proves that the claim is false. One below it proves nothing but that
    this attack, with the power that is printed, did not break it.
    """
    from feddpms import audits, config

    values = _release(epsilon, delta, release, adjacency, l2_clip, mean_size)
    privacy = config.parse({"privacy": {**values, "noise": noise}}).privacy
    least = mean_size if release == "fixed_m_mean" else 20
    size = least if size is None else size
    _between(1, 65_536, latent=latent)
    _between(1, 10**6, runs=runs, size=size)
    _between(0, 2**63 - 1, seed=seed)
    found = audits.audit_release(privacy, latent, size, runs, seed)
    typer.echo(
        f"{release}, {adjacency}, latent {latent}, {noise} noise: {runs} releases on each of two "
        f"neighbouring data sets, confidence {found.confidence:.0%}.\n"
        f"Told apart: {found.true_positives} of {runs} with the record, {found.false_positives} "
        f"without it, by the likelihood ratio at a threshold fixed by the claim; "
        f"{found.non_finite} not finite.\n"
        f"Power: would flag noise for half the sensitivity with {found.doubled_mu_power:.0%}, "
        f"a release drawn twice and paid once with {found.repeated_power:.0%}.\n"
        "Without assuming Gaussian noise, the bound is "
        f"{found.epsilon_lower_assumption_free:.3f} at delta {delta:g}.\n"
        f"mu lower bound {found.mu_lower:.4f} of {found.pair_mu:.4f} that this pair can show\n"
        f"{_weaker(found.pair_mu, privacy)}"
        f"epsilon lower bound {found.epsilon_lower:.3f} of claimed {epsilon:g} at delta {delta:g} "
        "(per record)"
    )


@audit.command("attack")
def audit_attack(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run.", metavar="DIR")],
) -> None:
    """Attack a finished run: membership inference, and decoding of what was released.

    Needs the run's data. Writes attack.json and attack.png to DIR; the picture shows records.
    """
    from feddpms import audits

    found = audits.attack(folder)
    rows = [("attack", "AUC", "95 % interval", "TPR at 1 % FPR", "95 % interval")]
    for name, m in (
        ("images alone (no model)", found.baseline),
        ("loss of the final model", found.model),
        ("distance to synthetic images", found.synthetic),
        ("distance to released means", found.means),
    ):
        if m is None:
            why = "no decoder was trained" if found.means else "nothing was released under noise"
            rows.append((name, why, "", "", ""))
            continue
        rows.append(
            (
                name,
                f"{m.auc:.3f}",
                f"{m.auc_low:.3f} to {m.auc_high:.3f}",
                f"{m.tpr_at_1:.2%}",
                f"{m.tpr_at_1_low:.2%} to {m.tpr_at_1_high:.2%}",
            )
        )
    typer.echo(columns(rows))
    typer.echo(
        f"\n{found.model.members} members, {found.model.others} others; codes are those of the "
        "final model. An AUC near 0.5\nproves nothing about epsilon; one above it is a leak."
        + f"\nNo attack on the releases alone can reach an AUC above {found.limit:.3f}."
        * (found.limit is not None)
    )
    if found.picture:
        typer.echo(f"\nPicture, which shows records: {found.picture}")


def _release(
    epsilon: float, delta: float, release: str, adjacency: str, l2_clip: float, mean_size: int
) -> dict[str, Any]:
    """The options of a release as settings."""
    return {
        "target_epsilon": epsilon,
        "target_delta": delta,
        "release": release,
        "adjacency": adjacency,
        "l2_clip": l2_clip,
        "mean_size": mean_size,
    }


def _multipliers(found, privacy, latent: int, class_size: int, steps: int) -> list[tuple[str, ...]]:
    """The rows of `calibrate`."""
    from feddpms.privacy.mechanism import GradientSum, Histogram
    from feddpms.privacy.release import shape

    means, counts = shape(privacy, latent), Histogram(privacy.adjacency)
    divisor = class_size if privacy.release == "class_sum" else 1
    std = found.latent * means.l2_sensitivity / divisor
    rows = [
        ("", "noise multiplier", "l2 sensitivity", "what it means"),
        ("total of both releases", f"{found.total:.4f}", "", "as if they were one release"),
        (
            "class histogram",
            f"{found.counts:.4f}",
            f"{counts.l2_sensitivity:.4g}",
            f"standard deviation {found.counts * counts.l2_sensitivity:.4g} records",
        ),
        (
            "latent means",
            f"{found.latent:.4f}",
            f"{means.l2_sensitivity:.4g}",
            f"standard deviation {std:.4f} on each of {latent} coordinates of the mean"
            + (f" of a class of {class_size}" if privacy.release == "class_sum" else ""),
        ),
    ]
    if found.training:
        training = privacy.training
        gradients = GradientSum(training.l2_clip, privacy.adjacency)
        rows.append(
            (
                "model updates",
                f"{found.training:.4f}",
                f"{gradients.l2_sensitivity:.4g}",
                f"{steps} steps, sampling rate {training.sample_rate:.4g}",
            )
        )
    return rows


def _weaker(pair_mu: float, privacy) -> str:
    """A line if the pair shows less than is paid for."""
    from feddpms.privacy import calibrate as solve

    if pair_mu > 0.99 / solve(privacy).total:
        return ""
    return "No pair shows all that is paid for here: " + (
        "one record cannot be replaced so that both parts move furthest.\n"
        if privacy.adjacency == "replace_one"
        else "the clip is wider than the cube of codes.\n"
    )


def _paper() -> str:
    """The table of what the paper's noise costs."""
    from feddpms.privacy.paper import CLAIM, DELTAS, costs

    head = ["noise is", "value", "latent", "draws", "noise multiplier"]
    rows: list[tuple[str, ...]] = [(*head, *(f"epsilon at {d:g}" for d in DELTAS))]
    for c in costs():
        numbers = (f"{c.noise:g}", str(c.latent), str(c.draws), f"{c.noise_multiplier:.4g}")
        rows.append((c.reading, *numbers, *(f"{e:.4g}" for e in c.epsilons)))
    return (
        f"The paper claims epsilon {CLAIM[0]:g} at delta {CLAIM[1]:g} for sigma above 3.9. What "
        "its noisy means of m = 100 codes cost by the\nsensitivity of the vector, for one record "
        "replaced by another of its class and a fixed encoder (unit: one record):\n\n"
        f"{columns(rows)}\n\n"
        "Not in these numbers, and not covered by any: the encoder and the filter are the client's "
        "own,\ntrained on the same records; the list of classes is in the clear; draws that the "
        "filter drops\nwere drawn all the same."
    )


def _delta(folder: Path, given: float | None) -> float:
    """The delta to account at."""
    from feddpms import config

    if given is not None:
        if not 0 < given < 1:
            raise ConfigError(f"--delta: expected a number in (0, 1), got {given:g}")
        return given
    file = folder / "run.toml"
    return config.parse(config.load(file)).privacy.target_delta if file.exists() else 1e-5


def _between(least: int, most: int, **numbers: int) -> None:
    """Refuse numbers outside a range."""
    for name, value in numbers.items():
        if not least <= value <= most:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option}: expected {least} to {most}, got {value}")


def columns(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned text."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
    )
