"""How often each eviction policy hits, on traces of real routing and on made-up ones.

    python benchmarks/policies.py [TRACE.npz ...] [--made-up] [--learning]

Prints, for each trace, the hits per lookup in % at several cache sizes (% of the experts) for each
policy, after its prefill if one was recorded, from an empty cache; then the means. ``belady`` knows
the future and is a bound; ``W`` is how many experts one token uses, in % of all. Without traces it
takes the slice that the tests use. With --made-up also: three kinds of routing that the policies
were not chosen by. With --learning also what ``next_use`` costs per step, and what it gains by
seeing the routers' probabilities.

A trace is an npz with ``expert`` [tokens, layers, k] (-1: not recorded), and if there is a prefill
``phase`` [tokens], 0 for its tokens, which are played as one union per layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from machine import describe_machine

from tieredmoe.policies import POLICIES, NextUsePolicy, choose_policy, make_policy
from tieredmoe.residency import Residency
from tieredmoe.sim import BeladyPolicy, Step, replay
from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tieredmoe.policies import EvictionPolicy

SHIPPED = Path(__file__).parents[1] / "tests/data/traces/olmoe-1b-7b_80_tokens.npz"
FRACTIONS = (0.05, 0.10, 0.14, 0.25)
COLUMNS = ("auto", *POLICIES, "belady")


class Trace(NamedTuple):
    """Routing to replay; ``probabilities`` [tokens, layers, experts] where they are known."""

    name: str
    prefill: list[Step]
    decode: list[Step]
    n_layers: int
    n_experts: int
    top_k: int
    probabilities: NDArray[np.float32] | None = None


def load(path: Path) -> Trace:
    """The trace in an npz."""
    with np.load(path) as arrays:
        experts = arrays["expert"]
        phase = arrays["phase"] if "phase" in arrays else np.ones(len(experts))
        meta = json.loads(str(arrays["meta"])) if "meta" in arrays else {}
    n_layers, top_k = experts.shape[1:]
    n_experts = meta.get("n_expert", 1 << int(experts.max()).bit_length())
    unions = [np.unique(experts[phase == 0, layer]) for layer in range(n_layers)]
    return Trace(
        path.stem,
        [step for layer, union in enumerate(unions) if (step := as_step(layer, union)).experts],
        as_steps(experts[phase != 0]),
        n_layers,
        n_experts,
        top_k,
    )


def as_steps(experts: NDArray[np.integer]) -> list[Step]:
    """[tokens, layers, k] as steps, in the order in which a model runs."""
    return [as_step(layer, ids) for token in experts for layer, ids in enumerate(token)]


def as_step(layer: int, ids: NDArray[np.integer]) -> Step:
    return Step(layer, [i for i in dict.fromkeys(ids.tolist()) if i >= 0])


def made_up(kind: str, *, n_tokens: int = 300, n_layers: int = 12, n_experts: int = 96) -> Trace:
    """Routing from a hidden state that drifts; from fixed preferences; or from none.

    ``topics``: logits are projections of a topic, changed every 75 tokens, of a context with a
    half-life of 20 tokens and one of 2.5. ``zipf``: p ∝ 1 / rank, each layer its own order.
    """
    rng = np.random.default_rng(7)
    top_k = 6
    shape = (n_tokens, n_layers, n_experts)
    if kind == "uniform":
        logits = np.zeros(shape)
    elif kind == "zipf":
        logits = -np.log(1 + rng.permuted(np.tile(np.arange(n_experts), (n_layers, 1)), axis=1))
        logits = np.broadcast_to(logits, shape)
    else:
        width = 32
        heads = rng.normal(size=(n_layers, n_experts, width)) / width**0.5
        state = np.zeros((3, width))
        states = []
        for token in range(n_tokens):
            if token % 75 == 0:
                state[0] = rng.normal(size=width)
            for i, half_life in ((1, 20), (2, 2.5)):
                keep = 2 ** (-1 / half_life)
                state[i] = keep * state[i] + (1 - keep**2) ** 0.5 * rng.normal(size=width)
            states.append(state.sum(axis=0))
        logits = 2 * np.einsum("lew,tw->tle", heads, np.array(states))
    noisy = logits + rng.gumbel(size=shape) * (0.3 if kind == "topics" else 1)
    experts = np.argsort(-noisy, axis=2)[:, :, :top_k]
    odds = np.exp(noisy if kind == "topics" else logits)
    probabilities = (odds / odds.sum(axis=2, keepdims=True)).astype(np.float32)
    return Trace(kind, [], as_steps(experts), n_layers, n_experts, top_k, probabilities)


def policy_for(name: str, trace: Trace, n_slots: int) -> EvictionPolicy:
    sizes = {"n_slots": n_slots, "layers": range(trace.n_layers), "top_k": trace.top_k}
    if name == "belady":
        return BeladyPolicy([*fitting(trace, n_slots), *trace.decode])
    if name == "auto":
        return choose_policy("auto", **sizes, n_experts=trace.n_experts).policy
    return make_policy(name, **sizes)


def fitting(trace: Trace, n_slots: int) -> list[Step]:
    """The prefill's unions as far as a cache has room for them."""
    return [step for step in trace.prefill if len(step.experts) <= n_slots]


