"""Other projects' traces: pieces of the real files, and one clear error per way to be wrong."""

import json
from pathlib import Path

import numpy as np
import pytest

from tieredmoe.errors import TraceError
from tieredmoe.sim.foreign_trace import load_trace
from tieredmoe.sim.routing_trace import DECODE, PREFILL
from tieredmoe.sim.trace_file import write_trace

TRACES = Path(__file__).parent.parent / "data" / "traces"


def test_json_lines_are_decoded_tokens():
    trace = load_trace(TRACES / "kimi_linear_12_tokens.jsonl")
    assert (trace.n_tokens, trace.n_decoded, trace.facts.cycle) == (12, 12, 26 * 8)
    assert trace.experts[0, 0].tolist() == [36, 38, 85, 103, 116, 133, 138, 255]
    assert trace.experts[1, 1].tolist() == [12, 20, 32, 41, 177, 200, 204, 214]


def test_a_csv_has_ranks_weights_phases_and_sizes():
    trace = load_trace(TRACES / "qwen3_4_tokens.route.csv")
    facts = trace.facts
    assert facts.name == "Qwen3-30B-A3B-Q4_K_M.gguf"
    assert (facts.n_experts, facts.top_k, len(facts.layers)) == (128, 6, 48)
    assert facts.expert_nbytes == 3059712
    assert trace.phase.tolist() == [PREFILL, PREFILL, DECODE, DECODE]
    assert trace.passes.tolist() == [0, 0, 1, 2]
    assert (np.diff(trace.weights[2:].astype(float), axis=2) <= 0).all()


def test_turns_of_a_csv_are_requests_and_share_no_pass(tmp_path):
    rows = ["0,0,0,0,0,1,1", "0,0,1,0,0,2,1", "1,0,0,0,0,3,1", "1,1,1,0,0,4,1"]
    (tmp_path / "t").write_text("turn,phase,step,layer,slot,expert,weight\n" + "\n".join(rows))
    trace = load_trace(tmp_path / "t")
    assert trace.requests.tolist() == [0, 0, 1, 1]
    assert trace.passes.tolist() == [0, 0, 1, 2]
    assert trace.experts[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_npz_and_our_own_are_told_by_their_bytes(tmp_path):
    trace = load_trace(TRACES / "olmoe-1b-7b_80_tokens.npz", expert_nbytes=4096)
    write_trace(trace, tmp_path / "some.npz")
    again = load_trace(tmp_path / "some.npz")
    np.testing.assert_array_equal(again.experts, trace.experts)
    assert (again.facts, again.facts.n_experts) == (trace.facts, 64)


def test_what_a_file_does_not_say_can_be_given():
    facts = load_trace(
        TRACES / "kimi_linear_12_tokens.jsonl", n_experts=300, expert_nbytes=8192
    ).facts
    assert (facts.n_experts, facts.expert_nbytes) == (300, 8192)


HEAD = "turn,phase,step,layer,slot,expert,weight\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no trace"),
        ("hello", "no trace"),
        ('{"layers": [[1, 2]]}\n{"layers": [[1, 2]', "line 2 is no token"),
        ('{"tok": 1}', "line 1 is no token"),
        ('{"layers": [[1, 2]]}\n{"layers": [[1], [2]]}', "line 2 has 2 layers, .* 1"),
        ('{"layers": [[1.5]]}', "line 1: .* whole numbers"),
        ('{"layers": [[]]}', "line 1: a token has experts"),
        ('{"layers": [[1, 1]]}', "one expert twice"),
        ('{"layers": [[-3, 1]]}', "numbered from 0"),
        ("# model=x", "no table"),
        ("turn,phase,step\n0,0,0", "line 1 names no column layer, slot"),
        (HEAD, "from 0 on"),
        (HEAD + "0,0,0,0,0,1,0.5\n0,0,0,0,x,1,0.5", "line 3 is no row of numbers"),
        (HEAD + "0,0,0,0", "line 2 is no row of numbers"),
        (HEAD + "0,0,0,0,0,1.5,0.5", "line 2 has a number"),
        (HEAD + "0,5,0,0,0,1,0.5", "phase is 0"),
    ],
)
def test_a_wrong_text_is_refused_with_its_line(text, message, tmp_path):
    (tmp_path / "t").write_text(text)
    with pytest.raises(TraceError, match=message):
        load_trace(tmp_path / "t")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"other": np.zeros(3)}, "member 'expert'"),
        ({"expert": np.zeros((2, 3))}, "member 'expert'"),
        ({"expert": np.zeros((2, 3, 1), int), "phase": np.zeros(3)}, "member 'phase'"),
        ({"expert": np.zeros((2, 3, 1), int), "meta": "{"}, "member 'meta'"),
        ({"expert": np.zeros((2, 3, 1), int), "meta": "[]"}, "member 'meta'"),
        ({"expert": np.full((1, 1, 1), 9), "meta": json.dumps({"n_expert": 4})}, "expert 9 is"),
        ({"expert": np.zeros((0, 3, 1), int)}, "no tokens"),
        ({"expert": np.array([[[{}]]], dtype=object)}, "no sound npz"),
    ],
)
def test_a_wrong_npz_is_refused_with_its_member(members, message, tmp_path):
    np.savez(tmp_path / "t.npz", **members)
    with pytest.raises(TraceError, match=message):
        load_trace(tmp_path / "t.npz")


def test_a_torn_npz_and_an_absent_file_are_refused(tmp_path):
    (tmp_path / "t").write_bytes((TRACES / "olmoe-1b-7b_80_tokens.npz").read_bytes()[:2000])
    with pytest.raises(TraceError, match="no sound npz"):
        load_trace(tmp_path / "t")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "absent")
