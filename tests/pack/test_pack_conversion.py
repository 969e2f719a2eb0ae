"""A conversion reads once, writes once, in little memory, and refuses before it writes."""

import asyncio
import os
import threading
import tracemalloc
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Q
from gguf.gguf_writer import GGUFWriter
from pack_faults import hook
from small_moe import convert, make_small_moe, names, pack_files, rebuild_source

from tieredmoe.errors import GGUFError, MetadataError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import PackProgress, create_pack, open_pack
from tieredmoe.pack import progress as progress_module
from tieredmoe.pack import writer as writer_module

# --- once -------------------------------------------------------------------------------------


def test_source_bytes_are_read_once_and_pack_bytes_written_once(model, tmp_path, monkeypatch):
    inventory = open_inventory(model.paths[0])
    touched = {"preadv": defaultdict(list), "pwrite": defaultdict(list)}

    def recording(function):
        real = getattr(os, function)

        def recorded(fd, data, offset):
            n = real(fd, data, offset)
            touched[function][os.fstat(fd).st_ino].append((offset, offset + n))
            return n

        monkeypatch.setattr(os, function, recorded)

    # The final check reads a few bytes of the pack; it is not part of the copy.
    monkeypatch.setattr(writer_module, "open_pack", lambda _: None)
    recording("preadv")
    recording("pwrite")
    report = asyncio.run(create_pack(inventory, tmp_path / "pack"))

    sizes = {path.stat().st_ino: path.stat().st_size for path in model.paths}
    assert touched["preadv"].keys() == sizes.keys()
    for inode, ranges in touched["preadv"].items():
        ranges.sort()
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == sizes[inode]
    for ranges in touched["pwrite"].values():
        ranges.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    n_written = sum(end - begin for of in touched["pwrite"].values() for begin, end in of)
    assert report.source_read_nbytes == sum(sizes.values())
    assert report.written_nbytes == n_written


def test_the_report_accounts_for_every_byte_of_the_pack(model, tmp_path):
    report = convert(model, tmp_path / "pack")
    pack = open_pack(tmp_path / "pack")
    padding = sum(
        pack.spec.n_experts * (layout.stride - layout.payload_nbytes)
        for layout in pack.spec.layouts.values()
    )
    n_files = sum(map(len, pack_files(tmp_path / "pack").values()))
    assert report.zero_nbytes == padding
    assert report.written_nbytes + padding == n_files


