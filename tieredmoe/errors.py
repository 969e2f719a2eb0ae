"""Every exception of the library, in one file.

A message gives the fact and the way out. Foreign errors (``OSError``, ``json`` errors…) are wrapped
once, at the edge where they enter, with ``raise … from``; nothing else is caught.
"""

from __future__ import annotations

import os
from errno import EBADMSG, errorcode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tieredmoe.spec import ExpertKey


class TieredMoEError(Exception):
    """Base of every error that the world, not a bug of ours, can cause.

    It can be copied and pickled (engines send errors from one process to another), and then has its
    message and its attributes, not its cause and its traceback.
    """

    def __reduce__(self) -> tuple[object, ...]:
        # By default the class is called with ``args``, which are not what it is made of.
        return _remade, (type(self), self.args, vars(self))


class ConfigError(TieredMoEError, ValueError):
    """A configuration is wrong; the message lists every problem found, not just the first."""


class GGUFError(TieredMoEError, ValueError):
    """A GGUF file or set of shards cannot be used; the message names the file and all ``facts``."""

    def __init__(self, path: Path | str, *facts: str) -> None:
        self.path = path
        self.facts = facts
        self.fact = "; ".join(facts)
        super().__init__(f"{path}: {self.fact}")


class MetadataError(TieredMoEError, ValueError):
    """Model metadata is missing or contradictory; the message lists every key concerned."""


class UnsupportedModelError(TieredMoEError, ValueError):
    """The file is sound, but its architecture or a tensor type has no adapter or kernel here."""


class PackError(TieredMoEError, ValueError):
    """An expert pack cannot be written, opened or trusted; the message names file and fact."""

    def __init__(self, path: Path | str, fact: str) -> None:
        self.path = path
        self.fact = fact
        super().__init__(f"{path}: {fact}")


class NotAModelError(PackError):
    """What is at a path has no form of a model; what has one and is damaged is a ``PackError``."""


class TraceError(TieredMoEError, ValueError):
    """A routing trace cannot be read, written or believed; the message names where and what."""

    def __init__(self, path: Path | str, fact: str) -> None:
        self.path = path
        self.fact = fact
        super().__init__(f"{path}: {fact}")


class BudgetError(TieredMoEError, ValueError):
    """A memory budget is smaller than the least that works; the message carries the numbers."""


class WorkingSetTooLargeError(TieredMoEError, ValueError):
    """``acquire`` was asked for more distinct experts than the tier has slots; use ``stream``."""

    def __init__(self, *, n_wanted: int, n_slots: int, n_held: int = 0) -> None:
        self.n_wanted = n_wanted
        self.n_slots = n_slots
        self.n_held = n_held
        held = f", {n_held} of them held by tasks that ask for more" if n_held else ""
        way_out = "release before asking for more, or " if n_held else ""
        super().__init__(
            f"acquire of {n_wanted} distinct experts cannot fit a tier of {n_slots} slots{held}; "
            f"{way_out}use hierarchy.stream(), which serves a set of any size in waves"
        )


class QueueFullError(TieredMoEError, RuntimeError):
    """As many acquires wait for slots as may; this one was refused at once and changed nothing."""

    def __init__(self, *, waiting_max: int) -> None:
        self.waiting_max = waiting_max
        super().__init__(
            f"{waiting_max} acquires wait for slots of the tier already, which is the limit: "
            "release leases sooner, run fewer requests side by side, or raise waiting_max"
        )


class ReadError(TieredMoEError, OSError):
    """One read failed for good: path, offset, length and errno are attributes and in the text.

    ``kind`` is what it is counted as: by default the name of ``errno``, or "eof" for errno 0.
    """

    def __init__(
        self,
        *,
        path: Path | str,
        offset: int,
        nbytes: int,
        errno: int,
        fact: str,
        kind: str | None = None,
    ) -> None:
        code = errorcode.get(errno, str(errno)) if errno else "eof"
        name = f"{code}: {os.strerror(errno)}" if errno else "unexpected end of file"
        super().__init__(
            errno, f"{path}: read of {nbytes} bytes at offset {offset}: {fact} ({name})"
        )
        self.kind = kind or code
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.fact = fact

    def __str__(self) -> str:
        return str(self.args[1])


