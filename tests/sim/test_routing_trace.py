"""The trace in memory, in its file, from the recorder: all comes out, or one clear error."""

import attrs
import numpy as np
import pytest

from tieredmoe.errors import TraceError
from tieredmoe.sim import Step
from tieredmoe.sim.routing_trace import DECODE, NO_EXPERT, PREFILL, ModelFacts, decoded
from tieredmoe.sim.trace_file import MAGIC, read_trace, write_trace
from tieredmoe.sim.trace_recorder import TraceRecorder

FACTS = ModelFacts("tiny", layers=(3, 5, 9), n_experts=8, top_k=2, expert_nbytes=4096)
DEEPSEEK = ModelFacts("deepseek-v4-flash", layers=tuple(range(43)), n_experts=256, top_k=6)


def random_trace(facts=FACTS, n_tokens=5, seed=0, **more):
    rng = np.random.default_rng(seed)
    shape = (n_tokens, len(facts.layers), facts.n_experts)
    experts = rng.random(shape).argsort(axis=2)[..., : facts.top_k]
    weights = rng.random(experts.shape)
    return decoded(facts, experts, weights=weights, **more)


def with_phases():
    trace = random_trace(phase=np.array([PREFILL, PREFILL, DECODE, DECODE, DECODE]))
    experts = trace.experts.copy()
    experts[1, 2, 1] = NO_EXPERT
    probabilities = np.random.default_rng(1).random((5, 3, 8)).astype(np.float16)
    return attrs.evolve(trace, experts=experts, probabilities=probabilities)


