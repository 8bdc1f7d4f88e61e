"""The networks of clients that train at once, as one stack: row i of each tensor is the i-th's.

One call of stacked networks is one `vmap` over rows, and one step of a stack is one step of an
optimiser, which treats every number of a tensor by itself.
"""

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from feddpms.algorithms import Training
from feddpms.algorithms.correction import Correction
from feddpms.algorithms.flat import new_optimizer
from feddpms.types import Tree


class Stack:
    """Networks in training, one a member.

    Args:
        members: who trains, in the order of the rows.
        nets: each member's network, with the weights and buffers to start from; left as it is.
        trained: entries to train; the others stand still.
        corrections: of each member's steps; all decoupled, or none.
        local: how all train.
        lr: at which learning rate.
    """

    def __init__(
        self,
        members: Sequence[Any],
        nets: Sequence[nn.Module],
        trained: Iterable[str],
        corrections: Sequence[Correction],
        local: Training,
        lr: float,
    ):
        self.members, self._keys = list(members), list(trained)
        self._module = _Named(copy.deepcopy(nets[0])).train()  # the first member may use its own
        self._names = [k for k, _ in nets[0].named_parameters()]
        states = [net.state_dict() for net in nets]
        self._state = {k: torch.stack([s[k] for s in states]).contiguous() for k in states[0]}
        self._trained = {k: self._state[k].requires_grad_() for k in self._names if k in self._keys}
        named = {k for c in corrections for k in (*c.drift, *c.centre)}
        self._corrections = {
            k: _rows(k, corrections, v) for k, v in self._trained.items() if k in named
        }
        self._decoupled, self._lr = corrections[0].decoupled, lr
        self._optimizer = new_optimizer(list(self._trained.values()), local, lr)
        some = next(iter(self._state.values()))
        self._loss = torch.zeros(len(members), dtype=torch.float64, device=some.device)
        self._rows: dict[str, tuple[Tensor, ...]] = {}

    def weights(self, member: Any) -> list[tuple[str, Tensor]]:
        """A member's own parameters by name, in the graph."""
        if not self._rows:  # once a step: a row taken alone has a gradient as large as the stack
            self._rows = {k: self._state[k].unbind() for k in self._names}
        row = self.members.index(member)
        return [(k, rows[row]) for k, rows in self._rows.items()]

    def call(self, members: Sequence[Any], name: str, given: Sequence[Sequence[Tensor]]) -> list:
        """What members' networks make of their own examples, in one pass.

        Args:
            members: some or all, in the order of the rows.
            name: method of the network.
            given: each member's arguments, tensors [b, ...] alike but for b; shorter ones are
                filled up, and what comes of that is cut off.

        Returns:
            Each member's result, as its network alone would give it.
        """
        sizes = [len(arguments[0]) for arguments in given]
        even, index = min(sizes) == max(sizes), self._index(members)
        stacked = [_stacked(column, even) for column in zip(*given, strict=True)]
        state = self._state if even and index is None else self._copy(index)
        if even:
            out = torch.vmap(partial(self._plain, name))(state, *stacked)
        else:
            places = torch.arange(max(sizes), device=stacked[0].device)
            real = places < places.new_tensor(sizes).unsqueeze(1)
            out = torch.vmap(partial(self._filled, name))(state, real, *stacked)
        if state is not self._state:
            self._take_back(state, index)
        single = isinstance(out, Tensor)
        parts = [o.unbind() for o in ((out,) if single else out)]
        results = [[_cut(p[i], n) for p in parts] for i, n in enumerate(sizes)]
        return [r[0] if single else tuple(r) for r in results]

    def step(self, values: Sequence[Tensor]) -> None:
        """One step down each member's own loss, all at once."""
        losses = torch.stack(list(values))
        trained = list(self._trained.values())
        # A loss knows its own row alone, so the gradient of the sum is each row's own.
        gradients = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
        for (key, p), g in zip(self._trained.items(), gradients, strict=True):
            if key in self._corrections and not self._decoupled:
                steer = self._steer(key)
                g = steer if g is None else g + steer
            p.grad = g if g is None else g.contiguous()  # a fused optimiser needs p's own layout
        self._optimizer.step()
        if self._decoupled:
            for key in self._corrections:
                self._trained[key].data -= self._lr * self._steer(key)
        self._loss += losses.detach()
        self._rows = {}

    def leave(self, gone: Sequence[Any]) -> list[tuple[Tree, float]]:
        """The trained entries and the sum of the losses of members, who are members no more."""
        rows = [self.members.index(m) for m in gone]
        left = [
            ({k: self._state[k][i].detach().clone() for k in self._keys}, float(self._loss[i]))
            for i in rows
        ]
        keep = [i for i in range(len(self.members)) if i not in rows]
        self.members = [self.members[i] for i in keep]
        if gone and keep:
            self._keep(keep)
        return left

    def _keep(self, keep: list[int]) -> None:
        """Only these rows of all that is stacked."""
        states = self._optimizer.state
        for key, old in self._trained.items():
            new = old.detach()[keep].requires_grad_()
            states[new] = {
                k: v[keep] if _like(v, old) else v for k, v in states.pop(old, {}).items()
            }
            self._trained[key] = new
        self._optimizer.param_groups[0]["params"] = list(self._trained.values())
        others = self._state.keys() - self._trained.keys()
        self._state |= {k: self._state[k][keep] for k in others} | self._trained
        self._corrections = {k: tuple(v[keep] for v in r) for k, r in self._corrections.items()}
        self._loss = self._loss[keep]

    def _steer(self, key: str) -> Tensor:
        """The correction of a parameter's rows as they are."""
        drift, pull, centre = self._corrections[key]
        return drift + pull * (self._trained[key].detach() - centre)

    def _index(self, members: Sequence[Any]) -> Tensor | None:
        """The rows of some members; None for all."""
        if len(members) == len(self.members):
            return None
        return torch.tensor([self.members.index(m) for m in members], device=self._loss.device)

    def _copy(self, index: Tensor | None) -> Tree:
        """The weights of some rows, and copies of their buffers.

        What changes a buffer in place would spoil the graph of an earlier call of this step. A
        plain batch normalisation, which updates its own, does not.
        """
        if index is not None:
            return {k: v.index_select(0, index) for k, v in self._state.items()}
        return {k: v if k in self._names else v.clone() for k, v in self._state.items()}

    def _take_back(self, state: Tree, index: Tensor | None) -> None:
        """Keep the buffers of a copy."""
        for k in self._state.keys() - self._names:
            new, old = state[k], self._state[k]
            self._state[k] = new if index is None else old.index_copy(0, index, new)

    def _plain(self, name: str, state: Tree, *given: Tensor) -> Any:
        """One member's call."""
        named = {f"net.{k}": v for k, v in state.items()}
        return functional_call(self._module, named, (name, *given))

    def _filled(self, name: str, state: Tree, real: Tensor, *given: Tensor) -> Any:
        """One member's call, whose batch was filled up."""
        with _BatchNormOf(real):
            return self._plain(name, state, *given)


