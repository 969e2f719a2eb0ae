"""Memory as the tiers see it: arenas cut into slots, fences, and the pool of huge host pages."""

from tieredmoe.memory.fences import PASSED, JoinedFence, PassedFence, joined
from tieredmoe.memory.host import HostArena, HostArenaSlot
from tieredmoe.memory.pages import HostPool, HostRegion
from tieredmoe.memory.protocol import Arena, Fence, HostSlot, Part, Slot

__all__ = [
    "PASSED",
    "Arena",
    "Fence",
    "HostArena",
    "HostArenaSlot",
    "HostPool",
    "HostRegion",
    "HostSlot",
    "JoinedFence",
    "Part",
    "PassedFence",
    "Slot",
    "joined",
]
