"""How precisely a step computes: float32, or bfloat16 where the processor has it."""

import torch

from feddpms.algorithms.method import Training
from feddpms.errors import ConfigError


def require_precision(local: Training, private: bool) -> None:
    """Refuse a precision that this machine only emulates, many times slower, or that is unsound.

    Raises:
        ConfigError: bfloat16 on a processor without it, or for private training.
    """
    if local.precision == "float32":
        return
    if private:
        raise ConfigError(
            "private training needs local.precision=float32, since what rounding adds to a "
            "gradient is in no sensitivity; set it"
        )
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ConfigError(
            "local.precision=bfloat16 needs a processor that has it (AVX-512 BF16 or AMX), got one "
            "that has not; leave it at float32"
        )


def precision(local: Training) -> torch.autocast:
    """A context in which products are computed as asked; everything else stays float32."""
    return torch.autocast("cpu", torch.bfloat16, enabled=local.precision == "bfloat16")
