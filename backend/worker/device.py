"""The device that a configuration names."""

from __future__ import annotations

import torch

from backend.api.errors import ConfigError


def device_of(name: str) -> torch.device:
    """Raises ConfigError for a device that is unknown or is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device is {name}, which torch does not know; use cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device is {name}, but torch finds no CUDA device; use --set model.device=cpu")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device is {name}, supported are cpu and cuda")
    return device
