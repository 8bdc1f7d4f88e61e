"""The un-noised half of DP-SGD: clip the gradient of each example, add them up.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, algorithm 1. The gradient of each
example comes from the hooks of Opacus. The caller draws the noise and takes the step.
"""

import importlib.util
import warnings
from collections import Counter
from collections.abc import Container
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddpms.errors import ConfigError
from feddpms.types import Batch, Loss, Tree

SLACK = 1e-9
"""Part of the clip that is left unused, so that no rounding lifts a norm above it."""


def require_opacus() -> None:
    """Refuse private training without its library.

    Raises:
        ConfigError: Opacus is not installed.
    """
    if importlib.util.find_spec("opacus") is None:
        raise ConfigError('DP training needs Opacus; pip install "feddpms[dpsgd]"')


def require_per_example(net: nn.Module) -> None:
    """Refuse a network in which an example's output depends on the rest of its batch.

    Args:
        net: the network to train.

    Raises:
        ConfigError: a layer is a batch normalisation.
    """
    for name, module in net.named_modules():
        if isinstance(module, _BatchNorm):
            raise ConfigError(
                f"DP training needs layers that keep examples apart, such as GroupNorm, got "
                f'{type(module).__name__} at {name or "the top"}; set net.norm = "group"'
            )


class ClippedGradients:
    """Sums of clipped per-example gradients of a network, while inside a `with` block.

    Guarantee: for fixed weights, adding or removing one example moves a sum by at most `l2_clip`
    in l2 norm over all treated parameters together, but for the rounding of the other examples'
    gradients, which may differ in their last bit with the size of the batch. An example with a
    gradient that is not finite counts as zero. What does not hold: a loss that compares the
    examples of a batch is not noticed and breaks this, and the loss value is not protected.

    Inside the block the network is in train mode, and the other parameters take no gradient. At
    its end modes, hooks and `requires_grad` are as before, and `grad` is None.

        with ClippedGradients(net, l2_clip=1.0) as gradients:
            sums, total = gradients.sum(cross_entropy, batch)
    """

    def __init__(self, net: nn.Module, l2_clip: float, names: Container[str] | None = None):
        """Choose what is treated.

        Args:
            net: the network to train.
            l2_clip: largest l2 norm C of the gradient of one example, above 0.
            names: parameters to treat; all if None. Those with `requires_grad` off are left out.

        Raises:
            ConfigError: a layer is a batch normalisation.
        """
        require_per_example(net)
        self.net, self.l2_clip = net, l2_clip
        self.named: dict[str, Any] = {
            k: p
            for k, p in net.named_parameters()
            if p.requires_grad and (names is None or k in names)
        }

    def __enter__(self) -> "ClippedGradients":
        treated = {id(p) for p in self.named.values()}
        with ExitStack() as undo:
            for module in self.net.modules():
                undo.callback(setattr, module, "training", module.training)
            for p in self.net.parameters():
                undo.callback(p.requires_grad_, p.requires_grad)
                p.requires_grad_(id(p) in treated)
            self.net.train()
            self._hooks = _hooks(self.net)
            self._hooks.disable_hooks()  # on in `sum` alone
            undo.callback(self._hooks.to_standard_module)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def sum(self, loss: Loss, batch: Batch) -> tuple[Tree, float]:
        """The sum over examples of g * min(1, C / ||g||), g being the gradient of one example.

        Args:
            loss: the mean over the batch of a term for each example.
            batch: any number of examples, also none; `weight` None.

        Returns:
            By parameter name, in the network's order, the sum with the parameter's shape and memory
            format, in float64 so that no rounding adds to the sensitivity (Abadi et al. 2016,
            algorithm 1, before the noise and the division by the lot size); zeros where the loss
            does not reach. Then the sum of the examples' losses, NaN if one of them is.

        Raises:
            ValueError: the batch has weights, or the loss has a part without per-example gradients.
        """
        if batch.weight is not None:
            raise ValueError("per-example gradients need batch.weight None: clipping comes first")
        size = len(batch.x)
        if not size:
            return {k: _float64(p) for k, p in self.named.items()}, 0.0
        self._hooks.enable_hooks()
        try:
            total = size * loss(self.net, batch)
            self._backward(total)
            return self._clip(size, batch.x.device), float(total.detach())
        finally:
            self._hooks.disable_hooks()
            self._clear()

    def _backward(self, total: Tensor) -> None:
        """Fill each parameter's `grad_sample` [b, ...], its passes added up."""
        uses = _uses(total)
        for name, p in self.named.items():
            # A pass that backward does not undo, or a use outside the layer, would go unnoticed.
            if uses[id(p)] != p._forward_counter:
                raise ValueError(
                    f"the loss uses {name} {uses[id(p)]} times but the forward pass of its layer "
                    f"{p._forward_counter} times; leave terms in the weights alone (such as a "
                    f"proximal term) and unused passes out of it"
                )
        if total.requires_grad:
            with warnings.catch_warnings():  # images take no gradient, as Opacus expects
                warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
                total.backward()

    def _clip(self, size: int, device: torch.device) -> Tree:
        """The sum of the clipped rows of every `grad_sample`."""
        rows = {k: p.grad_sample for k, p in self.named.items() if p.grad_sample is not None}
        if any(len(r) != size for r in rows.values()):
            raise ValueError(f"the loss must pass its batch of {size} through each layer as it is")
        rows = {k: r.flatten(1) for k, r in rows.items()}
        square = torch.zeros(size, dtype=torch.float64, device=device)
        for r in rows.values():
            square += torch.linalg.vector_norm(r, dim=1, dtype=torch.float64).square()
        norm = square.sqrt()
        factor = (self.l2_clip / (norm * (1 + SLACK))).clamp(max=1)
        sums = {k: _float64(p) for k, p in self.named.items()}
        for k, r in rows.items():
            r = r.double()
            r[~norm.isfinite()] = 0  # 0 * NaN is NaN
            sums[k].copy_((factor.nan_to_num(0) @ r).view_as(sums[k]))
        return sums

    def _clear(self) -> None:
        """Drop what a pass leaves behind, also one that broke off."""
        for p in self.named.values():
            p.grad, p.grad_sample, p._forward_counter = None, None, 0
            vars(p).pop("_current_grad_sample", None)
        for module in self.net.modules():
            vars(module).pop("activations", None)
            vars(module).pop("max_batch_len", None)


def _hooks(net: nn.Module) -> Any:
    """Opacus's hooks on a network, for a loss that is a sum over examples."""
    require_opacus()
    from opacus.grad_sample import GradSampleModule

    class Contiguous(GradSampleModule):
        """Opacus 1.6 unfolds a convolution's input by strides that channels_last does not have.

        It then takes other pixels, and the gradient is wrong without a word.
        """

        def rearrange_grad_samples(self, **given: Any) -> Any:
            activations, backprops = super().rearrange_grad_samples(**given)
            return [a.contiguous() for a in activations], backprops.contiguous()

    return Contiguous(net, loss_reduction="sum")


def _uses(value: Tensor) -> Counter[int]:
    """How often each leaf, by its id, enters the graph of a value."""
    uses: Counter[int] = Counter()
    seen, todo = set(), [value.grad_fn]
    while todo:
        node = todo.pop()
        for child, _ in node.next_functions if node else ():
            leaf = getattr(child, "variable", None)
            if leaf is not None:
                uses[id(leaf)] += 1
            elif child not in seen:
                seen.add(child)
                todo.append(child)
    return uses


def _float64(p: Tensor) -> Tensor:
    """Zeros like a parameter, in float64."""
    return torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
