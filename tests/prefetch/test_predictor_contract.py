"""The contract of predictors sees who breaks it."""

import pytest

from tieredmoe.prefetch import MarkovPredictor
from tieredmoe.spec import ExpertKey
from tieredmoe.testing.contracts.predictor import N_EXPERTS, PredictorContract


class Liar:
    """Passes everything on, and lies as its subclasses please."""

    def __init__(self, **options):
        self.honest = MarkovPredictor(**options)
        self.width = self.honest.width

    def observe(self, layer, experts):
        self.honest.observe(layer, experts)

    def predict(self, layer, signal=None):
        return self.honest.predict(layer, signal)


class SaysTooMuch(Liar):
    def predict(self, layer, signal=None):
        return [ExpertKey(layer, expert) for expert in range(N_EXPERTS)]


class RepeatsItself(Liar):
    def predict(self, layer, signal=None):
        return [ExpertKey(layer, 0)] * 2


class NamesOthers(Liar):
    def predict(self, layer, signal=None):
        return [ExpertKey(layer, N_EXPERTS)]


class NamesAnotherLayer(Liar):
    def predict(self, layer, signal=None):
        return [ExpertKey(5 if layer == 1 else 1, 0)]


class RaisesOnTheUnknown(Liar):
    def predict(self, layer, signal=None):
        return {1: (), 2: (), 5: ()}[layer]


class ReadsItsSignal(Liar):
    def predict(self, layer, signal=None):
        assert signal is None or signal.shape
        return super().predict(layer)


class LearnsTheUnknown(Liar):
    def observe(self, layer, experts):
        super().observe(layer, [min(max(expert, 0), N_EXPERTS - 1) for expert in experts])


class ChangesItsMind(Liar):
    asked = 0

    def predict(self, layer, signal=None):
        self.asked += 1
        return [ExpertKey(layer, self.asked % N_EXPERTS)] if layer in (1, 2, 5) else []


class TiresOfBeingAsked(Liar):
    asked = 0

    def predict(self, layer, signal=None):
        self.asked += 1
        return super().predict(layer, signal) if self.asked < 1000 else ()


class KeepsYourList(Liar):
    last = (0, ())

    def observe(self, layer, experts):
        super().observe(*self.last)
        self.last = (layer, experts)


class SharesWhatItKnows(Liar):
    shared = None

    def __init__(self, **options):
        super().__init__(**options)
        SharesWhatItKnows.shared = self.honest = SharesWhatItKnows.shared or self.honest


class HandsOutItsOwnList(Liar):
    def __init__(self, **options):
        super().__init__(**options)
        self.last = []

    def predict(self, layer, signal=None):
        self.last[:] = super().predict(layer, signal)
        return self.last


class RemembersEverything(Liar):
    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def observe(self, layer, experts):
        self.seen.append((layer, list(experts)))
        super().observe(layer, experts)


class IsAwaited(Liar):
    async def predict(self, layer, signal=None):
        return super().predict(layer, signal)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize(
    ("liar", "promise", "options"),
    [
        (SaysTooMuch, "nothing_observed", {}),
        (RepeatsItself, "nothing_observed", {}),
        (NamesOthers, "nothing_observed", {}),
        (NamesAnotherLayer, "nothing_observed", {}),
        (RaisesOnTheUnknown, "an_unknown_layer", {"layer": 3}),
        (ReadsItsSignal, "an_unknown_signal", {"signal": "text"}),
        (LearnsTheUnknown, "unknown_experts_are_ignored", {}),
        (ChangesItsMind, "the_same_observations", {}),
        (TiresOfBeingAsked, "the_same_observations", {}),
        (KeepsYourList, "what_is_observed_stays", {}),
        (SharesWhatItKnows, "two_predictors_share_nothing", {}),
        (HandsOutItsOwnList, "the_caller_s_to_keep", {}),
        (RemembersEverything, "its_memory_has_a_limit", {}),
        (IsAwaited, "nothing_observed", {}),
    ],
)
def test_a_predictor_that_breaks_a_promise_is_found_by_its_test(liar, promise, options):
    class Lying(PredictorContract):
        def make_predictor(self, **model):
            return liar(**model)

    (name,) = [name for name in dir(Lying) if promise in name]
    with pytest.raises((AssertionError, LookupError, AttributeError)):
        getattr(Lying(), name)(**options)
