"""What every predictor promises, as tests: subclass ``PredictorContract``, override one method.

::

    class TestMyPredictor(PredictorContract):
        def make_predictor(self, *, layers, n_experts, top_k):
            return MyPredictor(layers=layers, n_experts=n_experts, top_k=top_k)

        def signal(self, layer, experts):
            return my_hidden_state_that_leads_to(experts)

The contract knows what a prediction may be, never how good it is: that wants a test of its own, on
a trace, against what a guess by frequency would have got.
"""

from __future__ import annotations

import gc
import inspect
import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieredmoe.spec import ExpertKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tieredmoe.prefetch.protocol import Predictor

LAYERS = (1, 2, 5)
N_EXPERTS = 12
TOP_K = 3
GROWTH_NBYTES_MAX = 8192
"""What a predictor's memory may still vary by once it has seen everything."""

_NO_SIGNAL: object = None
_STEPS = st.lists(
    st.tuples(
        st.sampled_from((*LAYERS, 0, 7)),
        st.lists(st.integers(-1, N_EXPERTS), unique=True, max_size=2 * TOP_K),
    ),
    max_size=40,
)


class PredictorContract:
    """Tests of one predictor; see the module. Override ``make_predictor``, and ``signal``."""

    def make_predictor(self, *, layers: Sequence[int], n_experts: int, top_k: int) -> Predictor:
        """Build a fresh predictor."""
        raise NotImplementedError(
            f"{type(self).__name__} overrides make_predictor, to say what is tested"
        )

    def signal(self, layer: int, experts: Sequence[int]) -> object:
        """What a caller would pass to ``predict`` before ``layer`` is routed to ``experts``."""
        del layer, experts
        return _NO_SIGNAL

    def test_a_prediction_is_a_few_distinct_experts_of_the_layer_asked_for(self) -> None:
        """After whatever observations, in whatever order of layers, known and unknown."""

        @settings(deadline=None)
        @given(steps=_STEPS)
        def check(steps: list[tuple[int, list[int]]]) -> None:
            predictor = self._fresh()
            for layer, experts in steps:
                predictor.observe(layer, experts)
                for asked in LAYERS:
                    self._check(predictor, asked, self.signal(asked, experts))

        check()

    def test_nothing_observed_is_no_reason_to_raise(self) -> None:
        """The first prediction of all is a guess or none."""
        predictor = self._fresh()
        for layer in LAYERS:
            self._check(predictor, layer, self.signal(layer, range(TOP_K)))
            self._check(predictor, layer, None)

    @pytest.mark.parametrize("layer", [0, 3, -1, 10**9])
    def test_an_unknown_layer_has_no_experts(self, layer: int) -> None:
        """It is ignored when observed, and nothing is predicted for it."""
        predictor, other = self._trained(), self._trained()
        predictor.observe(layer, [0, 1, 2])
        assert list(predictor.predict(layer, self.signal(layer, [0, 1, 2]))) == []
        assert self._predictions(predictor) == self._predictions(other)

    @pytest.mark.parametrize("signal", [None, "text", -1, (), object(), b"\0"])
    def test_an_unknown_signal_is_no_error(self, signal: object) -> None:
        """What this predictor cannot read says nothing."""
        predictor = self._trained()
        for layer in LAYERS:
            self._check(predictor, layer, signal)

    def test_unknown_experts_are_ignored(self) -> None:
        """Those there are among them are learnt from as if they had come alone."""
        predictor, other = self._fresh(), self._fresh()
        for layer, experts in _routing(60):
            predictor.observe(layer, [N_EXPERTS, *experts, -1, 10**9])
            other.observe(layer, experts)
        assert self._predictions(predictor) == self._predictions(other)

    def test_the_same_observations_give_the_same_predictions(self) -> None:
        """Of two predictors one is asked after each observation: asking changes nothing."""
        asked, quiet = self._fresh(), self._fresh()
        for layer, experts in _routing(200):
            for predictor in (asked, quiet):
                predictor.observe(layer, experts)
            first = self._predictions(asked)
            assert self._predictions(asked) == first, "asked again, it says something else"
        assert self._predictions(asked) == self._predictions(quiet)

    def test_two_predictors_share_nothing(self) -> None:
        """What one has learnt, the other does not know."""
        before = self._predictions(self._fresh())
        self._trained()
        assert self._predictions(self._fresh()) == before

    def test_what_is_predicted_is_the_caller_s_to_keep(self) -> None:
        """No later prediction or observation changes one that was given."""
        predictor = self._trained()
        given = []
        for layer, experts in _routing(30):
            predictor.observe(layer, experts)
            for asked in LAYERS:
                prediction = predictor.predict(asked, self.signal(asked, experts))
                given.append((prediction, list(prediction)))
        assert any(as_given for _, as_given in given), "a trained predictor predicts nothing at all"
        for prediction, as_given in given:
            assert list(prediction) == as_given, "it has changed since"

    def test_what_is_observed_stays_the_caller_s_too(self) -> None:
        """A list that its owner changes afterwards was observed as it was."""
        predictor, other = self._trained(), self._trained()
        for layer, experts in _routing(30):
            observed = list(experts)
            predictor.observe(layer, observed)
            observed[:] = [9, 10, 11]
            other.observe(layer, experts)
        assert self._predictions(predictor) == self._predictions(other)

    def test_its_memory_has_a_limit(self) -> None:
        """Once all there is has been observed, more observations take no more memory."""
        tracemalloc.start()
        try:
            predictor = self._fresh()
            sizes = []
            for _ in range(3):
                for layer, experts in _routing(500, n_experts_max=N_EXPERTS):
                    predictor.observe(layer, experts)
                self._predictions(predictor)
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert sizes[2] - sizes[1] <= GROWTH_NBYTES_MAX, f"it grows: {sizes} bytes"

    def _fresh(self) -> Predictor:
        return self.make_predictor(layers=LAYERS, n_experts=N_EXPERTS, top_k=TOP_K)

    def _trained(self) -> Predictor:
        predictor = self._fresh()
        for layer, experts in _routing(100):
            predictor.observe(layer, experts)
        return predictor

    def _predictions(self, predictor: Predictor) -> list[list[ExpertKey]]:
        return [list(predictor.predict(layer, self.signal(layer, [1, 4, 7]))) for layer in LAYERS]

    def _check(self, predictor: Predictor, layer: int, signal: object) -> None:
        keys = predictor.predict(layer, signal)
        assert not inspect.isawaitable(keys), "a prediction is not awaited"
        assert 0 < predictor.width <= N_EXPERTS
        assert len(keys) <= predictor.width, f"{len(keys)} keys, and the width is {predictor.width}"
        assert len(set(keys)) == len(keys), f"{keys} names a key twice"
        for key in keys:
            assert isinstance(key, ExpertKey)
            assert type(key.expert) is int, f"{key} is no plain key: {type(key.expert)}"
            assert key.layer == layer, f"{key} predicted for layer {layer}"
            assert 0 <= key.expert < N_EXPERTS, f"{key} does not exist"


def _routing(n_steps: int, *, n_experts_max: int = TOP_K) -> Iterator[tuple[int, list[int]]]:
    """Layer after layer, each routed to some experts; the same each time."""
    source = random.Random(4)  # noqa: S311 (test data)
    for i in range(n_steps):
        yield (
            LAYERS[i % len(LAYERS)],
            source.sample(range(N_EXPERTS), source.randint(1, n_experts_max)),
        )
