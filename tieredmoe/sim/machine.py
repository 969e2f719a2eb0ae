"""From counts to seconds: a drive, a link and a device, in virtual time without a loop.

The model is demand only, one token after another, and says what it leaves out: a layer's reads
begin when the layer before it has been computed; experts pass through the drive and then the link
one by one, each at the full rate; those that RAM holds cross the link first, while the drive reads;
the layer computes when all are there. No prefetch, no queue-depth ramp, no CPU time. So real steps
take longer than these, and ``Rates.floor_s`` is what overlapping everything could bring: each part
alone, at its full rate, all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import attrs
import numpy as np

from tieredmoe.errors import raise_config_problems
from tieredmoe.sim.routing_trace import DECODE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tieredmoe.sim.simulation import CacheRun

DRIVE, LINK, DEVICE = "drive", "link", "device"


@attrs.frozen
class Machine:
    """Bytes of an expert, GB/s of the drive and of the link to the device, seconds per layer.

    ``layer_s`` is a layer's whole computation, everything resident. Raises ``ConfigError`` for what
    no machine has.
    """

    expert_nbytes: int
    drive_gb_per_s: float
    link_gb_per_s: float = 50.0
    layer_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        problems = [
            f"{name} is {value:g}, and has to be above 0"
            for name, value in (
                ("an expert's size in bytes", self.expert_nbytes),
                ("the drive's GB/s", self.drive_gb_per_s),
                ("the link's GB/s", self.link_gb_per_s),
            )
            if not 0 < value < float("inf")
        ]
        if not 0 <= self.layer_s < float("inf"):
            problems.append(f"a layer of {self.layer_s:g} s is none")
        raise_config_problems("machine", problems)

    @property
    def read_s(self) -> float:
        """Seconds that the drive takes for one expert."""
        return self.expert_nbytes / (self.drive_gb_per_s * 1e9)

    @property
    def copy_s(self) -> float:
        """Seconds that the link takes for one expert."""
        return self.expert_nbytes / (self.link_gb_per_s * 1e9)


class Span(NamedTuple):
    """One lane was busy with one layer of one pass; ``n_experts`` went through it."""

    lane: str
    start_s: float
    end_s: float
    pass_index: int
    layer: int
    n_experts: int


@attrs.frozen
class Rates:
    """Seconds per decoded token of each lane alone, and of the tokens as they ran one by one."""

    drive_s: float
    link_s: float
    device_s: float
    token_s: float

    @property
    def bound_by(self) -> str:
        """The lane that limits a token even if all else were hidden behind it."""
        lanes = {DRIVE: self.drive_s, LINK: self.link_s, DEVICE: self.device_s}
        return max(lanes, key=lambda lane: lanes[lane])

    @property
    def floor_s(self) -> float:
        """Seconds per token if everything overlapped: no schedule is faster."""
        return max(self.drive_s, self.link_s, self.device_s)


def waits(run: CacheRun, machine: Machine) -> NDArray[np.float64]:
    """Seconds from a layer's routing until its experts have landed, [P, L].

    With D reads of r seconds and C = D + (those in RAM) copies of c seconds the last one lands at
    max(C c, D r + c, r + D c): the link never pauses, or waits for each read, or for the first.
    """
    r, c = machine.read_s, machine.copy_s
    n_reads, n_copies = run.reads, run.misses
    from_drive = np.maximum(n_reads * r + c, r + n_reads * c)
    landed: NDArray[np.float64] = np.maximum(n_copies * c, np.where(n_reads > 0, from_drive, 0))
    return landed


def token_seconds(run: CacheRun, machine: Machine) -> NDArray[np.float64]:
    """Seconds of each pass, [P]."""
    seconds: NDArray[np.float64] = (waits(run, machine) + machine.layer_s).sum(axis=1)
    return seconds


def rates(run: CacheRun, machine: Machine) -> Rates:
    """The means over decoded tokens; NaN without any."""
    decode = run.phase == DECODE
    n_tokens = int(np.count_nonzero(decode))
    if not n_tokens:
        return Rates(*[float("nan")] * 4)
    return Rates(
        drive_s=float(run.reads[decode].sum()) * machine.read_s / n_tokens,
        link_s=float(run.misses[decode].sum()) * machine.copy_s / n_tokens,
        device_s=machine.layer_s * len(run.facts.layers),
        token_s=float(token_seconds(run, machine)[decode].mean()),
    )


def timeline(run: CacheRun, machine: Machine) -> Iterator[Span]:
    """Every span in which a lane was busy, in the order of passes and layers; none is empty."""
    landed = waits(run, machine)
    start_s = 0.0
    for i, (reads_of, misses_of) in enumerate(zip(run.reads, run.misses, strict=True)):
        for row, layer in enumerate(run.facts.layers):
            n_reads, n_copies = int(reads_of[row]), int(misses_of[row])
            ready_s = start_s + float(landed[i, row])
            if n_reads:
                end_s = start_s + n_reads * machine.read_s
                yield Span(DRIVE, start_s, end_s, i, layer, n_reads)
            if n_copies:
                first_s = start_s + (machine.read_s if n_reads == n_copies else 0.0)
                yield Span(LINK, first_s, ready_s, i, layer, n_copies)
            start_s = ready_s + machine.layer_s
            if machine.layer_s:
                yield Span(DEVICE, ready_s, start_s, i, layer, n_copies)
