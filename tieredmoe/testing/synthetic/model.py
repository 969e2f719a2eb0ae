"""Makes models of real dimensions with few layers: real record sizes, types and kernel shapes.

The weights mean nothing, but nothing else is made up: per layer, a run of such a model reads,
copies and computes what the published model does, out of files that fit a small drive.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np

from tieredmoe.errors import ConfigError, raise_config_problems
from tieredmoe.testing.synthetic.files import PlannedFile, plan_files, require_room, write_files
from tieredmoe.testing.synthetic.published import PUBLISHED
from tieredmoe.testing.tiny_tokenizer import TINY_VOCABULARY_MIN, tiny_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tieredmoe.testing.synthetic.published import ModelName
    from tieredmoe.testing.synthetic.tensors import SyntheticTensor

_N_LAYERS_MAX = 128
_N_SHARDS_MAX = 64
"""No model that could be made here needs more; every tensor list is longer."""


@attrs.frozen(kw_only=True)
class SyntheticModel:
    """What was made; ``expert_nbytes`` is one expert's three roles together.

    ``dense_nbytes`` are those of all tensors but the routed experts'.
    """

    paths: tuple[Path, ...]
    n_layers: int
    n_experts: int
    nbytes: int
    expert_nbytes: int
    dense_nbytes: int


def make_synthetic(
    model: ModelName,
    path: Path | str,
    *,
    n_layers: int,
    n_experts: int | None = None,
    vocab_size: int | None = None,
    seed: int = 0,
    n_shards: int = 1,
    tokenizer: Literal["tiny"] | None = "tiny",
    progress: Callable[[int, int], None] | None = None,
) -> SyntheticModel:
    """Write a GGUF of the published widths, head counts and types with ``n_layers`` layers.

    ``n_experts`` and ``vocab_size`` are the published ones by default and may be fewer; all else
    stays real. The same arguments give the same bytes, every one of them written and none
    compressible. With ``n_shards`` > 1 the files are ``STEM-00001-of-0000N.gguf`` beside ``path``,
    of about equal size. ``tokenizer=None`` is for a model that takes ids only and never stops by
    itself. ``progress`` is called with (bytes done, bytes in all), from several threads but not at
    once.

    How routing is skewed: see ``RoutingStatistics``. Raises, before any file is written,
    ``ConfigError`` with every setting that is wrong and ``GGUFError`` with the numbers where the
    drive has too little room; later ``GGUFError`` where a file cannot be written. None of the
    files is left then, nor after an interruption.
    """
    published = PUBLISHED.get(model)
    if published is None:
        known = ", ".join(PUBLISHED)
        raise ConfigError(f"make_synthetic: model is {model!r}, not one of {known}")
    n_experts = published.n_experts if n_experts is None else n_experts
    vocab_size = published.vocab_size if vocab_size is None else vocab_size
    limits = [
        ("n_layers", n_layers, published.n_layers_min, _N_LAYERS_MAX),
        ("n_experts", n_experts, published.top_k, published.n_experts),
        ("vocab_size", vocab_size, TINY_VOCABULARY_MIN, published.vocab_size),
        ("n_shards", n_shards, 1, _N_SHARDS_MAX),
        ("seed", seed, 0, 2**63 - 1),
    ]
    raise_config_problems(
        "make_synthetic",
        [
            f"{name} is {value}, it must be from {least} to {most}"
            for name, value, least, most in limits
            if not least <= value <= most
        ],
    )
    vocabulary = tiny_vocabulary(vocab_size, published.family) if tokenizer else None
    tensors, metadata = published.plan(n_layers, n_experts, vocab_size, vocabulary)
    metadata |= {
        "general.architecture": published.architecture,
        "general.name": f"synthetic {model} of {n_layers} layers",
    }
    path = Path(path)
    files = _files(path, tensors, metadata, n_shards)
    nbytes = sum(file.nbytes for file in files)
    require_room(path.parent, nbytes)
    write_files(files, seed=seed, report=_Total(nbytes, progress))
    expert_tensors = [tensor for tensor in tensors if tensor.is_expert]
    experts_nbytes = sum(tensor.nbytes for tensor in expert_tensors)
    n_records = len(expert_tensors) // 3 * n_experts
    return SyntheticModel(
        paths=tuple(file.path for file in files),
        n_layers=n_layers,
        n_experts=n_experts,
        nbytes=nbytes,
        expert_nbytes=experts_nbytes // n_records,
        dense_nbytes=sum(tensor.nbytes for tensor in tensors) - experts_nbytes,
    )


def _files(
    path: Path,
    tensors: Sequence[SyntheticTensor],
    metadata: Mapping[str, object],
    n_shards: int,
) -> tuple[PlannedFile, ...]:
    """As llama-gguf-split does: only the first shard carries the model's metadata."""
    if n_shards == 1:
        return plan_files([path], [tensors], [metadata])
    paths = [
        path.with_name(f"{path.stem}-{i + 1:05d}-of-{n_shards:05d}.gguf") for i in range(n_shards)
    ]
    pairs = [
        {
            **(metadata if index == 0 else {}),
            "split.no": np.uint16(index),
            "split.count": np.uint16(n_shards),
            "split.tensors.count": np.int32(len(tensors)),
        }
        for index in range(n_shards)
    ]
    return plan_files(paths, _shards(tensors, n_shards), pairs)


class _Total:
    """Adds up what threads report, and hands on the sum."""

    def __init__(self, n_total: int, progress: Callable[[int, int], None] | None) -> None:
        self._n_total = n_total
        self._n_done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._n_done += nbytes
            if self._progress is not None:
                self._progress(self._n_done, self._n_total)


def _shards(
    tensors: Sequence[SyntheticTensor], n_shards: int
) -> tuple[tuple[SyntheticTensor, ...], ...]:
    """Runs of about equal size, none of them empty."""
    ends = np.cumsum([tensor.nbytes for tensor in tensors])
    cuts = [0]
    for i in range(1, n_shards):
        cut = int(np.searchsorted(ends, ends[-1] * i / n_shards)) + 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(tensors) - n_shards + i))
    cuts.append(len(tensors))
    return tuple(tuple(tensors[cuts[i] : cuts[i + 1]]) for i in range(n_shards))
