"""A conversion reads once, writes once, in little memory, and refuses before it writes."""

import asyncio
import os
import threading
import tracemalloc
from collections import defaultdict
from itertools import pairwise
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Q
from gguf.gguf_writer import GGUFWriter
from pack_faults import hook
from small_moe import convert, make_small_moe, names, pack_files, rebuild_source

from tieredmoe.errors import GGUFError, MetadataError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import PackProgress, create_pack, open_pack, planning
from tieredmoe.pack import aligned_files as aligned_files_module
from tieredmoe.pack import progress as progress_module
from tieredmoe.pack import stream_copy as stream_copy_module
from tieredmoe.pack import writer as writer_module
from tieredmoe.pack.source_files import SourceFiles
from tieredmoe.spec import PAGE_NBYTES

# --- once -------------------------------------------------------------------------------------


def test_source_pages_are_read_once_and_pack_pages_written_once(model, tmp_path, monkeypatch):
    touched = {"preadv": defaultdict(list), "pwrite": defaultdict(list)}

    def recording(function):
        real = getattr(os, function)

        def recorded(fd, data, offset):
            n = real(fd, data, offset)
            touched[function][str(Path(f"/proc/self/fd/{fd}").readlink())].append(
                (offset, offset + n)
            )
            return n

        monkeypatch.setattr(os, function, recorded)

    inventory = open_inventory(model.paths[0])
    # The headers' digests and the final check read a few bytes more; they are not the copy.
    monkeypatch.setattr(writer_module, "open_pack", lambda _: None)
    monkeypatch.setattr(SourceFiles, "header_digest", lambda *_: bytes(16))
    recording("preadv")
    recording("pwrite")
    report = asyncio.run(create_pack(inventory, tmp_path / "pack"))

    for path in model.paths:
        ranges = sorted(touched["preadv"][str(path)])
        assert ranges[0][0] == 0
        assert ranges[-1][1] == path.stat().st_size
        # Two runs may share a page, and no more than that.
        assert all(b[0] <= a[1] <= b[0] + PAGE_NBYTES for a, b in pairwise(ranges))
    data_files = {p: r for p, r in touched["pwrite"].items() if p.endswith(".bin")}
    for path, ranges in data_files.items():
        ranges.sort()
        assert all(a[1] == b[0] for a, b in pairwise(ranges)), path
        assert all(begin % PAGE_NBYTES == end % PAGE_NBYTES == 0 for begin, end in ranges)
    assert report.source_read_nbytes == sum(path.stat().st_size for path in model.paths)


def test_the_report_accounts_for_every_byte_of_the_pack(model, tmp_path):
    report = convert(model, tmp_path / "pack")
    layout = open_pack(tmp_path / "pack").manifest.layout
    n_manifest = (tmp_path / "pack" / "manifest.json").stat().st_size
    pages = sum(-(-file.nbytes // PAGE_NBYTES) * PAGE_NBYTES for file in layout.files)
    assert report.written_nbytes == pages + n_manifest
    assert report.source_read_nbytes == layout.source_nbytes
    assert (report.resumed_nbytes, report.reclaimed_nbytes) == (0, 0)


def test_memory_stays_at_a_few_buffers(tmp_path, monkeypatch):
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
    mapped = []
    monkeypatch.setattr(
        aligned_files_module.mmap, "mmap", lambda *a, **k: mapped.append(a[1]) or mmap(*a, **k)
    )
    tracemalloc.start()
    try:
        report = asyncio.run(create_pack(path, tmp_path / "pack"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.source_read_nbytes > 150 << 20
    assert peak < 16 << 20
    assert sum(mapped) < 128 << 20


def test_progress_reaches_the_end_in_the_loops_thread(model, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_copy_module, "WINDOW_NBYTES", 4096)
    monkeypatch.setattr(progress_module, "PROGRESS_INTERVAL_S", 0)
    seen, threads = [], set()

    def progress(report: PackProgress):
        seen.append(report)
        threads.add(threading.current_thread())

    convert(model, tmp_path / "pack", progress=progress)
    n_data = open_pack(tmp_path / "pack").manifest.layout.data_nbytes
    copied = [report.done_nbytes for report in seen]
    assert copied[0] == 0
    assert max(copied) == n_data
    assert len(copied) > 5
    assert {(report.phase, report.total_nbytes) for report in seen} == {("copy", n_data)}
    assert threads == {threading.main_thread()}


def test_progress_is_bounded_in_rate(model, tmp_path, monkeypatch):
    monkeypatch.setattr(stream_copy_module, "WINDOW_NBYTES", 4096)
    monkeypatch.setattr(progress_module, "PROGRESS_INTERVAL_S", 3600)
    seen = []
    convert(model, tmp_path / "pack", progress=seen.append)
    assert [report.done_nbytes for report in seen] == [0, seen[0].total_nbytes]


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
    assert planning.pack_nbytes(layout) == n_files


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
