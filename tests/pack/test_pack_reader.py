"""An opened pack answers for any expert and any tensor, and for nothing else."""

import os
import tracemalloc

import numpy as np
import pytest

from tieredmoe.pack import Extent, open_pack
from tieredmoe.spec import ExpertKey


@pytest.fixture
def pack(small_pack):
    return open_pack(small_pack[0])


def test_records_of_a_layer_are_a_stride_apart(pack):
    assert pack.locate(ExpertKey(0, 0)) == Extent(0, 0, 4096)
    assert pack.locate(ExpertKey(0, 3)) == Extent(0, 3 * 4096, 4096)
    assert pack.locate(ExpertKey(1, 2)) == Extent(0, (4 + 2) * 4096, 4096)


def test_records_do_not_overlap_and_fill_the_files(pack):
    extents = sorted(map(pack.locate, pack.spec.keys()))
    ends = [extent.offset + extent.nbytes for extent in extents]
    assert [extent.offset for extent in extents] == [0, *ends[:-1]]
    assert ends[-1] == pack.data_files[0].stat().st_size


@pytest.mark.parametrize("key", [(2, 0), (-1, 0), (0, 4), (0, -1)])
def test_an_expert_that_does_not_exist_is_a_key_error(pack, key):
    with pytest.raises(KeyError):
        pack.locate(ExpertKey(*key))
    with pytest.raises(KeyError):
        pack.digests(ExpertKey(*key))


def test_an_unknown_tensor_is_a_key_error(pack):
    with pytest.raises(KeyError):
        pack.read("blk.9.nothing")


def test_a_tensor_is_read_into_fresh_writable_memory(pack):
    first = pack.read("blk.0.ffn_gate_exps.weight")
    first[:] = 0
    assert first.dtype == np.uint8
    assert first.nbytes == pack.tensors["blk.0.ffn_gate_exps.weight"].nbytes
    assert pack.read("blk.0.ffn_gate_exps.weight").any()


def test_the_pack_keeps_no_file_open(small_pack, monkeypatch):
    opened, closed = [], []
    real_open, real_close = os.open, os.close
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(real_open(*a, **k)) or opened[-1])
    monkeypatch.setattr(os, "close", lambda fd: closed.append(fd) or real_close(fd))
    open_pack(small_pack[0]).read("output.weight")
    assert opened
    assert opened == closed


def test_the_model_of_a_pack_is_that_of_its_source(small_pack, pack):
    assert pack.spec.architecture == "deepseek4"
    assert (pack.spec.n_experts, pack.spec.top_k, pack.spec.layers) == (4, 2, (0, 1))
    assert [shard.name for shard in pack.manifest.layout.shards] == list(small_pack[1].files)


def test_locating_an_expert_allocates_its_answer_and_no_more(pack):
    key = ExpertKey(1, 3)
    pack.locate(key)
    tracemalloc.start()
    try:
        for _ in range(1000):
            pack.locate(key)
        assert tracemalloc.get_traced_memory()[0] < 2000
    finally:
        tracemalloc.stop()
