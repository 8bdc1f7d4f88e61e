"""FedDG against its formulas in NumPy: whole spectra, three unequal clients, several steps."""

import numpy as np
import torch
from reference import (
    CLASSES,
    LATENT,
    Tiny,
    as_numpy,
    average,
    batches,
    cross_entropies,
    logits,
    one_hot,
    sgd,
)
from test_methods import BATCH, EPOCHS, LR, ROUNDS, SIZES, TRAINING, stream
from torch import nn

from feddpms.algorithms import FedDG
from feddpms.engine import Crew, Engine, simulate
from feddpms.models import trunk
from feddpms.privacy import Ledger, Privacy
from feddpms.rng import Rng
from feddpms.types import Shard, Task

SIDE, B = 4, 1
METHOD = FedDG(window=0.3, share=0.4, weight=0.7)


class Wide(Tiny):
    """The reference's network on 4x4 images."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Linear(SIDE * SIDE, LATENT).double()
        g = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in self.mean.parameters():
                p.normal_(0, 0.5, generator=g)


def make_shards() -> list[Shard]:
    g, made = torch.Generator().manual_seed(7), []
    for k, n in enumerate(SIZES):
        y = torch.tensor([(k + 1 + i % 2) % CLASSES for i in range(n)])
        x = torch.rand(n, 1, SIDE, SIDE, generator=g, dtype=torch.float64)
        made.append(Shard((x + 0.2 * k).clamp(0, 1), y))
    return made


def spectra(x):
    """Whole spectra of images, the zero frequency in the middle."""
    return np.fft.fftshift(np.fft.fft2(x), axes=(-2, -1))


def test_feddg():
    shards = [(s.x[:, 0].numpy(), s.y.numpy()) for s in make_shards()]
    near = np.abs(np.arange(SIDE) - SIDE // 2) <= B
    window = near[:, None] & near[None, :]
    sent = []
    for k, (x, y) in enumerate(shards):
        order = torch.randperm(len(y), generator=stream(k, 1).torch("spectra")).numpy()
        sent.append(np.abs(spectra(x[order[: int(0.4 * len(y))]])))
    w = trunk(as_numpy(Wide().state_dict()))
    history = []
    for t in range(1, ROUNDS + 1):
        models = []
        for k, (x, y) in enumerate(shards):
            bank = np.concatenate([sent[j] for j in range(3) if j != k])
            draws, losses = stream(k, t).torch("styles"), []
            for i in batches(len(y), EPOCHS, BATCH, stream(k, t)):
                pick = torch.randint(len(bank), (len(i),), generator=draws).numpy()
                lam = torch.rand(len(i), generator=draws, dtype=torch.float64).numpy()
                own, share = spectra(x[i]), lam[:, None, None]
                blend = (1 - share) * np.abs(own) + share * bank[pick]
                amplitude = np.where(window, blend, np.abs(own))
                changed = np.fft.ifftshift(amplitude * np.exp(1j * np.angle(own)), axes=(-2, -1))
                mixed = np.clip(np.fft.ifft2(changed).real, 0, 1)

                both = [v.reshape(len(i), -1) for v in (x[i], mixed)]

                def loss(p, both=both, y=y[i]):
                    plain, styled = (cross_entropies(logits(p, v), one_hot(y)) for v in both)
                    return plain.mean() + 0.7 * styled.mean()

                losses.append(loss)
            models.append(sgd(w, losses, LR))
        w = average(models, SIZES)
        history.append(w)

    net, models = Wide(), []
    task = Task(classes=CLASSES, clients=3, rounds=ROUNDS, latent=LATENT)
    clients = dict(enumerate(make_shards()))
    crew = Crew(METHOD, clients, clients[0], net, task, TRAINING, Privacy(), Rng(0))
    simulate(crew, Engine(), Ledger(), lambda _, progress: models.append(progress.state.model))
    for got, want in zip(models, history, strict=True):
        for key, value in want.items():
            np.testing.assert_allclose(got[key], value, rtol=1e-7, atol=1e-9, err_msg=key)
