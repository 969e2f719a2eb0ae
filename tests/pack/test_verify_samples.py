"""Verifying a sample, in bounded memory, past the page cache: what is read and what is promised."""

import asyncio
import os
from itertools import pairwise

import pytest
from drive_stage import make_pack, mirror, split
from small_moe import flip

from tieredmoe.errors import ConfigError
from tieredmoe.pack import open_pack, verify_drives, verify_pack
from tieredmoe.pack import spans as spans_module
from tieredmoe.pack.manifest import digest_of
from tieredmoe.pack.spans import Span, SpanPart, SpanReader, sampled


def verify(path, **options):
    return asyncio.run(verify_pack(path, **options))


def test_a_full_verification_reads_every_byte_once(path):
    report = verify(path)
    assert report.read_nbytes == report.total_nbytes == open_pack(path).manifest.layout.data_nbytes
    assert report.n_read == report.n_parts
    assert report.share_found == 0


def test_a_sample_reads_so_many_parts_and_says_what_it_would_have_found(path):
    report = verify(path, sample=3)
    assert report.n_read == 3
    assert 0 < report.read_nbytes < report.total_nbytes
    assert report.share_found == pytest.approx(1 - 0.05 ** (1 / 3))


def test_a_sample_of_more_parts_than_there_are_is_all_of_them(path):
    assert verify(path, sample=10**6) == verify(path)


@pytest.mark.parametrize("sample", [0, -1, True])
def test_a_sample_of_nothing_is_refused(path, sample):
    with pytest.raises(ConfigError, match="it must be 1 or more parts"):
        verify(path, sample=sample)


def test_the_same_seed_chooses_the_same_parts(pack):
    key = open_pack(pack).spec.keys()
    for each in key:
        flip(pack / "experts-00000.bin", open_pack(pack).locate(each).offset)
    first, again = (verify(pack, sample=4, seed=7) for _ in range(2))
    assert first == again
    assert len({tuple(d.key for d in verify(pack, sample=4).damage) for _ in range(20)}) > 1


def test_every_part_is_chosen_now_and_then_and_larger_ones_more_often():
    spans = [Span(0, i, str(i), (SpanPart(n, None),)) for i, n in enumerate((1, 10, 100))]
    counts = dict.fromkeys("012", 0)
    for seed in range(2000):
        (span,) = sampled(spans, 1, seed=seed)
        counts[span.what] += 1
    assert counts["0"] > 0
    assert 0.85 < counts["2"] / 2000 < 0.95  # 100 / 111
    assert [s.what for s in sampled(spans, 2, seed=1)] == sorted(
        s.what for s in sampled(spans, 2, seed=1)
    )


def test_samples_of_drives_and_copies_are_taken_from_all_of_them(tmp_path):
    pack, _ = make_pack(tmp_path)
    split(pack, tmp_path / "a", tmp_path / "b")
    report = asyncio.run(verify_drives(pack, sample=5))
    assert (report.n_read, report.damage) == (5, ())
    copied, _ = make_pack(tmp_path, seed=1)
    mirror(copied, tmp_path / "copy")
    whole = asyncio.run(verify_drives(copied))
    assert whole.n_parts == whole.n_read == 2 * verify(copied).n_parts


def test_memory_does_not_grow_with_the_pack(path, monkeypatch):
    made = []
    real = spans_module.page_buffers
    monkeypatch.setattr(
        spans_module, "page_buffers", lambda n, nbytes: made.append(n * nbytes) or real(n, nbytes)
    )
    verify(path)
    assert made == [spans_module.N_THREADS * (spans_module.PIECE_NBYTES + 8192)]


def test_no_more_batches_are_in_flight_than_threads_can_soon_take(tmp_path, monkeypatch):
    monkeypatch.setattr(spans_module, "BATCH_NBYTES", 1)
    (tmp_path / "f").write_bytes(bytes(4096))
    drawn, done = [], []

    def spans():
        for i in range(400):
            drawn.append(i)
            yield Span(0, i, str(i), (SpanPart(1, None),))

    def advance(nbytes):
        done.append(nbytes)
        assert len(drawn) - len(done) <= 2 * spans_module.N_THREADS + 1

    with SpanReader([tmp_path / "f"]) as reader:
        assert list(reader.failures(spans(), advance)) == []
    assert sum(done) == 400


def test_parts_that_cross_reads_are_compared_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(spans_module, "PIECE_NBYTES", 64)
    data = os.urandom(4096)
    (tmp_path / "f").write_bytes(data)
    cuts = [0, 1, 64, 65, 200, 333, 1024]
    parts = [SpanPart(b - a, digest_of(data[7 + a : 7 + b]), f"{a}") for a, b in pairwise(cuts)]
    whole = Span(0, 7, "record", tuple(parts))
    wrong = Span(0, 8, "record", tuple(parts))
    with SpanReader([tmp_path / "f"]) as reader:
        assert list(reader.failures([whole], lambda _: None)) == []
        failures = list(reader.failures([wrong], lambda _: None))
    assert [failure.what for failure in failures] == [f"record, {a}" for a in cuts[:-1]]
    assert [failure.offset for failure in failures] == [8 + a for a in cuts[:-1]]


def test_reads_are_direct_or_the_report_says_why_not(path, monkeypatch):
    flags_seen = []
    real = os.open

    def watching(name, flags, *arguments, **options):
        if str(name).endswith(".bin"):
            flags_seen.append(flags)
            if refuse and flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument")
        return real(name, flags, *arguments, **options)

    refuse = False
    monkeypatch.setattr(os, "open", watching)
    assert verify(path).fallbacks == ()
    assert sum(bool(flags & os.O_DIRECT) for flags in flags_seen) == 3
    refuse = True
    report = verify(path)
    assert report.damage == ()
    assert len(report.fallbacks) == 3
    assert "no direct I/O (Invalid argument)" in report.fallbacks[0]


def test_progress_ends_at_all_that_is_read(path):
    seen = []
    report = verify(path, sample=5, progress=seen.append)
    assert seen[-1] == (report.read_nbytes, report.read_nbytes, "verify")
    assert seen[0].done_nbytes == 0