class _Named(nn.Module):
    """A network whose method is called by its name: `functional_call` calls `forward` alone."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, name: str, *given: Tensor) -> Any:
        """The method of this name."""
        return getattr(self.net, name)(*given)


class _BatchNormOf(TorchFunctionMode):
    """Batch normalisation by some examples of a batch: the only layer in which examples meet."""

    def __init__(self, real: Tensor):
        super().__init__()
        self.real = real

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Torch's functions as they are, but for one."""
        kwargs = kwargs or {}
        if function is F.batch_norm:
            return _batch_norm(self.real, *args, **kwargs)
        return function(*args, **kwargs)


def _batch_norm(
    real: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """`F.batch_norm` in training, with statistics over the real examples."""
    assert training
    over, column = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
    share = real.view(-1, *[1] * (x.dim() - 1)).to(x.dtype)
    n = share.sum() * x[0, 0].numel()
    m = (share * x).sum(over) / n
    gap = x - m.view(column)
    v = (share * gap.square()).sum(over) / n
    with torch.no_grad():
        mean.mul_(1 - momentum).add_(momentum * m)
        var.mul_(1 - momentum).add_(momentum * v * n / (n - 1))  # of the population
    return gap * ((v + eps).rsqrt() * weight).view(column) + bias.view(column)


def _stacked(column: Sequence[Tensor], even: bool) -> Tensor:
    """Members' tensors [b, ...] as one, the shorter ones filled up with zeros."""
    return torch.stack(list(column)) if even else pad_sequence(list(column), batch_first=True)


def _cut(rows: Tensor, size: int) -> Tensor:
    """The first rows; no view that costs a pass backward where those are all."""
    return rows if len(rows) == size else rows[:size]


def _rows(key: str, corrections: Sequence[Correction], like: Tensor) -> tuple[Tensor, ...]:
    """Drift, pull and centre of a parameter, each with a row a member as `like` has."""
    none = torch.zeros_like(like[0])
    drifts = [c.drift.get(key, none) for c in corrections]
    centres = [c.centre.get(key, none) for c in corrections]
    pulls = like.new_tensor([c.pull if key in c.centre else 0.0 for c in corrections])
    return torch.stack(drifts), pulls.view(-1, *[1] * (like.dim() - 1)), torch.stack(centres)


def _like(value: Any, rows: Tensor) -> bool:
    """Whether part of an optimiser's state has a row for each member, as its tensor does."""
    return isinstance(value, Tensor) and value.shape == rows.shape
