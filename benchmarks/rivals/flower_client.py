"""Flower's ClientApp; a module of its own, so that a process keeps data and network in memory."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from case import Case, Sgd, load
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from network import Network, network

app = ClientApp()


@cache
def kept(path: str, threads: int) -> tuple[Case, Network]:
    """Data and network of this process."""
    torch.set_num_threads(threads)
    case = load(path)
    return case, network(case.weights)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on a client's own images."""
    config: Any = message.content.config_records["config"]
    case, net = kept(config["case"], config["threads"])
    client = int(context.node_config["partition-id"])
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    steps = fit(net, case, client)
    content = RecordDict()
    content["arrays"] = ArrayRecord(net.state_dict())
    content["metrics"] = MetricRecord({"num-examples": case.settings.examples, "steps": steps})
    return Message(content=content, reply_to=message)


def fit(net: Network, case: Case, client: int) -> int:
    """The local epochs; returns the steps taken."""
    settings, x, y = case.settings, case.x[client], case.y[client]
    optimizer = Sgd(net.parameters(), lr=settings.lr, momentum=settings.momentum)
    before = Sgd.taken
    net.train()
    for _ in range(settings.epochs):
        for part in torch.randperm(settings.examples).split(settings.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()
    return Sgd.taken - before
