"""Replays of routing traces, without asyncio, torch or a disk."""

from tieredmoe.sim.replay import Replayed, Step, replay, replay_steps

__all__ = ["Replayed", "Step", "replay", "replay_steps"]
