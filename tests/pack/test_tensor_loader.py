"""Dense tensors come whole, each page read once, through any backend, in bounded memory."""

import asyncio
import errno
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_moe import MIXED, convert, flip, make_small_moe

from tieredmoe.errors import BackendUnavailableError, GGUFError, PackError, ReadError
from tieredmoe.pack import Extent, open_checkpoint, open_pack, open_virtual_pack, tensors
from tieredmoe.pack.tensors import TensorLoader, plan_pieces
from tieredmoe.spec import PAGE_NBYTES

DENSE = ["output.weight", "blk.0.attn_norm.weight", "blk.1.attn_norm.weight"]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "gguf").mkdir()
    return make_small_moe(tmp_path / "gguf" / "m.gguf", n_shards=2, types=MIXED[:2], alignment=8)


@pytest.fixture(params=["pack", "gguf"])
def opened(request, model, tmp_path):
    if request.param == "gguf":
        return open_virtual_pack(model.paths[0])
    convert(model, tmp_path / "pack")
    return open_pack(tmp_path / "pack")


class Kept:
    """What was delivered, put together."""

    def __init__(self, model):
        self.data = {name: bytearray(model.tensors[name].nbytes) for name in model.tensors}
        self.order = []

    def __call__(self, name, start, data):
        self.order.append((name, start, data.nbytes))
        self.data[name][start : start + data.nbytes] = data


@pytest.mark.parametrize("backend", ["auto", "threads", "buffered"])
@pytest.mark.parametrize("piece_nbytes", [4096, 3 * 4096, 8 << 20])
def test_every_tensor_arrives_whole(opened, backend, piece_nbytes, monkeypatch):
    monkeypatch.setattr(tensors, "PIECE_NBYTES", piece_nbytes)
    kept = Kept(opened)
    TensorLoader(opened, backend=backend).load(DENSE, kept)
    for name in DENSE:
        assert bytes(kept.data[name]) == opened.read(name).tobytes()
    asked = Counter(name for name, _, _ in kept.order)
    assert set(asked) == set(DENSE)


def test_a_gguf_loader_brings_expert_tensors_too(model):
    opened = open_virtual_pack(model.paths[0])
    kept = Kept(opened)
    TensorLoader(opened).load(list(opened.tensors), kept)
    assert all(bytes(kept.data[name]) == opened.read(name).tobytes() for name in opened.tensors)


def test_it_is_a_tensor_source(opened):
    loader = TensorLoader(opened)
    assert loader.metadata is opened.metadata
    assert loader.tensors is opened.tensors
    assert np.array_equal(loader.read(DENSE[0]), opened.read(DENSE[0]))


class Pins:
    """Remembers what was registered, and whether it still was when bytes were delivered."""

    def __init__(self):
        self.n_open = 0
        self.nbytes = []

    def __call__(self, pool):
        self.n_open += 1
        self.nbytes.append(pool.nbytes)
        return self

    def close(self):
        self.n_open -= 1


def test_memory_is_registered_for_as_long_as_pieces_are_delivered(opened):
    pins, seen = Pins(), []
    kept = Kept(opened)

    def deliver(name, start, data):
        seen.append(pins.n_open)
        kept(name, start, data)

    loader = TensorLoader(opened, pin=pins)
    loader.load(DENSE, deliver)
    assert set(seen) == {1}
    assert pins.n_open == 0
    assert len(pins.nbytes) == 1
    assert bytes(kept.data[DENSE[0]]) == opened.read(DENSE[0]).tobytes()

    def fail(*_):
        raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        loader.load(DENSE, fail)
    assert pins.n_open == 0


def test_nothing_asked_is_nothing_read(opened):
    TensorLoader(opened, backend="none such").load([], None)


def test_what_is_no_dense_tensor_is_a_key_error(opened):
    with pytest.raises(KeyError):
        TensorLoader(opened).load(["blk.9.nothing"], None)


# --- the plan


@st.composite
def layouts(draw):
    """Tensors end to end or apart, in one to three files, at any byte."""
    extents = {}
    for file_index in range(draw(st.integers(1, 3))):
        end = draw(st.integers(0, 9000))
        for i in range(draw(st.integers(0, 6))):
            end += draw(st.sampled_from([0, 0, 1, 31, 4096, 8000, 20_000]))
            nbytes = draw(st.integers(1, 30_000))
            extents[f"{file_index}.{i}"] = Extent(file_index, end, nbytes)
            end += nbytes
    return extents


