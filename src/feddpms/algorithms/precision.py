"""How precisely a step computes: float32, or bfloat16 where the processor has it."""

import torch

from feddpms.algorithms.training import Training
from feddpms.errors import ConfigError


def require_precision(local: Training, device: str, private: bool, together: bool) -> None:
    """Refuse a precision that a device only emulates, many times slower, or that is unsound.

    Args:
        local: how clients train.
        device: `cpu` or `cuda`, where they do.
        private: whether training is private.
        together: whether several clients train at once.

    Raises:
        ConfigError: bfloat16 on a device without it, or where it is not used.
    """
    if local.precision == "float32":
        return
    if together:
        raise ConfigError(
            "clients that train at once do so in float32; set local.precision=float32, or "
            "engine.clients_at_once=1"
        )
    if private:
        raise ConfigError(
            "private training needs local.precision=float32, since what rounding adds to a "
            "gradient is in no sensitivity; set it"
        )
    on_cpu = device == "cpu"
    if not (torch.ops.mkldnn._is_mkldnn_bf16_supported() if on_cpu else _gpu_has_it()):
        needs = "a processor that has it (AVX-512 BF16 or AMX)" if on_cpu else "a GPU that has it"
        raise ConfigError(
            f"local.precision=bfloat16 needs {needs}, got one that has not; leave it at float32"
        )


def precision(local: Training, device: torch.device) -> torch.autocast:
    """A context in which products are computed as asked; everything else stays float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=local.precision == "bfloat16")


def _gpu_has_it() -> bool:
    """Whether there is a GPU with bfloat16."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
