"""One vector in place of many parameters: the same numbers, whatever their memory layouts."""

import pytest
import torch
from torch import nn

from feddpms.algorithms import Training
from feddpms.algorithms.correction import Correction
from feddpms.algorithms.fit import fit
from feddpms.algorithms.flat import Flat, new_optimizer
from small import client, small_net, three_shards


def parameters() -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 3, 2, 2, generator=g, dtype=torch.float64)
    return {
        "conv": nn.Parameter(wide.contiguous(memory_format=torch.channels_last)),
        "bias": nn.Parameter(torch.randn(4, generator=g, dtype=torch.float64)),
        "turned": nn.Parameter(torch.randn(5, 2, generator=g, dtype=torch.float64).T),
    }


def losses(named):
    g = torch.Generator().manual_seed(1)
    for _ in range(4):
        targets = [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in named.values()]
        pairs = zip(named.values(), targets, strict=True)
        yield sum((p - t).square().sum() * (1 + i) for i, (p, t) in enumerate(pairs))


@pytest.mark.parametrize(
    "local",
    [
        Training(weight_decay=0.1),
        Training(optimizer="sgd", momentum=0.9, weight_decay=0.1),
        Training(optimizer="sgd", momentum=0.0),
    ],
)
def test_a_step_of_the_vector_is_a_step_of_each_parameter(local):
    apart, together = parameters(), parameters()
    flat = Flat(together)
    one_by_one = (
        torch.optim.Adam(apart.values(), 0.1, weight_decay=local.weight_decay)
        if local.optimizer == "adam"
        else torch.optim.SGD(apart.values(), 0.1, local.momentum, weight_decay=local.weight_decay)
    )
    optimizer = new_optimizer([flat.vector], local, 0.1)
    for one, other in zip(losses(apart), losses(together), strict=True):
        one_by_one.zero_grad()
        one.backward()
        one_by_one.step()
        flat.gradient.zero_()
        other.backward()
        optimizer.step()
    for key, p in together.items():
        assert p.stride() == apart[key].stride()
        torch.testing.assert_close(p, apart[key], rtol=1e-12, atol=1e-12)


def test_the_values_stay_when_the_vector_is_made():
    named, flat = parameters(), Flat(parameters())
    assert all(torch.equal(flat.named[k], p) for k, p in named.items())
    assert flat.vector.numel() == sum(p.numel() for p in named.values())


def test_a_gradient_that_is_set_row_by_row_reaches_each_parameter():
    flat = Flat(parameters())
    want = {k: torch.randn(p.shape, dtype=p.dtype) for k, p in flat.named.items()}
    for p in flat.named.values():
        p.grad = None  # as per-example gradients leave it
    flat.set(torch.cat([v.flatten() for v in want.values()]))
    assert all(torch.equal(flat.named[k].grad, v) for k, v in want.items())
    flat.named["bias"].sum().backward()  # a penalty adds to it
    assert torch.equal(flat.named["bias"].grad, want["bias"] + 1)
    assert torch.equal(flat.gradient, flat.like(want | {"bias": want["bias"] + 1}))


def test_what_a_tree_does_not_name_is_zero():
    flat = Flat(parameters())
    tree = {"turned": torch.ones(2, 5, dtype=torch.float64)}
    assert flat.like(tree).sum() == 10
    assert flat.like({}).abs().sum() == 0


def test_training_leaves_no_gradient_behind():
    net = small_net()
    fit(client(three_shards()[0], net), {k: v.clone() for k, v in net.state_dict().items()})
    assert all(p.grad is None for p in net.parameters())


def test_a_drift_is_added_to_each_steps_gradient_and_to_nothing_else():
    """Plain SGD with a constant drift d moves lr * d further a step, where the loss is flat."""
    net = small_net()
    start = {k: v.clone() for k, v in net.state_dict().items()}
    local = Training(epochs=2, batch_size=8, optimizer="sgd", momentum=0.0, lr=0.5)
    key = "encoder.layers.0.weight"  # laid out in channels_last
    drift = {key: torch.randn(start[key].shape, generator=torch.Generator().manual_seed(0))}

    def flat_loss(net, batch):
        return 0 * net(batch.x).sum()

    fitted = fit(client(three_shards()[0], net, local=local), start, flat_loss, Correction(drift))
    assert fitted.steps == 6
    torch.testing.assert_close(fitted.tree[key], start[key] - 6 * 0.5 * drift[key])
    trained = [k for k, _ in net.named_parameters() if k != key]
    assert all(torch.equal(fitted.tree[k], start[k]) for k in trained)
