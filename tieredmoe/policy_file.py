"""What a policy remembers, in a file: saved when a run ends, recalled when the next begins.

JSON, replaced at once. What routing a file is of is checked by what routing depends on: the
architecture, its routed layers, experts, top-k and the shapes of experts. Quantisation is not part
of that, so a file serves every pack of one model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieredmoe.errors import PolicyFileError
from tieredmoe.policies import UseCounts
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from tieredmoe.residency import Residency
    from tieredmoe.spec import MoESpec

logger = logging.getLogger(__name__)

FORMAT = "tieredmoe policy"
VERSION = 1
_NBYTES_MAX = 2**26


class PolicyMemory:
    """What the policy of ``residency`` remembers, from a file and into files.

    It begins with ``recalled``. What it has learnt goes to ``path``, if given, at the ``close``.
    """

    def __init__(
        self,
        residency: Residency,
        spec: MoESpec,
        *,
        path: Path | None,
        recalled: UseCounts | None,
    ) -> None:
        self._residency = residency
        self._spec = spec
        self._path = path
        self.keys_by_heat = [] if recalled is None else recalled.by_heat()
        """The experts that earlier runs used, the one used most first."""
        if recalled is not None:
            residency.recall(recalled)

    async def save(self, path: Path) -> None:
        """Replace the file ``path`` at once; cancelled, it stops waiting, not writing.

        Raises ``PolicyFileError``, also if the policy remembers nothing between runs.
        """
        counts = self._residency.use_counts()
        if counts is None:
            raise PolicyFileError(
                f"{path}: this policy remembers nothing between runs; lrfu and next_use do"
            )
        await asyncio.to_thread(save_use_counts, path, self._spec, counts)

    async def close(self) -> None:
        """Save what there is to ``path``; that it cannot be written must not fail a close."""
        counts = self._residency.use_counts()
        if self._path is None or counts is None or not counts.uses:
            return
        try:
            await asyncio.to_thread(save_use_counts, self._path, self._spec, counts)
        except PolicyFileError as error:
            logger.warning("what the policy learnt is not saved: %s", error)


def load_use_counts(path: Path, spec: MoESpec) -> UseCounts | None:
    """The counts in ``path``, of the model with this ``spec``; None if there is no such file.

    Raises ``PolicyFileError`` for a file that holds something else, is another model's, damaged, or
    of a later version.
    """
    document = _read(path)
    if document is None:
        return None
    if document.get("model") != _model(spec):
        of = document.get("model")
        whose = of.get("architecture") if isinstance(of, dict) else of
        raise PolicyFileError(
            f"{path} is of another model ({whose}) than this {spec.architecture}; name another file"
        )
    try:
        n_tokens = _number(document["n_tokens"])
        layers = document["uses"]
        uses = {}
        for layer in spec.layers:
            row = zip(range(spec.n_experts), layers[str(layer)], strict=True)
            uses.update({ExpertKey(layer, e): _number(n) for e, n in row if n})
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyFileError(f"{path} is damaged: {error!r}; remove it") from error
    return UseCounts(n_tokens, uses)


def save_use_counts(path: Path, spec: MoESpec, counts: UseCounts) -> None:
    """Replace the file ``path`` by ``counts`` at once; no reader sees half of one.

    Raises ``PolicyFileError`` where ``path`` holds anything but the same model's counts, and where
    it cannot be written.
    """
    load_use_counts(path, spec)
    uses = {
        str(layer): [
            round(counts.uses.get(ExpertKey(layer, expert), 0.0), 3)
            for expert in range(spec.n_experts)
        ]
        for layer in spec.layers
    }
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": _model(spec),
        "n_tokens": round(counts.n_tokens, 3),
        "uses": uses,
    }
    real = Path(os.path.realpath(path))  # a link is followed
    partial = real.with_name(f"{real.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_text(json.dumps(document))
            partial.replace(real)
        except BaseException:
            with contextlib.suppress(OSError):  # it may not be there
                partial.unlink()
            raise
    except OSError as error:
        raise PolicyFileError(f"{path} cannot be written: {error}") from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > _NBYTES_MAX:
            raise PolicyFileError(f"{path} is no policy file; name another")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise PolicyFileError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PolicyFileError(f"{path} is no policy file; name another") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PolicyFileError(f"{path} is no policy file; name another")
    version = document.get("version")
    if version != VERSION:
        raise PolicyFileError(
            f"{path} is of version {version!r}, and this tieredmoe reads version {VERSION}; "
            "use the tieredmoe that wrote it, or name another file"
        )
    return document


def _model(spec: MoESpec) -> dict[str, object]:
    return {
        "architecture": spec.architecture,
        "n_experts": spec.n_experts,
        "top_k": spec.top_k,
        "layers": list(spec.layers),
        "shapes": {role.name: list(role.shape) for role in spec.layouts[spec.layers[0]].roles},
    }


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return float(value)
