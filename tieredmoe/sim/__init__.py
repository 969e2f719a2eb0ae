"""The laboratory: routing traces and their replay, without asyncio, torch or a disk."""

from tieredmoe.sim.belady import BeladyPolicy
from tieredmoe.sim.curves import hit_rate_curves
from tieredmoe.sim.foreign_trace import load_trace
from tieredmoe.sim.generator import synthetic_trace
from tieredmoe.sim.kept import replay_kept
from tieredmoe.sim.machine import Machine, rates
from tieredmoe.sim.replay import Replayed, Step, replay, replay_steps
from tieredmoe.sim.routing_trace import ModelFacts, RoutingTrace
from tieredmoe.sim.simulation import CacheRun, simulate
from tieredmoe.sim.trace_file import read_trace, write_trace
from tieredmoe.sim.trace_recorder import TraceRecorder

__all__ = [
    "BeladyPolicy",
    "CacheRun",
    "Machine",
    "ModelFacts",
    "Replayed",
    "RoutingTrace",
    "Step",
    "TraceRecorder",
    "hit_rate_curves",
    "load_trace",
    "rates",
    "read_trace",
    "replay",
    "replay_kept",
    "replay_steps",
    "simulate",
    "synthetic_trace",
    "write_trace",
]
