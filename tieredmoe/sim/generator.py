"""Synthetic routing with the statistics of a real model, for models that no trace is known of.

A token's router logits in layer l are ``W_l h_l + skew × b_l``: ``W_l`` and ``b_l`` are random and
fixed, ``h`` is a unit mixture of what a hidden state carries::

    topic       fixed for ``topic_tokens`` tokens, then another
    context     two AR(1) processes, with half-lives of 20 and of 2.5 tokens
    token       the embedding of the token itself, drawn from a Zipf vocabulary (exponent 1.05)
    noise       new for each token and layer

and turns by ``drift`` radians from layer to layer, as a residual stream does. The first layers may
be hash-routed instead: their experts are a fixed random function of the token (DeepSeek-V4). The
shares of the parts are the calibration: ``KIMI_LINEAR`` was found by random search against the
published trace of Kimi-Linear-48B (300 tokens); ``calibration`` shows how near it is.

It is a stand-in: what it says of policies that look at the router's probabilities, or of changes of
topic, is as good as this picture of a hidden state. Rejected: independent draws from a fitted
popularity (no overlap between tokens beyond chance); a Markov chain over sets of experts (as many
parameters as the trace has numbers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from tieredmoe.sim.locality import experts_touched, lag_overlap, top_share
from tieredmoe.sim.routing_trace import DECODE, ModelFacts, RoutingTrace, id_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_WIDTH = 64
_VOCABULARY = 8192
_ZIPF = 1.05
_SLOW_HALF_LIFE_TOKENS = 20
_FAST_HALF_LIFE_TOKENS = 2.5
CALIBRATION_LAGS = (1, 2, 4, 8, 16, 32)


@attrs.frozen
class Routing:
    """How much of a hidden state each part is (their squares are brought to a sum of 1), and more.

    ``skew`` is the spread of the fixed part of the logits over that of the changing part, ``gain``
    the sharpness of the router's softmax (of gate weights, not of which experts are chosen).
    """

    topic: float
    slow: float
    fast: float
    token: float
    noise: float
    skew: float
    drift: float = 0.2
    gain: float = 2.0
    n_topics: int = 8
    topic_tokens: int = 150


KIMI_LINEAR = Routing(topic=0.455, slow=0.479, fast=0.831, token=0.674, noise=0.357, skew=0.613)
"""Fits the published 300 tokens of Kimi-Linear-48B."""


def synthetic_trace(
    facts: ModelFacts,
    *,
    n_tokens: int,
    routing: Routing = KIMI_LINEAR,
    n_hash_layers: int = 0,
    probabilities: bool = False,
    seed: int = 0,
) -> RoutingTrace:
    """``n_tokens`` decoded tokens of a model of these ``facts``; the same for the same arguments.

    The first ``n_hash_layers`` are routed by the token's id. With ``probabilities`` the whole
    router's are in the trace. Takes about a second per 2 million router logits.
    """
    rng = np.random.default_rng(seed)
    n_layers, n_experts, k = len(facts.layers), facts.n_experts, facts.top_k
    tokens = _zipf_tokens(rng, n_tokens)
    hidden = _hidden_states(rng, tokens, routing)
    turn = _rotation(rng, routing.drift)
    noise_share = routing.noise / _norm(routing)
    experts = np.empty((n_tokens, n_layers, k), id_type(n_experts))
    weights = np.empty((n_tokens, n_layers, k), np.float16)
    kept = np.empty((n_tokens, n_layers, n_experts), np.float16) if probabilities else None
    for row in range(n_layers):
        gate = rng.standard_normal((_WIDTH, n_experts))
        bias = routing.skew * rng.standard_normal(n_experts)
        noise = noise_share / np.sqrt(_WIDTH) * rng.standard_normal((n_tokens, _WIDTH))
        logits = (hidden + noise) @ gate + bias
        if row < n_hash_layers:
            logits = rng.standard_normal((_VOCABULARY, n_experts))[tokens]
        hidden = hidden @ turn
        p = np.exp(routing.gain * (logits - logits.max(axis=1, keepdims=True)))
        p /= p.sum(axis=1, keepdims=True)
        chosen = np.argsort(-logits, axis=1)[:, :k]
        of_chosen = np.take_along_axis(p, chosen, axis=1)
        experts[:, row] = chosen
        weights[:, row] = of_chosen / of_chosen.sum(axis=1, keepdims=True)
        if kept is not None:
            kept[:, row] = p
    return RoutingTrace(
        facts=facts,
        experts=experts,
        phase=np.full(n_tokens, DECODE, np.int8),
        requests=np.zeros(n_tokens, np.int32),
        passes=np.arange(n_tokens, dtype=np.int32),
        weights=weights,
        probabilities=kept,
        source=f"synthetic {facts.name}, seed {seed}",
    )


def calibration(trace: RoutingTrace) -> Mapping[str, float]:
    """The numbers that the generator is fitted by, of any trace.

    Overlap at ``CALIBRATION_LAGS``, the mean number of experts touched per layer, and the share of
    uses that the most used sixteenth of them has.
    """
    overlaps = lag_overlap(trace, CALIBRATION_LAGS)
    return {
        **{f"overlap {lag}": float(o) for lag, o in zip(CALIBRATION_LAGS, overlaps, strict=True)},
        "experts touched": float(experts_touched(trace).mean()),
        "top 1/16 share": top_share(trace),
    }


def _norm(routing: Routing) -> float:
    parts = (routing.topic, routing.slow, routing.fast, routing.token, routing.noise)
    return float(np.sqrt(sum(part**2 for part in parts)))


def _zipf_tokens(rng: np.random.Generator, n_tokens: int) -> NDArray[np.intp]:
    popularity = np.arange(1, _VOCABULARY + 1) ** -_ZIPF
    return rng.choice(_VOCABULARY, n_tokens, p=popularity / popularity.sum())


def _hidden_states(
    rng: np.random.Generator, tokens: NDArray[np.intp], routing: Routing
) -> NDArray[np.float64]:
    """What enters the first layer but its noise, [T, width]; of length 1 together with it."""
    n_tokens = len(tokens)
    topics = rng.standard_normal((routing.n_topics, _WIDTH))
    which = rng.integers(routing.n_topics, size=n_tokens // routing.topic_tokens + 1)
    parts = (
        (routing.topic, topics[np.repeat(which, routing.topic_tokens)[:n_tokens]]),
        (routing.slow, _wandering(rng, n_tokens, _SLOW_HALF_LIFE_TOKENS)),
        (routing.fast, _wandering(rng, n_tokens, _FAST_HALF_LIFE_TOKENS)),
        (routing.token, rng.standard_normal((_VOCABULARY, _WIDTH))[tokens]),
    )
    mixed: NDArray[np.float64] = sum(
        (share * part for share, part in parts), np.zeros((n_tokens, _WIDTH))
    )
    mixed /= _norm(routing) * np.sqrt(_WIDTH)
    return mixed


def _wandering(
    rng: np.random.Generator, n_tokens: int, half_life_tokens: float
) -> NDArray[np.float64]:
    """A stationary AR(1) process of unit variance in each dimension."""
    keep = 2 ** (-1 / half_life_tokens)
    states = rng.standard_normal((n_tokens, _WIDTH))
    for t in range(1, n_tokens):
        states[t] = keep * states[t - 1] + np.sqrt(1 - keep**2) * states[t]
    return states


def _rotation(rng: np.random.Generator, angle: float) -> NDArray[np.float64]:
    """A rotation that turns by ``angle`` in random planes."""
    planes, _ = np.linalg.qr(rng.standard_normal((_WIDTH, _WIDTH)))
    turned = np.kron(
        np.eye(_WIDTH // 2), [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    )
    return np.asarray(planes @ turned @ planes.T)
