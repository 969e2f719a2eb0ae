import ctypes
import errno

import numpy as np
import pytest

from tieredmoe.errors import BudgetError
from tieredmoe.memory import PASSED, HostArena, HostPool, Part
from tieredmoe.spec import ExpertKey

SLOT = 8192
KEY = ExpertKey(0, 0)


@pytest.fixture
def pool():
    pool = HostPool.allocate(16 * SLOT)
    yield pool
    pool.close()


@pytest.fixture
def arena(pool):
    arena = HostArena(pool.carve(4 * SLOT), n_slots=4, slot_nbytes=SLOT)
    yield arena
    arena.close()


@pytest.fixture
def staging(pool):
    staging = HostArena(pool.carve(2 * SLOT), n_slots=2, slot_nbytes=SLOT)
    yield staging
    staging.close()


def test_slots_are_the_same_objects_always_and_know_their_place(arena):
    slots = [arena.slot(i) for i in range(arena.n_slots)]
    assert slots == [arena.slot(i) for i in range(4)]
    assert [slot.slot_index for slot in slots] == [0, 1, 2, 3]
    assert {slot.nbytes for slot in slots} == {arena.slot_nbytes} == {SLOT}
    assert all(slot.arena is arena for slot in slots)


def test_slots_do_not_share_a_byte(arena):
    for i in range(4):
        arena.slot(i).view[:] = bytes([i + 1]) * SLOT
    assert [bytes(arena.slot(i).view) for i in range(4)] == [
        bytes([i]) * SLOT for i in (1, 2, 3, 4)
    ]


def test_a_slots_address_is_where_its_view_is(arena):
    slot = arena.slot(3)
    slot.view[:4] = b"here"
    assert ctypes.string_at(slot.address, 4) == b"here"
    assert slot.address % 4096 == 0


def test_a_copy_moves_its_parts_and_nothing_else(arena, staging):
    source, target = staging.slot(1), arena.slot(2)
    source.view[:] = bytes(range(256)) * (SLOT // 256)
    for i in range(4):
        arena.slot(i).view[:] = b"\xee" * SLOT
    arena.copy_from(KEY, source, target, [Part(1, 0, 3), Part(10, 5000, 4)])
    expected = bytearray(b"\xee" * SLOT)
    expected[:3] = bytes([1, 2, 3])
    expected[5000:5004] = bytes([10, 11, 12, 13])
    assert bytes(target.view) == expected
    assert all(bytes(arena.slot(i).view) == b"\xee" * SLOT for i in (0, 1, 3))


def test_a_whole_slot_can_be_copied(arena, staging):
    staging.slot(0).view[:] = np.random.default_rng(0).bytes(SLOT)
    arena.copy_from(KEY, staging.slot(0), arena.slot(0), [Part(0, 0, SLOT)])
    assert arena.slot(0).view == staging.slot(0).view


@pytest.mark.parametrize(
    "part", [Part(1, 0, SLOT), Part(0, 1, SLOT), Part(-1, 0, 4), Part(0, -1, 4), Part(0, 0, -1)]
)
def test_a_copy_outside_the_slots_is_caught_before_a_byte_moves(arena, staging, part):
    with pytest.raises(AssertionError):
        arena.copy_from(KEY, staging.slot(0), arena.slot(0), [part])
    assert not any(arena.slot(0).view)


def test_an_arena_copies_into_its_own_slots_only(arena, staging):
    with pytest.raises(AssertionError, match="another arena"):
        arena.copy_from(KEY, staging.slot(0), staging.slot(1), [Part(0, 0, 4)])


def test_host_fences_have_always_passed(arena, staging):
    calls = []
    fence = arena.copy_from(KEY, staging.slot(0), arena.slot(0), [Part(0, 0, 4)])
    assert arena.slot(0).ready is fence
    for each in (fence, arena.slot(1).ready, arena.slot(1).idle, PASSED):
        assert each.passed()
        each.on_passed(lambda: calls.append("called"))
        each.wait_on(object())
    assert calls == ["called"] * 4


@pytest.mark.parametrize(("n_slots", "slot_nbytes"), [(4, 4095), (5, SLOT), (0, SLOT), (1, 0)])
def test_an_arena_of_the_wrong_shape_is_caught(pool, n_slots, slot_nbytes):
    with pytest.raises(AssertionError):
        HostArena(pool.carve(4 * SLOT), n_slots=n_slots, slot_nbytes=slot_nbytes)


def test_after_close_nothing_of_the_arena_can_be_reached(arena):
    view = arena.slot(0).view
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="released"):
        view[0]
    with pytest.raises(AssertionError, match="closed"):
        arena.slot(0)


def test_closing_arena_and_pool_lets_the_mapping_go(pool, arena):
    mapping = pool._mapping
    arena.close()
    pool.close()
    assert mapping.closed


def test_closing_under_a_living_array_keeps_its_memory(arena, pool):
    arena.slot(0).view[:] = b"\x07" * SLOT
    array = np.frombuffer(arena.slot(0).view, np.uint8)
    arena.close()
    pool.close()
    assert (array == 7).all()


def test_slots_given_up_lose_their_memory_and_the_others_keep_their_bytes(arena):
    for i in range(4):
        arena.slot(i).view[:] = b"\x07" * SLOT
    arena.resize(2)
    assert [set(arena.slot(i).view) for i in range(4)] == [{7}, {7}, {0}, {0}]
    arena.resize(4)
    assert [set(arena.slot(i).view) for i in range(4)] == [{7}, {7}, {0}, {0}]
    arena.slot(3).view[:] = b"\x09" * SLOT
    arena.resize(4)
    assert set(arena.slot(3).view) == {9}


def test_memory_that_a_device_knows_stays():
    """It goes on reading the old pages, whatever is mapped there."""
    pool = HostPool.allocate(2 * SLOT)
    pool.whole()
    arena = HostArena(pool.carve(2 * SLOT), n_slots=2, slot_nbytes=SLOT)
    arena.slot(1).view[:] = b"\x07" * SLOT
    arena.resize(1)
    assert set(arena.slot(1).view) == {7}
    arena.close()
    pool.close()


def test_memory_that_the_kernel_does_not_give_again_changes_nothing(arena, monkeypatch):
    arena.resize(2)

    def refuse(*_):
        raise OSError(errno.ENOMEM, "no")

    with monkeypatch.context() as patched:
        patched.setattr("tieredmoe.memory.pages.kernel_madvise", refuse)
        with pytest.raises(BudgetError, match="16 KiB"):
            arena.resize(4)
    arena.resize(3)
    arena.resize(4)


def test_a_kernel_too_old_to_be_asked_gives_pages_when_they_are_touched(arena, monkeypatch):
    arena.resize(1)

    def refuse(*_):
        raise OSError(errno.EINVAL, "no such advice")

    monkeypatch.setattr("tieredmoe.memory.pages.kernel_madvise", refuse)
    arena.resize(4)
    arena.slot(3).view[:] = b"\x01" * SLOT


def test_an_arena_keeps_at_least_one_slot_and_no_more_than_it_has(arena):
    for n_slots in (0, 5):
        with pytest.raises(AssertionError):
            arena.resize(n_slots)
    arena.close()
    with pytest.raises(AssertionError, match="closed"):
        arena.resize(2)


def test_the_host_has_no_stream_to_wait_for(arena):
    assert arena.fence(object()) is PASSED
    assert PASSED.covers(PASSED)
