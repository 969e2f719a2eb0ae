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

    async def run(self, layer, x, routing, activation, *, meanwhile):
        self._routed.setdefault(layer, []).append(routing)
        return await self._experts.run(layer, x, routing, activation, meanwhile=meanwhile)

    def routing(self, layer):
        """All ids, ascending for each token, and their weights: both [T, k]."""
        ids, weights = (torch.cat(parts) for parts in zip(*self._routed[layer], strict=True))
        order = ids.argsort(dim=1)
        return ids.gather(1, order), weights.gather(1, order)


def load(path):
    """The model in a GGUF and its experts."""
    return load_source(open_inventory(path))


def load_source(source, adapter=None):
    """The same from any source, by the adapter of its architecture if none is given."""
    adapter = adapter or adapter_for(source.metadata)
    return adapter.load(source, device=CPU), DenseExperts.load(source)


def run(model, experts, tokens, lengths=None):
    """The logits of ``tokens`` fed in chunks of ``lengths`` (at once if None)."""
    return go_on(model, experts, tokens, model.new_state(len(tokens)), lengths)


def go_on(model, experts, tokens, state, lengths=None):
    """The same, from ``state`` on."""

    async def main():
        chunks = tokens.split(lengths or [len(tokens)])
        return torch.cat([await model.forward(c, state, experts, logits="all") for c in chunks])

    return asyncio.run(main())


def cut_at(n_tokens, *boundaries):
    """Chunk lengths whose boundaries are these."""
    edges = [0, *boundaries, n_tokens]
    return [b - a for a, b in itertools.pairwise(edges)]
