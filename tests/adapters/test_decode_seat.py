"""One decode step for many sequences: who is in it, and what the others keep."""

import gc

import attrs
import pytest

from tieredmoe.adapters.decode_seat import CAPACITY_LEAST, DecodeSeat, step_capacity
from tieredmoe.adapters.decode_state import DecodeState


@attrs.frozen(eq=False)
class Tokens:
    """A layer's state that is the tokens themselves."""

    tokens: tuple

    def copy(self, *, n_context):
        return Tokens(self.tokens)


class Step:
    """A step whose buffers are a list."""

    def __init__(self, n_capacity):
        self.n_capacity = n_capacity
        self.tokens = []
        self.n_loads = self.n_unloads = 0

    @property
    def n_tokens(self):
        return len(self.tokens)

    def load(self, layers, *, n_tokens):
        assert len(layers[0].tokens) == n_tokens <= self.n_capacity
        self.tokens = list(layers[0].tokens)
        self.n_loads += 1

    def unload(self, *, n_context):
        self.n_unloads += 1
        return (Tokens(tuple(self.tokens)),)


class Machine:
    """A seat, and decoding on it."""

    def __init__(self):
        self.steps = []
        self.seat = DecodeSeat(self.new_step)

    def new_step(self, n_capacity):
        self.steps.append(Step(n_capacity))
        return self.steps[-1]

    def decode(self, state, *tokens):
        for token in tokens:
            step = self.seat.seat(state)
            start = state.n_tokens
            step.tokens.append(token)
            state.commit_seated(start=start)


@pytest.fixture
def machine():
    return Machine()


def sequence(*tokens, n_context=10**6):
    return DecodeState(
        [Tokens(tokens)], n_context=n_context, n_context_max=10**6, n_tokens=len(tokens)
    )


def held(state):
    return state.layers[0].tokens


def test_a_sequence_that_goes_on_decoding_is_loaded_once_and_never_unloaded(machine):
    state = sequence(1, 2)
    machine.decode(state, 3, 4, 5)
    (step,) = machine.steps
    assert (step.n_loads, step.n_unloads, state.n_tokens) == (1, 0, 5)


def test_the_layers_of_a_seated_sequence_are_those_after_its_last_token(machine):
    state = sequence(1)
    machine.decode(state, 2)
    assert held(state) == (1, 2)
    machine.decode(state, 3)
    assert held(state) == (1, 2, 3)
    assert held(state.copy()) == (1, 2, 3)


def test_sequences_side_by_side_take_turns_and_keep_their_own(machine):
    a, b = sequence(1), sequence(7)
    for i in range(3):
        machine.decode(a, 10 + i)
        machine.decode(b, 20 + i)
    assert (held(a), held(b)) == ((1, 10, 11, 12), (7, 20, 21, 22))
    assert len(machine.steps) == 1


def test_a_sequence_that_nobody_holds_is_not_unloaded(machine):
    machine.decode(sequence(1), 2)
    gc.collect()
    machine.decode(sequence(7), 8)
    assert machine.steps[0].n_unloads == 0


def test_a_functional_step_takes_the_sequence_out(machine):
    state = sequence(1)
    machine.decode(state, 2)
    layers = (Tokens((*held(state), 3, 4)),)
    state.commit(layers, start=2, n_new=2)
    assert held(state) == (1, 2, 3, 4)
    machine.decode(state, 5)
    assert held(state) == (1, 2, 3, 4, 5)


def test_a_snapshot_does_not_see_what_is_decoded_later(machine):
    state = sequence(1)
    machine.decode(state, 2)
    snapshot = state.copy()
    machine.decode(state, 3)
    machine.decode(snapshot, 4)
    assert (held(state), held(snapshot)) == ((1, 2, 3), (1, 2, 4))


def test_a_longer_sequence_gets_a_larger_step_in_place_of_the_old_one(machine):
    n = CAPACITY_LEAST
    state = sequence(*range(n - 1))
    machine.decode(state, n - 1)
    assert [step.n_capacity for step in machine.steps] == [n]
    machine.decode(state, n, n + 1)
    assert [step.n_capacity for step in machine.steps] == [n, 2 * n]
    assert held(state) == tuple(range(n + 2))


def test_when_there_is_no_memory_for_a_larger_step_nothing_is_lost(machine, monkeypatch):
    n = CAPACITY_LEAST
    state = sequence(*range(n - 1))
    machine.decode(state, n - 1)
    with monkeypatch.context() as patched:
        patched.setattr(machine.seat, "_new_step", lambda _: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            machine.seat.seat(state)
    assert held(state) == tuple(range(n))
    machine.decode(state, n)
    assert held(state) == tuple(range(n + 1))


def test_closing_gives_the_sequence_its_layers_and_frees_the_step(machine):
    state = sequence(1)
    machine.decode(state, 2)
    machine.seat.close()
    (step,) = machine.steps
    machine.steps.clear()
    assert not [one for one in gc.get_referrers(step) if isinstance(one, dict)]
    assert held(state) == (1, 2)


@pytest.mark.parametrize(
    ("n_tokens", "capacity"),
    [(1, 4096), (4096, 4096), (4097, 8192), (2**20, 2**20), (2**20 + 1, 2**21)],
)
def test_capacities_are_powers_of_two(n_tokens, capacity):
    assert step_capacity(n_tokens) == capacity
