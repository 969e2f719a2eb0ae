"""Runs a model over a token sequence in chunks, and keeps what its routers chose."""

import asyncio
import itertools

import torch

from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.gguf import open_inventory

CPU = torch.device("cpu")


class Recorder:
    """An ``ExpertProvider`` that remembers every routing by layer, in the order of tokens."""

    def __init__(self, experts):
        self._experts = experts
        self._routed = {}

    @property
    def spec(self):
        return self._experts.spec

    def routed(self, layer, ids, weights):
        self._routed.setdefault(layer, []).append((ids, weights))

    def executed(self, layer, n_pairs):
        assert n_pairs == self._routed[layer][-1][0].numel()

    def stream(self, layer, experts):
        return self._experts.stream(layer, experts)

    def routing(self, layer):
        """All ids, ascending for each token, and their weights: both [T, k]."""
        ids, weights = (torch.cat(parts) for parts in zip(*self._routed[layer], strict=True))
        order = ids.argsort(dim=1)
        return ids.gather(1, order), weights.gather(1, order)


def load(path):
    """The model in a GGUF and its experts."""
    inventory = open_inventory(path)
    model = adapter_for(inventory.metadata).load(inventory, device=CPU)
    return model, DenseExperts.load(inventory)


def run(model, experts, tokens, lengths=None):
    """The logits of ``tokens`` fed in chunks of ``lengths`` (at once if None)."""

    async def main():
        state = model.new_state(len(tokens))
        chunks = tokens.split(lengths or [len(tokens)])
        return torch.cat([await model.forward(c, state, experts, logits="all") for c in chunks])

    return asyncio.run(main())


def cut_at(n_tokens, *boundaries):
    """Chunk lengths whose boundaries are these."""
    edges = [0, *boundaries, n_tokens]
    return [b - a for a, b in itertools.pairwise(edges)]
