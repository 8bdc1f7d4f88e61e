"""What a release may cost, and how it is shaped. Every field is public."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from feddpms.types import Neighbours, settings


@settings
class DpTraining:
    """Record-level private training (DP-SGD, or DP-Adam with local.optimizer="adam").

    The sampling rate is `expected_batch_size / expected_examples`: two public numbers, so that no
    client's true number of examples enters a step's size, normaliser or cost.
    """

    kind: Literal["none", "dpsgd"] = "none"
    """dpsgd: clip each example's gradient and add noise, in every round of training"""
    l2_clip: Annotated[float, Ge(1e-6), Le(1e6)] = 1.0
    """bound C on the l2 norm of one example's gradient"""
    expected_batch_size: Annotated[int, Ge(1), Le(1_000_000)] = 64
    """public normaliser of a step; with `expected_examples` it sets the sampling rate"""
    expected_examples: Annotated[int, Ge(1), Le(1_000_000_000)] = 500
    """public guess of how many examples a client has; never counted"""
    release_noise_multiplier: Annotated[float, Gt(0), Le(1e6)] = 8.0
    """noise multiplier of the latent means when training takes the rest of the target"""

    @property
    def sample_rate(self) -> float:
        """Chance of an example to be in a step's batch, in (0, 1]."""
        return min(1.0, self.expected_batch_size / self.expected_examples)

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which an example was used once on average; public."""
        return -(-self.expected_examples // self.expected_batch_size)


@settings
class Privacy:
    """Target and shape of what a client releases."""

    target_epsilon: Annotated[float, Ge(1e-3), Le(1000)] = 2.0
    """epsilon per record of all noisy channels of a client together, over the whole run"""
    target_delta: Annotated[float, Ge(1e-12), Lt(1)] = 1e-5
    """delta of the same"""
    max_epsilon: Annotated[float, Ge(0)] = 0.0
    """budget: a client refuses to send what would cost more, and all in the clear; 0 for none"""
    adjacency: Neighbours = "add_remove"
    """neighbouring data sets: one record added or removed, or one record replaced by any other"""
    release: Literal["class_sum", "fixed_m_mean", "paper"] = "class_sum"
    """noisy sums over all records of a class; means of m of them; or the paper's, unsound"""
    l2_clip: Annotated[float, Ge(1e-6), Le(1e6)] = 2.0
    """class_sum: radius R to which each latent code is clipped around 1/2"""
    mean_size: Annotated[int, Ge(1), Le(1_000_000_000)] = 100
    """fixed_m_mean, paper: m, records in the mean of a class"""
    count_noise_multiplier: Annotated[float, Gt(0), Le(1e6)] = 10.0
    """noise multiplier of the class histogram; with add_remove, its noise in records"""
    min_class_count: Annotated[float, Gt(0)] = 20.0
    """a class is released if its noisy count is at least this; also the least divisor of a mean"""
    paper_sigma: Annotated[float, Ge(1e-6), Le(1e6)] = 3.9
    """paper: sigma; each coordinate of a draw gets noise of standard deviation sigma / m"""
    paper_draws: Annotated[int, Ge(1), Le(100_000)] = 50
    """paper: noisy means drawn of each class, before the filter"""
    weights: Literal["exact", "noisy"] = "exact"
    """weigh a client by its exact number of examples, or by its noisy histogram"""
    noise: Literal["seeded", "secure"] = "seeded"
    """from the run's seed (a simulation), or from the operating system (extra `secure`)"""
    tuned_on: Literal["public", "private"] = "public"
    """what the settings above were chosen on; private records void every finite claim"""
    training: DpTraining = DpTraining()
    """private training"""
