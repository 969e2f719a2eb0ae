"""Where a suspended task waits: the coroutines from the outermost in, to the future it awaits.

``Task.get_stack`` shows only the outermost frame of a suspended task, which in a deadlock is the
one thing already known.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any

_DEPTH_MAX = 50


def describe_task(task: asyncio.Task[Any]) -> str:
    """One line: the task's name, its frames from the innermost out, and what it waits for."""
    frames: list[str] = []
    awaited: object = task.get_coro()
    for _ in range(_DEPTH_MAX):
        frame, inner = _look_into(awaited)
        if frame is not None:
            code = frame.f_code
            frames.append(f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}")
        if inner is None:
            break
        awaited = inner
    where = " < ".join(reversed(frames)) or "its end"
    what = f", on {awaited!r}" if isinstance(awaited, asyncio.Future) else ""
    return f"{task.get_name()} at {where}{what}"


_LINKS: tuple[tuple[type, str, str], ...] = (
    (CoroutineType, "cr_frame", "cr_await"),
    (AsyncGeneratorType, "ag_frame", "ag_await"),
    (GeneratorType, "gi_frame", "gi_yieldfrom"),
)
_ENDS = (asyncio.Future, CoroutineType, AsyncGeneratorType, GeneratorType)


def _look_into(awaited: object) -> tuple[FrameType | None, object | None]:
    """The frame of a suspended object and what it awaits; wrappers have an inside only."""
    for kind, frame, inner in _LINKS:
        if isinstance(awaited, kind):
            return getattr(awaited, frame), getattr(awaited, inner)
    if isinstance(awaited, asyncio.Future):
        return None, None
    # A future's iterator and an asynchronous generator's asend() show what they hold to the garbage
    # collector only.
    return None, next((it for it in gc.get_referents(awaited) if isinstance(it, _ENDS)), None)
