"""What is known of each published model before a synthetic one like it is planned."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from tieredmoe.testing import tiny_gguf, tiny_kimi
from tieredmoe.testing.synthetic.deepseek_v4 import deepseek_v4_shape, deepseek_v4_tensors
from tieredmoe.testing.synthetic.kimi_k3 import kimi_k3_shape, kimi_k3_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tieredmoe.testing.synthetic.tensors import SyntheticTensor
    from tieredmoe.testing.tiny_tokenizer import Family, TinyVocabulary

ModelName = Literal["deepseek-v4-flash", "kimi-k3"]
"""The models that can be made."""


class Planned(NamedTuple):
    """Every tensor in a file's order, and the metadata without the architecture's name."""

    tensors: tuple[SyntheticTensor, ...]
    metadata: dict[str, object]


class Published(NamedTuple):
    """A published model: its sizes that may be made smaller, and what plans one of its kind.

    ``plan`` takes the numbers of layers, experts and vocabulary entries, and the vocabulary.
    """

    architecture: str
    family: Family
    n_layers_min: int
    n_experts: int
    top_k: int
    vocab_size: int
    plan: Callable[[int, int, int, TinyVocabulary | None], Planned]


def _deepseek_v4(
    n_layers: int, n_experts: int, vocab_size: int, vocabulary: TinyVocabulary | None
) -> Planned:
    shape = deepseek_v4_shape(n_layers=n_layers, n_experts=n_experts, vocab_size=vocab_size)
    tensors = tuple(deepseek_v4_tensors(shape))
    return Planned(tensors, tiny_gguf.model_metadata(shape, vocabulary))


def _kimi_k3(
    n_layers: int, n_experts: int, vocab_size: int, vocabulary: TinyVocabulary | None
) -> Planned:
    shape = kimi_k3_shape(n_layers=n_layers, n_experts=n_experts, vocab_size=vocab_size)
    return Planned(tuple(kimi_k3_tensors(shape)), tiny_kimi.model_metadata(shape, vocabulary))


PUBLISHED: Mapping[ModelName, Published] = MappingProxyType(
    {
        "deepseek-v4-flash": Published(
            tiny_gguf.ARCHITECTURE, "deepseek-v4", 1, 256, 6, 129280, _deepseek_v4
        ),
        # The first layer is dense: a second one has routed experts.
        "kimi-k3": Published(tiny_kimi.ARCHITECTURE, "kimi-k3", 2, 896, 16, 163840, _kimi_k3),
    }
)
"""The models that can be made."""
