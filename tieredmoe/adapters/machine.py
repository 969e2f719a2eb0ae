"""Where a model is to run: the host or one GPU, and what is free there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from tieredmoe.adapters.device_link import link_bytes_per_s, pinning
from tieredmoe.budget import available_host_nbytes
from tieredmoe.memory.cuda_device import open_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.config import HierarchyConfig


@attrs.frozen(kw_only=True)
class Machine:
    """What a memory plan is made for."""

    device: torch.device
    name: str
    free_nbytes: int
    """where the model computes"""
    host_free_nbytes: int
    link_bytes_per_s: Callable[[], float]
    """measures the way from the host to the device; asked only where layers stream"""

    @property
    def is_device(self) -> bool:
        """Whether it is a GPU, whose memory is not the host's."""
        return self.device.type != "cpu"


def this_machine(config: HierarchyConfig) -> Machine:
    """The machine that ``config.device`` names, with what is free now.

    Raises ``ConfigError`` for a GPU that is not there, ``BudgetError`` where the kernel does not
    say what is free.
    """
    host_free_nbytes = available_host_nbytes()
    if config.device == "host":
        return Machine(
            device=torch.device("cpu"),
            name="the host",
            free_nbytes=host_free_nbytes,
            host_free_nbytes=host_free_nbytes,
            link_bytes_per_s=lambda: float("inf"),
        )
    found = open_device(config.device)
    return Machine(
        device=found.device,
        name=f"{found.device} ({found.name})",
        free_nbytes=found.free_nbytes(),
        host_free_nbytes=host_free_nbytes,
        link_bytes_per_s=lambda: link_bytes_per_s(
            found.device, pin=pinning(found.device, strict=config.strict)
        ),
    )
