"""A client's own auto-encoder: trained where its examples are, then asked for further ones."""

from dataclasses import replace

from feddpms.algorithms.fit import fit, load
from feddpms.algorithms.method import Client
from feddpms.models import ConditionalSettings, ConditionalVae, build_conditional, conditional_loss
from feddpms.rng import Rng
from feddpms.synthesis import Filling, Guidance, balanced, guided, lacking, told
from feddpms.types import Memory, Message, Shard, Tree

OWN, HEARD = "auto_encoder", "heard"
"""what a client keeps: its auto-encoder, and of which classes it was sent what is known"""


def learn(
    me: Client, settings: ConditionalSettings, fused: Tree, guidance: Guidance
) -> tuple[Message, Memory]:
    """A round's training of the client's auto-encoder, from where it was or from the common start.

    Args:
        me: the client.
        settings: the auto-encoder's.
        fused: what all clients together know; empty before anybody sent anything.
        guidance: how much that weighs.

    Returns:
        The client's knowledge, in the clear; and its auto-encoder, to be kept.
    """
    net = _auto_encoder(me, settings)
    start = me.memory.trees.get(OWN) or {k: v.clone() for k, v in net.state_dict().items()}
    loss = conditional_loss(settings.pixel_scale, net.means, me.normals("latent noise"))
    loss = guided(loss, fused, guidance.gamma, net.means, me.normals("prior draws"))
    local = replace(me.local, optimizer="adam")  # the run's optimiser and rate suit a classifier
    fitted = fit(replace(me, net=net, local=local, lr=settings.lr), start, loss)
    sent = {"knowledge": told(load(net, fitted.tree), me.shard.y, me.normals("knowledge"))}
    numbers = {"steps": fitted.steps, "train_loss": fitted.loss}
    events = me.clear("class knowledge", "training loss", "step count")
    heard = {"classes": fused["classes"]} if fused else me.memory.trees.get(HEARD, {})
    return Message("knowledge", sent, numbers, events), Memory({OWN: fitted.tree, HEARD: heard})


def fill(me: Client, settings: ConditionalSettings, filling: Filling) -> Client:
    """The client as the inner method is to see it: with synthetic examples, which are made once.

    They make the classes equally many that it has, or was sent the fused knowledge of. A client
    that took part in no round of knowledge has no auto-encoder, and no synthetic example.

    Args:
        me: the client.
        settings: the auto-encoder's.
        filling: cap and weight.
    """
    kept = me.memory
    made = _made(me, settings, filling) if OWN in kept.trees else kept.synthetic
    return replace(me, synthetic=made, memory=kept.inner or Memory())


def _made(me: Client, settings: ConditionalSettings, filling: Filling) -> Shard | None:
    """What the client's auto-encoder decodes for it."""
    net = load(_auto_encoder(me, settings), me.memory.trees[OWN])
    heard = me.memory.trees[HEARD].get("classes", me.shard.y[:0])
    amounts = lacking(me.shard.y, heard, me.task.classes, filling.per_class)
    return balanced(net, amounts, filling.weight, me.normals("synthesis"))


def _auto_encoder(me: Client, settings: ConditionalSettings) -> ConditionalVae:
    """An auto-encoder with the initial weights that all clients of a run have in common."""
    return build_conditional(me.shard.x, me.task, settings, Rng(me.rng.seed).at("auto-encoder"))
