"""Which platform torch offers: the registry chooses by it."""

from __future__ import annotations

import torch


class DeviceContext:
    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.is_rocm = self.device.type == "cuda" and torch.version.hip is not None
        self.device_type = "rocm" if self.is_rocm else self.device.type


device_ctx = DeviceContext()