@given(extents=layouts(), n_pages=st.integers(1, 5))
def test_a_plan_covers_every_byte_once_and_no_page_twice(extents, n_pages):
    pieces = list(plan_pieces(extents, piece_nbytes=n_pages * PAGE_NBYTES))
    covered = dict.fromkeys(extents, 0)
    pages = Counter()
    places = [(piece.file_index, piece.offset) for piece in pieces]
    assert places == sorted(places)
    for piece in pieces:
        assert piece.offset % PAGE_NBYTES == piece.nbytes % PAGE_NBYTES == 0
        assert 0 < piece.nbytes <= n_pages * PAGE_NBYTES
        assert piece.nbytes - PAGE_NBYTES < piece.needed_nbytes <= piece.nbytes
        first = piece.offset // PAGE_NBYTES
        pages.update((piece.file_index, first + i) for i in range(piece.nbytes // PAGE_NBYTES))
        for share in piece.shares:
            extent = extents[share.name]
            assert extent.file_index == piece.file_index
            assert piece.offset + share.begin == extent.offset + share.start
            assert share.start == covered[share.name], "in order, without gaps"
            assert 0 <= share.begin < share.end <= piece.needed_nbytes
            covered[share.name] += share.end - share.begin
    assert covered == {name: extent.nbytes for name, extent in extents.items()}
    assert not pages or max(pages.values()) == 1
    wanted = {
        (extent.file_index, page)
        for extent in extents.values()
        for page in range(
            extent.offset // PAGE_NBYTES, -(-(extent.offset + extent.nbytes) // PAGE_NBYTES)
        )
    }
    assert set(pages) == wanted, "and no page that nobody needs"


# --- what can go wrong


def test_memory_is_a_few_pieces_and_reads_are_several_at_once(opened, monkeypatch):
    monkeypatch.setattr(tensors, "PIECE_NBYTES", 4096)
    monkeypatch.setattr(tensors, "N_PIECES", 2)
    pools, in_flight = [], []
    real_allocate, real_open = tensors.HostPool.allocate, tensors.open_backend

    def opening(name, files, **options):
        backend = real_open(name, files, **options)
        submit = backend.submit

        def counting(batch, **options):
            reads = submit(batch, **options)
            in_flight.append(backend.stats().in_flight + backend.stats().queued)
            return reads

        backend.submit = counting
        return backend

    monkeypatch.setattr(
        tensors.HostPool, "allocate", lambda nbytes: pools.append(nbytes) or real_allocate(nbytes)
    )
    monkeypatch.setattr(tensors, "open_backend", opening)
    TensorLoader(opened, backend="threads").load(DENSE, Kept(opened))
    assert pools == [2 * 4096]
    assert len(in_flight) >= 3
    assert max(in_flight) <= 2


def test_damage_in_a_pack_is_named(model, tmp_path):
    convert(model, tmp_path / "pack")
    opened = open_pack(tmp_path / "pack")
    extent = opened.locate_tensor("output.weight")
    flip(opened.tensor_files[extent.file_index], extent.offset + extent.nbytes - 1)
    with pytest.raises(PackError, match=r"dense-0000\d.bin: is damaged: tensor 'output.weight'"):
        TensorLoader(opened).load(DENSE, Kept(opened))


def test_a_gguf_that_changed_since_it_was_opened_is_named(model):
    opened = open_virtual_pack(model.paths[0])
    os.utime(model.paths[0], ns=(1, 1))
    with pytest.raises(GGUFError, match="changed since it was opened"):
        TensorLoader(opened).load(DENSE, Kept(opened))


def test_a_gguf_that_changes_while_it_is_loaded_is_named(model):
    opened = open_virtual_pack(model.paths[0])
    with pytest.raises(GGUFError, match="changed since it was opened"):
        TensorLoader(opened).load(DENSE, lambda *_: os.utime(model.paths[1], ns=(1, 1)))


def test_a_pack_file_cut_short_is_named(model, tmp_path):
    convert(model, tmp_path / "pack")
    opened = open_checkpoint(tmp_path / "pack")
    file = opened.tensor_files[opened.locate_tensor(DENSE[0]).file_index]
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(PackError, match=f"{file.name} has"):
        TensorLoader(opened).load(DENSE, Kept(opened))


def test_whatever_a_receiver_raises_ends_it_with_nothing_open(opened):
    n_open = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (numbers, not paths)

    def fail(*_):
        raise ZeroDivisionError

    for backend in ("threads", "auto"):
        with pytest.raises(ZeroDivisionError):
            TensorLoader(opened, backend=backend).load(DENSE, fail)
    assert len(os.listdir("/proc/self/fd")) == n_open  # noqa: PTH208 (likewise)


def test_it_is_called_in_a_thread_beside_a_running_loop(opened):
    async def main():
        kept = Kept(opened)
        await asyncio.to_thread(TensorLoader(opened).load, DENSE, kept)
        return kept

    assert bytes(asyncio.run(main()).data[DENSE[0]]) == opened.read(DENSE[0]).tobytes()


def refusing_rings(monkeypatch):
    """Let every ``uring`` be refused; what is opened instead is in the list."""
    real_open, opened_as = tensors.open_backend, []

    def opening(name, files, **options):
        if name == "uring":
            raise BackendUnavailableError("uring", "emfile", "raise `ulimit -n`")
        opened_as.append(name)
        return real_open(name, files, **options)

    monkeypatch.setattr(tensors, "open_backend", opening)
    return opened_as


def test_a_backend_that_cannot_be_had_twice_is_no_reason_to_fail(opened, monkeypatch):
    opened_as = refusing_rings(monkeypatch)
    kept = Kept(opened)
    TensorLoader(opened, backend="uring", otherwise="threads").load(DENSE, kept)
    assert opened_as == ["threads"]
    assert bytes(kept.data[DENSE[0]]) == opened.read(DENSE[0]).tobytes()


def test_a_backend_that_was_asked_for_is_not_replaced(opened, monkeypatch):
    refusing_rings(monkeypatch)
    with pytest.raises(BackendUnavailableError):
        TensorLoader(opened, backend="uring", otherwise="uring").load(DENSE, Kept(opened))


def test_without_descriptors_for_a_loop_the_error_says_what_to_raise(opened, monkeypatch):
    def refuse(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.Runner, "get_loop", refuse)
    with pytest.raises(ReadError, match="ulimit -n"):
        TensorLoader(opened).load(DENSE, Kept(opened))