def test_memory_stays_at_a_few_buffers(tmp_path):
    writer = GGUFWriter(tmp_path / "sparse.gguf", "deepseek4")
    for key, value in {"block_count": 1, "expert_count": 2, "expert_used_count": 1}.items():
        writer.add_uint32(f"deepseek4.{key}", value)
    shape = (2, 2 << 10, 12 << 10)  # slabs of 24 MiB, larger than all buffers
    for role in ("gate", "up", "down"):
        of_role = shape if role != "down" else (2, shape[2], shape[1])
        nbytes = 2 * shape[1] * shape[2] // 32 * 34
        name = f"blk.0.ffn_{role}_exps.weight"
        writer.add_tensor_info(name, of_role, np.dtype(np.float32), nbytes, raw_dtype=Q.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    path = tmp_path / "sparse.gguf"
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + 3 * nbytes)
    tracemalloc.start()
    try:
        report = asyncio.run(create_pack(path, tmp_path / "pack"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.source_read_nbytes > 150 << 20
    assert peak < 16 << 20


def test_progress_reaches_the_end_of_both_phases_in_the_loops_thread(model, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "CHUNK_NBYTES", 4096)
    monkeypatch.setattr(progress_module, "PROGRESS_INTERVAL_S", 0)
    seen, threads = [], set()

    def progress(report: PackProgress):
        seen.append(report)
        threads.add(threading.current_thread())

    convert(model, tmp_path / "pack", progress=progress)
    n_source = sum(path.stat().st_size for path in model.paths)
    copied = [report.done_nbytes for report in seen if report.phase == "copy"]
    assert copied[0] == 0
    assert copied[-1] == n_source
    assert copied == sorted(copied)
    assert len(copied) > 5
    assert {report.total_nbytes for report in seen if report.phase == "copy"} == {n_source}
    assert seen[-1].phase == "sync"
    assert seen[-1].done_nbytes == seen[-1].total_nbytes
    assert threads == {threading.main_thread()}


def test_progress_is_bounded_in_rate(model, tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "CHUNK_NBYTES", 512)
    monkeypatch.setattr(progress_module, "PROGRESS_INTERVAL_S", 3600)
    seen = []
    convert(model, tmp_path / "pack", progress=seen.append)
    assert [report.phase for report in seen] == ["copy", "copy", "sync"]


# --- refused before a byte is written ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "directory", "dangling link"])
def test_an_existing_destination_is_refused_and_left_alone(model, tmp_path, kind):
    dest = tmp_path / "pack"
    if kind == "file":
        dest.write_text("mine")
    elif kind == "directory":
        dest.mkdir()
    else:
        dest.symlink_to(tmp_path / "nowhere")
    before = names(tmp_path)
    with pytest.raises(PackError, match="pack: already exists"):
        convert(model, dest)
    assert names(tmp_path) == before


def test_a_missing_parent_is_named(model, tmp_path):
    with pytest.raises(PackError, match=r"no/pack: cannot be made: .*no is not a directory"):
        convert(model, tmp_path / "no" / "pack")


def test_an_unwritable_parent_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PackError, match="is not writable"):
        convert(model, tmp_path / "pack")


def test_every_problem_of_a_destination_is_listed_at_once(model, tmp_path, monkeypatch):
    (tmp_path / "pack").mkdir()
    full = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*full[:3], 1, 1, *full[5:])))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PackError) as caught:
        convert(model, tmp_path / "pack")
    for problem in ("already exists", "not writable", "needs ", "make room"):
        assert problem in str(caught.value)


def test_the_space_asked_for_is_exactly_the_packs(model, tmp_path):
    convert(model, tmp_path / "pack")
    layout = open_pack(tmp_path / "pack").manifest.layout
    n_files = sum(map(len, pack_files(tmp_path / "pack").values()))
    assert writer_module.pack_nbytes(layout) == n_files


def test_a_foreign_directory_in_the_way_is_refused_and_left_alone(model, tmp_path):
    partial = tmp_path / "pack.partial"
    partial.mkdir()
    (partial / "conversion.lock").touch()
    (partial / "thesis.txt").write_text("mine")
    with pytest.raises(PackError, match="in the way and not a leftover of ours"):
        convert(model, tmp_path / "pack")
    assert (partial / "thesis.txt").read_text() == "mine"


def test_two_conversions_to_one_place_are_refused(model, tmp_path):
    second = []

    async def start_second():
        try:
            await create_pack(model.paths[0], tmp_path / "pack")
        except PackError as error:
            second.append(str(error))

    def at_first_write():
        if not second:
            asyncio.run(start_second())

    with pytest.MonkeyPatch.context() as patch:
        hook(patch, "pwrite", at_first_write)
        convert(model, tmp_path / "pack")
    assert "is being written by another conversion" in second[0]
    assert rebuild_source(tmp_path / "pack") == model.files


@pytest.mark.parametrize("what", ["no file", "not a GGUF", "no experts", "truncated"])
def test_a_source_that_will_not_do_leaves_nothing_behind(model, tmp_path, what):
    bad = tmp_path / "bad.gguf"
    if what == "not a GGUF":
        bad.write_bytes(b"PK\3\4" * 100)
    elif what == "no experts":
        writer = GGUFWriter(bad, "llama")
        writer.add_tensor("output.weight", np.zeros((2, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    elif what == "truncated":
        bad = make_small_moe(bad).paths[0]
        os.truncate(bad, bad.stat().st_size - 40)
    before = names(tmp_path)
    with pytest.raises((GGUFError, MetadataError), match=r"bad\.gguf"):
        asyncio.run(create_pack(bad, tmp_path / "pack"))
    assert names(tmp_path) == before