def hit_rate(trace: Trace, n_slots: int, policy: EvictionPolicy, *, shown: bool = False) -> float:
    """Hits per lookup in %, in decode; ``shown``: the policy sees the probabilities."""
    residency = Residency(n_slots, policy)
    replay(fitting(trace, n_slots), residency)
    hits, misses = residency.hits, residency.misses
    for i, step in enumerate(trace.decode):
        replay([step], residency)
        if shown:
            token, layer = divmod(i, trace.n_layers)
            residency.observe(layer, trace.probabilities[token, layer])
    hits, misses = residency.hits - hits, residency.misses - misses
    return 100 * hits / (hits + misses)


def table(traces: Sequence[Trace], fractions: Sequence[float]) -> None:
    print(f"{'trace':<28}{'slots':>7}{'slots/W':>8}", *(f"{name:>9}" for name in COLUMNS))
    rows = []
    for trace in traces:
        for fraction in fractions:
            n_slots = max(trace.top_k, int(fraction * trace.n_layers * trace.n_experts))
            rates = [hit_rate(trace, n_slots, policy_for(c, trace, n_slots)) for c in COLUMNS]
            rows.append(rates)
            cycles = n_slots / (trace.n_layers * trace.top_k)
            what = f"{trace.name[:20]}, {fraction:.0%}"
            print(f"{what:<28}{n_slots:>7}{cycles:>8.2f}", *(f"{rate:9.1f}" for rate in rates))
    means = [statistics.mean(column) for column in zip(*rows, strict=True)]
    print(f"{'mean':<43}", *(f"{mean:9.1f}" for mean in means))
    gain = means[COLUMNS.index("auto")] - means[COLUMNS.index("lfu_lru")]
    print(f"auto - lfu_lru: {gain:+.1f} points\n")


def learning(fractions: Sequence[float]) -> None:
    trace = made_up("topics")
    for fraction in fractions:
        n_slots = int(fraction * trace.n_layers * trace.n_experts)
        blind, seeing = (
            hit_rate(trace, n_slots, policy_for("next_use", trace, n_slots), shown=shown)
            for shown in (False, True)
        )
        print(f"next_use, topics, {fraction:.0%}: {blind:.1f}, shown probabilities {seeing:.1f}")
    for n_layers, n_experts, top_k in ((43, 256, 6), (92, 896, 16)):
        cost(n_layers, n_experts, top_k)


def cost(n_layers: int, n_experts: int, top_k: int) -> None:
    """Print what the parts of a step of ``next_use`` take."""
    rng = np.random.default_rng(0)
    policy = NextUsePolicy(n_slots=n_layers * top_k, layers=range(n_layers), top_k=top_k)
    probabilities = np.full(n_experts, 1 / n_experts, np.float32)
    times: dict[str, list[int]] = {"step": [], "settle": [], "observe": []}

    def timed(what: str, call: Callable[[], object]) -> None:
        begin = time.perf_counter_ns()
        call()
        times[what].append(time.perf_counter_ns() - begin)

    for i in range(2000):
        layer = i % n_layers
        chosen = rng.choice(n_experts, top_k, replace=False).tolist()
        keys = [ExpertKey(layer, expert) for expert in chosen]
        timed("step", partial(policy.step, layer, keys))
        timed("settle", policy.settle)
        timed("observe", partial(policy.observe, layer, probabilities))
    medians = (f"{what} {statistics.median(taken) / 1e3:.1f}" for what, taken in times.items())
    print(f"next_use, {n_experts} experts, top-{top_k}, median µs:", ", ".join(medians))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path, help="npz files of routed experts")
    parser.add_argument("--made-up", action="store_true", help="topics, zipf and uniform, too")
    parser.add_argument("--learning", action="store_true", help="cost and gain of observations")
    parser.add_argument("--fractions", type=float, nargs="+", default=FRACTIONS)
    args = parser.parse_args()
    print(describe_machine())
    table([load(path) for path in args.traces or [SHIPPED]], args.fractions)
    if args.made_up:
        table([made_up(kind) for kind in ("topics", "zipf", "uniform")], args.fractions)
    if args.learning:
        learning(args.fractions)


if __name__ == "__main__":
    main()
