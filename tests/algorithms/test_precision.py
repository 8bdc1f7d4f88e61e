import pytest
import torch

from feddpms import config, runs
from feddpms.algorithms import Training
from feddpms.algorithms.fit import fit
from feddpms.algorithms.precision import require_precision
from feddpms.errors import ConfigError
from small import client, small_net, three_shards

SMALL = {"method": "fedavg", "rounds": 1, "data": {"fraction": 0.1}, "partition": {"clients": 3}}


def trained(precision: str):
    net = small_net()
    start = {k: v.clone() for k, v in net.state_dict().items()}
    local = Training(epochs=3, batch_size=8, lr=0.01, precision=precision)
    return fit(client(three_shards()[1], net, local=local), start)


def test_bfloat16_is_near_float32_and_keeps_weights_in_float32():
    whole, half = trained("float32"), trained("bfloat16")
    assert half.loss == pytest.approx(whole.loss, rel=0.02)
    assert half.loss != whole.loss
    assert all(v.dtype == whole.tree[k].dtype for k, v in half.tree.items())
    apart = [(v.double() - whole.tree[k]).abs().mean().item() for k, v in half.tree.items()]
    assert sum(apart) / len(apart) < 0.02


def test_bfloat16_without_the_processor_for_it_is_refused_in_one_line(monkeypatch):
    run = config.parse({**SMALL, "local": {"precision": "bfloat16"}})
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match="needs a processor that has it"):
        runs.run(run)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert runs.run(run).rounds


def test_private_training_in_bfloat16_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    private = {"weights": "noisy", "training": {"kind": "dpsgd"}}
    values = {**SMALL, "net": {"norm": "group"}, "privacy": private}
    run = config.parse({**values, "local": {"precision": "bfloat16"}})
    with pytest.raises(ConfigError, match=r"needs local\.precision=float32"):
        runs.run(run)


def test_bfloat16_with_clients_at_once_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    run = config.parse(
        {**SMALL, "local": {"precision": "bfloat16"}, "engine": {"clients_at_once": 2}}
    )
    with pytest.raises(ConfigError, match="do so in float32"):
        runs.run(run)


def test_bfloat16_on_a_gpu_without_it_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a GPU that has it"):
        require_precision(Training(precision="bfloat16"), "cuda", private=False, together=False)
