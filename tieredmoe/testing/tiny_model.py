"""What every maker of tiny models does: draw weights, tell what their bytes mean, write the files.

A maker adds the names, sizes and scales of its architecture. Functions and data, no base class: two
architectures share how a tensor is drawn, not the order in which theirs are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import attrs
import numpy as np
from gguf.constants import GGMLQuantizationType

from tieredmoe.errors import ConfigError
from tieredmoe.testing.tiny_blocks import encode, encoding_problem
from tieredmoe.testing.tiny_container import StoredTensor, shard_tensors, write_shards

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from numpy.typing import NDArray

    from tieredmoe.testing.tiny_tokenizer import TinyVocabulary

S = TypeVar("S")


@attrs.frozen(eq=False, repr=False)
class TinyWeights(Mapping[str, "NDArray[Any]"], Generic[S]):
    """What a made file means: float32 weights (int32 hash tables) by GGUF name, in numpy order.

    ``paths`` are the files, in the order of shards.
    """

    paths: tuple[Path, ...]
    shape: S
    tensors: Mapping[str, NDArray[Any]]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} tensors in {len(self.paths)} files)"


class DrawnTensor(NamedTuple):
    """A tensor as it is stored, and the values that a reader must decode from it."""

    stored: StoredTensor
    decoded: NDArray[Any]


class WeightDraw:
    """Draws tensors in the order of the calls, so that neither types nor shards change them.

    ``tensors`` has them by name, in that order; ``problems`` what could not be written.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tensors: dict[str, DrawnTensor] = {}
        self.problems: list[str] = []
        self._block_rng = np.random.default_rng([seed, 1])

    def matrix(
        self, name: str, *size: int, ggml_type: GGMLQuantizationType, gain: float = 1.0
    ) -> None:
        """Normal values of variance gain² / columns."""
        drawn = self.rng.standard_normal(size) * gain / np.sqrt(size[-1])
        self.weights(name, drawn, ggml_type=ggml_type)

    def vector(self, name: str, *size: int, mean: float = 0.0, std: float = 1.0) -> None:
        """Normal values stored as float32, of any number of axes."""
        drawn = mean + std * self.rng.standard_normal(size)
        self.weights(name, drawn, ggml_type=GGMLQuantizationType.F32)

    def weights(self, name: str, values: NDArray[Any], *, ggml_type: GGMLQuantizationType) -> None:
        """The given values as ``ggml_type`` has them; a problem if it cannot."""
        problem = encoding_problem(values.shape[-1], ggml_type)
        if problem is not None:
            self.problems.append(f"{name}: {problem}")
            return
        data, decoded = encode(values.astype(np.float32), ggml_type, self._block_rng)
        self.tensors[name] = DrawnTensor(StoredTensor(name, data, ggml_type), decoded)

    def integers(self, name: str, values: NDArray[Any]) -> None:
        """The given values as int32."""
        kept = values.astype(np.int32)
        self.tensors[name] = DrawnTensor(
            StoredTensor(name, kept.view(np.uint8), GGMLQuantizationType.I32), kept
        )


def require_vocabulary_size(tokenizer: TinyVocabulary | None, vocab_size: int) -> None:
    """Raise ``ConfigError`` if the tokenizer does not have exactly ``vocab_size`` tokens."""
    if tokenizer is not None and len(tokenizer.tokens) != vocab_size:
        raise ConfigError(
            f"a tokenizer of {len(tokenizer.tokens)} tokens for a vocab_size of {vocab_size}"
        )


def write_model(
    path: Path,
    drawn: Mapping[str, DrawnTensor],
    shape: S,
    *,
    architecture: str,
    metadata: Mapping[str, object],
    n_shards: int,
    alignment: int,
    drop_keys: Collection[str],
    drop_tensors: Collection[str],
    n_tensors_claimed: int | None = None,
) -> TinyWeights[S]:
    """Write ``drawn`` without what is to be dropped, as ``write_shards`` does, and tell of it."""
    kept = {name: tensor for name, tensor in drawn.items() if name not in drop_tensors}
    paths = write_shards(
        path,
        architecture=architecture,
        metadata={key: value for key, value in metadata.items() if key not in drop_keys},
        shards=shard_tensors([tensor.stored for tensor in kept.values()], n_shards),
        alignment=alignment,
        n_tensors_claimed=n_tensors_claimed,
    )
    return TinyWeights(paths, shape, {name: tensor.decoded for name, tensor in kept.items()})
