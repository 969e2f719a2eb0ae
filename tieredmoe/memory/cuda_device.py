"""The GPU that a configuration names: what is free on it, and a cache's memory there."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import attrs
import torch

from tieredmoe.budget import format_size
from tieredmoe.errors import ConfigError
from tieredmoe.memory.cuda import CudaArena
from tieredmoe.memory.pinning import PinnedHost

if TYPE_CHECKING:
    from tieredmoe.memory.pages import HostPool
    from tieredmoe.spec import MoESpec

_log = logging.getLogger(__name__)


class SlotPlan(Protocol):
    """What an arena needs to know of a chain's plan."""

    @property
    def n_slots(self) -> int:
        """Slots on the GPU."""

    @property
    def slot_nbytes(self) -> int:
        """Bytes of each."""

    @property
    def stage_slot_nbytes(self) -> int:
        """Bytes of the host's slots that copies come from."""


@attrs.frozen
class CudaDevice:
    """One GPU of this process, by its number among those that torch sees."""

    device: torch.device
    name: str

    @property
    def index(self) -> int:
        """The number."""
        return int(self.device.index)

    def free_nbytes(self) -> int:
        """Bytes that can be allocated now, once torch has given back what it keeps unused."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()
        free_nbytes, _ = torch.cuda.mem_get_info(self.device)
        return int(free_nbytes)

    def arena_over(
        self, pool: HostPool, planned: SlotPlan, spec: MoESpec, *, strict: bool
    ) -> tuple[CudaArena, tuple[str, ...]]:
        """The arena as ``planned`` for ``spec``, filled from ``pool``, and what fell short.

        The pool is registered until the arena is closed. Blocks. Raises ``BudgetError`` if the GPU
        has no room, and ``DeviceError``.
        """
        pinned = pin(
            pool, device=self.device, record_nbytes=planned.stage_slot_nbytes, strict=strict
        )
        try:
            arena = CudaArena(
                n_slots=planned.n_slots,
                slot_nbytes=planned.slot_nbytes,
                layers=spec.layers,
                n_experts=spec.n_experts,
                device=self.device,
                pinned=pinned,
            )
        except BaseException:
            pinned.close()
            raise
        return arena, () if pinned.refused is None else (f"pinned: {pinned.refused}",)


def pin(
    pool: HostPool, *, device: torch.device, record_nbytes: int, strict: bool = False
) -> PinnedHost:
    """Register ``pool`` for fast copies; where that is refused, warn, or raise if ``strict``.

    See ``PinnedHost.register``; the refusal of a strict call is the driver's ``DeviceError``.
    """
    pinned = PinnedHost.register(pool, device=device, record_nbytes=record_nbytes)
    if pinned.refused is not None:
        if strict:
            pinned.close()
            raise pinned.refused
        _log.warning(
            "%s of host memory could not be registered with the GPU, so copies are slower (%s); "
            "WSL and containers limit it, and so does `ulimit -l`",
            format_size(pool.nbytes),
            pinned.refused,
        )
    return pinned


def open_device(name: str) -> CudaDevice:
    """The GPU called ``name`` (``cuda`` is the first, ``cuda:N``); ``ConfigError`` if none is."""
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    _, _, number = name.partition(":")
    index = int(number or 0)
    if index >= n_devices:
        names = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(n_devices))
        raise ConfigError(
            f"device: {name!r} is not there; torch {torch.__version__} sees {names or 'no GPU'}; "
            "choose one of these, or 'host'"
        )
    return CudaDevice(torch.device("cuda", index), torch.cuda.get_device_name(index))