class DigestMismatchError(ReadError):
    """An expert's bytes are not those that were packed; range and role are the first wrong slab's.

    Its errno is EBADMSG, which is what Linux's file systems answer when their own checksums fail.
    """

    def __init__(
        self, *, path: Path | str, offset: int, nbytes: int, key: ExpertKey, role: str
    ) -> None:
        fact = f"the {role} matrix of layer {key.layer}, expert {key.expert} has another digest"
        super().__init__(
            path=path,
            offset=offset,
            nbytes=nbytes,
            errno=EBADMSG,
            fact=f"{fact}; `tieredmoe pack verify` lists all damage",
            kind="digest",
        )
        self.key = key
        self.role = role


class ExpertLoadError(TieredMoEError, RuntimeError):
    """An expert could not be brought in; nothing of it is resident and the next acquire retries.

    ``__cause__`` is the failed read.
    """

    def __init__(self, key: ExpertKey, cause: BaseException) -> None:
        self.key = key
        super().__init__(f"layer {key.layer}, expert {key.expert} could not be loaded: {cause}")
        self.__cause__ = cause


class DirectIOUnavailableError(TieredMoEError, RuntimeError):
    """Direct I/O cannot be had on this path and the caller did not ask for the page cache."""

    def __init__(self, path: Path | str, reason: str, hint: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: no direct I/O ({reason}); {hint}")


class BackendUnavailableError(TieredMoEError, RuntimeError):
    """A read backend cannot be had on this machine; ``reason`` is a code, the text says what to do.

    ``DirectIOUnavailableError`` is about one path, this about the process.
    """

    def __init__(self, backend: str, reason: str, hint: str) -> None:
        self.backend = backend
        self.reason = reason
        super().__init__(f"the backend {backend!r} cannot be had here ({reason}): {hint}")


class DeviceError(TieredMoEError, RuntimeError):
    """A call of a device's driver failed; ``code`` is the driver's number for it."""

    def __init__(self, call: str, code: int, name: str) -> None:
        self.call = call
        self.code = code
        super().__init__(f"the GPU's driver refused {call}: {name} ({code})")


class ClosedError(TieredMoEError, RuntimeError):
    """The hierarchy, tier or backend was closed before or while the call was waiting.

    A backend is closed, too, in a child of the process that opened it.
    """


class DroppedError(ClosedError):
    """A transfer that nobody waits for has made way for demand.

    No caller meets it: a copy that was to follow such a transfer waits for its next turn.
    """


class PolicyFileError(TieredMoEError, ValueError):
    """A file of what a policy remembers is something else, another model's, damaged, or later."""


class TokenizerError(TieredMoEError, ValueError):
    """A GGUF's tokenizer cannot be built, or it has none and text was given."""


class LogitsError(TieredMoEError, ArithmeticError):
    """Logits cannot be sampled: not finite, or not one vector; no token was chosen."""


class PromptTooLongError(TieredMoEError, ValueError):
    """A prompt leaves no room in its context; the message says whether a larger one can be had.

    ``n_context_max`` is the model's own limit, where it is known.
    """

    def __init__(self, *, n_prompt: int, n_context: int, n_context_max: int | None = None) -> None:
        self.n_prompt = n_prompt
        self.n_context = n_context
        self.n_context_max = n_context_max
        if n_context_max is None:
            way_out = "raise n_context or shorten the prompt"
        elif n_prompt < n_context_max:
            way_out = f"raise n_context (it may go up to {n_context_max}) or shorten the prompt"
        else:
            way_out = f"shorten the prompt, the model's own limit is {n_context_max}"
        super().__init__(
            f"a prompt of {n_prompt} tokens does not fit a context of {n_context}; {way_out}"
        )


def _remade(
    kind: type[TieredMoEError], args: tuple[object, ...], attributes: Mapping[str, object]
) -> TieredMoEError:
    error = kind.__new__(kind)
    # Not the class's own ``__init__``, but the one that sets ``args``, and ``errno`` from them.
    (OSError if isinstance(error, OSError) else Exception).__init__(error, *args)
    vars(error).update(attributes)
    return error


def raise_config_problems(what: str, problems: Sequence[str]) -> None:
    """Raise one ``ConfigError`` listing all ``problems``; return if there are none."""
    if problems:
        raise ConfigError(f"{what}: " + "; ".join(problems))
