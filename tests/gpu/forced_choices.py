"""The choices of one run of a DeepSeek-V4, given to another run that rounds otherwise."""

from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from tieredmoe.adapters.deepseek_v4.indexer import Indexer
from tieredmoe.adapters.deepseek_v4.moe import ScoreRouter
from tieredmoe.adapters.deepseek_v4.past import SparsePast
from tieredmoe.adapters.routing import Routing, chosen_weights


class Choice(NamedTuple):
    chosen: frozenset
    gap: float
    """By how much the last one chosen is ahead of the first one not chosen."""


class Choices:
    """What routers and indexers chose, by (kind, layer, position)."""

    def __init__(self, forced=None):
        self.made = {}
        self.order = {}
        self._forced = forced

    def note(self, key, ids, scores):
        """Keep the choice of ``ids`` by ``scores``; returns the ids to go on with."""
        ranked = scores.float().sort(descending=True).values
        n = len(ids)
        gap = (ranked[n - 1] - ranked[n]).item() if len(ranked) > n else float("inf")
        self.made[key] = Choice(frozenset(ids.tolist()), gap)
        self.order[key] = ids.cpu()
        forced = self._forced.order.get(key) if self._forced else None
        return ids if forced is None else forced.to(ids.device)

    def n_clear(self, bound):
        """How many choices scores that are off by ``bound`` cannot change."""
        return sum(choice.gap > 2 * bound for choice in self.made.values())

    def differences(self, other, bound):
        """The choices that ``other`` made otherwise though this one's gap exceeds 2 ``bound``."""
        return {
            key
            for key, choice in self.made.items()
            if choice.gap > 2 * bound and other.made[key].chosen != choice.chosen
        }


@contextmanager
def watched(model, choices):
    """All choices of ``model``, functional and in steps, go through ``choices``."""
    layers = {}
    for n, layer in enumerate(model._layers):
        layers[layer.experts.router] = n
        if layer.attention.past is not None and layer.attention.past.indexer is not None:
            layers[layer.attention.past.indexer] = n
            layers[layer.attention.past.indexer.compressor] = n
    operations = type(model.new_decode_step(64)._run)
    seen, first = dict.fromkeys(layers, 0), [0]

    def taken(router, logits, ids):
        scores = torch.nn.functional.softplus(logits).sqrt()
        return Routing(ids, chosen_weights(scores, ids, scale=router.scale)), scores + router.bias

    choose, pick, block_keys = ScoreRouter.choose, Indexer.pick, SparsePast.block_keys
    route, step_pick = operations.route, operations.pick

    def watched_choose(router, logits, tokens):
        start = seen[router]
        seen[router] += len(tokens)
        routing = choose(router, logits, tokens)
        _, scores = taken(router, logits, routing.ids)
        ids = [
            choices.note(("router", layers[router], start + t), row, scores[t])
            for t, row in enumerate(routing.ids)
        ]
        return taken(router, logits, torch.stack(ids))[0]

    def watched_block_keys(past, chunk, states):
        keys = block_keys(past, chunk, states)

        def at(a, b):
            first[0] = chunk.start + a
            return keys(a, b)

        return at

    def watched_pick(indexer, queries, keys, visible):
        picks = pick(indexer, queries, keys, visible)
        for t in range(len(picks)):
            position = first[0] + t
            n = (position + 1) // indexer.compressor.ratio
            if n > indexer.n_picks:
                scores = queries.weights[t] @ (queries.q[t] @ keys[:n].T).relu()
                picks[t] = choices.note(("indexer", layers[indexer], position), picks[t], scores)
        return picks

    def watched_route(run, router, logits, moment, routing):
        if not isinstance(router, ScoreRouter):
            return route(run, router, logits, moment, routing)
        with pytest.MonkeyPatch.context() as plain:
            plain.setattr(ScoreRouter, "choose", choose)
            route(run, router, logits, moment, routing)
        position = moment.position.item()
        key = ("router", layers[router], position)
        seen[router] = position + 1  # a prompt that follows goes on there
        _, scores = taken(router, logits, routing.ids)
        forced, _ = taken(router, logits, choices.note(key, routing.ids[0], scores[0])[None])
        routing.ids.copy_(forced.ids)
        routing.weights.copy_(forced.weights)
        return None

    def watched_step_pick(run, q, weights, static, moment, picks):
        step_pick(run, q, weights, static, moment, picks)
        position = moment.position.item()
        n = (position + 1) // static.compressor.ratio
        if n > len(picks):
            scale = (q.shape[0] * q.shape[1]) ** -0.5
            scores = ((weights * scale) @ (q @ static.rows[:n].T).relu())[0]
            key = ("indexer", layers[static.compressor], position)
            picks.copy_(choices.note(key, picks, scores))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ScoreRouter, "choose", watched_choose)
        patched.setattr(Indexer, "pick", watched_pick)
        patched.setattr(SparsePast, "block_keys", watched_block_keys)
        patched.setattr(operations, "route", watched_route)
        patched.setattr(operations, "pick", watched_step_pick)
        yield choices