def assert_same(one, other):
    assert one.facts == other.facts
    for name in ("experts", "phase", "requests", "passes", "weights", "probabilities"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


def test_tokens_of_a_chunk_are_asked_for_as_one_union_and_a_lone_one_in_its_order():
    experts = np.array([[[5, 1]], [[1, 0]], [[7, 2]]])
    facts = attrs.evolve(FACTS, layers=(4,))
    trace = decoded(facts, experts, phase=np.array([PREFILL, PREFILL, DECODE]))
    assert list(trace.steps()) == [Step(4, [0, 1, 5]), Step(4, [7, 2])]
    assert (trace.n_passes, trace.n_decoded, FACTS.cycle) == (2, 1, 6)


def test_one_phase_of_a_trace_keeps_its_tokens_only():
    chosen = with_phases().only(DECODE)
    assert (chosen.n_tokens, chosen.n_passes) == (3, 3)
    np.testing.assert_array_equal(chosen.experts, with_phases().experts[2:])


def test_a_trace_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        random_trace().experts[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": np.full((5, 3, 2), 8, np.int16)}, r"token 0 .* expert 8 in layer 3"),
        ({"experts": np.full((5, 3, 2), 1, np.int16)}, "twice in layer 3"),
        ({"experts": np.full((5, 3, 2), [NO_EXPERT, 1], np.int16)}, "only the end of a row"),
        ({"experts": np.zeros((5, 2, 2), np.int16)}, "experts has the shape"),
        ({"phase": np.full(5, 2, np.int8)}, "phase is 0"),
        ({"passes": [0, 2, 1, 3, 4]}, "passes fall"),
        ({"weights": np.zeros((5, 3, 2), np.float32)}, "weights is float32"),
        ({"facts": attrs.evolve(FACTS, layers=(3, 9, 5))}, "do not ascend"),
        ({"facts": attrs.evolve(FACTS, top_k=9)}, "is none"),
        ({"facts": attrs.evolve(FACTS, expert_nbytes=0)}, "0 bytes"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(TraceError, match=message):
        attrs.evolve(random_trace(), **change)


@pytest.mark.parametrize("trace", [random_trace(), with_phases()], ids=["plain", "all"])
def test_a_file_gives_back_what_was_written(trace, tmp_path):
    write_trace(trace, tmp_path / "t")
    assert_same(read_trace(tmp_path / "t"), trace)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_token_of_deepseek_takes_less_than_a_kilobyte_with_its_weights(tmp_path):
    write_trace(random_trace(DEEPSEEK, 1), tmp_path / "1")
    write_trace(random_trace(DEEPSEEK, 21), tmp_path / "21")
    grown = (tmp_path / "21").stat().st_size - (tmp_path / "1").stat().st_size
    assert grown // 20 == 783


def test_a_file_torn_anywhere_is_refused(tmp_path):
    write_trace(with_phases(), tmp_path / "t")
    whole = (tmp_path / "t").read_bytes()
    for n in [*range(0, len(whole), 7), len(whole) - 1]:
        (tmp_path / "t").write_bytes(whole[:n])
        with pytest.raises(TraceError, match=r"torn|no trace"):
            read_trace(tmp_path / "t")
    (tmp_path / "t").write_bytes(whole + b"\0")
    with pytest.raises(TraceError, match="does not belong"):
        read_trace(tmp_path / "t")


def test_a_file_with_any_byte_changed_is_refused(tmp_path):
    write_trace(with_phases(), tmp_path / "t")
    whole = (tmp_path / "t").read_bytes()
    for i in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[i] ^= 0x21
        (tmp_path / "t").write_bytes(damaged)
        with pytest.raises(TraceError):
            read_trace(tmp_path / "t")


def test_a_newer_version_is_refused_by_name(tmp_path):
    (tmp_path / "t").write_bytes(MAGIC + (7).to_bytes(4, "little") + bytes(100))
    with pytest.raises(TraceError, match=r"version 7, .* up to 1: upgrade"):
        read_trace(tmp_path / "t")


def test_what_cannot_be_read_or_written_is_named(tmp_path):
    with pytest.raises(TraceError, match="absent: cannot be read"):
        read_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="cannot be written"):
        write_trace(random_trace(), tmp_path / "absent" / "t")


def record(recorder, trace):
    for start, stop in trace.spans():
        for row, layer in enumerate(trace.facts.layers):
            recorder.routed(
                layer,
                trace.experts[start:stop, row],
                trace.weights[start:stop, row],
                request=int(trace.requests[start]),
            )


def test_what_is_recorded_layer_by_layer_is_the_trace():
    trace = random_trace(phase=np.array([PREFILL, PREFILL, DECODE, DECODE, DECODE]))
    recorder = TraceRecorder(FACTS)
    record(recorder, trace)
    assert_same(recorder.trace(), trace)


def test_requests_that_take_turns_are_kept_apart():
    one, two = random_trace(seed=1), random_trace(seed=2)
    recorder = TraceRecorder(FACTS)
    for token in range(5):
        for row, layer in enumerate(FACTS.layers):
            for request, trace in enumerate((one, two)):
                ids, weights = trace.experts[token, row], trace.weights[token, row]
                recorder.routed(layer, ids, weights[None], request=request)
    recorded = recorder.trace()
    for request, trace in enumerate((one, two)):
        chosen = recorded.tokens(recorded.requests == request)
        np.testing.assert_array_equal(chosen.experts, trace.experts)
        np.testing.assert_array_equal(chosen.weights, trace.weights)


def test_router_probabilities_are_recorded_where_asked_for():
    trace = with_phases()
    recorder = TraceRecorder(FACTS, weights=False, probabilities=True)
    for row, layer in enumerate(FACTS.layers):
        recorder.routed(layer, trace.experts[2:3, row], None, trace.probabilities[2:3, row])
    np.testing.assert_array_equal(recorder.trace().probabilities, trace.probabilities[2:3])


def test_a_full_recorder_keeps_the_beginning_and_counts_the_rest():
    trace = random_trace(n_tokens=9)
    recorder = TraceRecorder(FACTS, nbytes_max=4 * 3 * 2 * 4)
    record(recorder, trace)
    np.testing.assert_array_equal(recorder.trace().experts, trace.experts[:4])
    assert recorder.n_dropped == 5


def test_an_unused_recorder_has_an_empty_trace(tmp_path):
    trace = TraceRecorder(FACTS).trace()
    write_trace(trace, tmp_path / "t")
    assert (read_trace(tmp_path / "t").n_tokens, trace.n_passes, list(trace.steps())) == (0, 0, [])
