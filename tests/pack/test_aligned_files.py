"""Whole pages past the page cache, or through it with the reason; every byte either way."""

import errno
import os

import pytest

from tieredmoe.errors import GGUFError, PackError
from tieredmoe.pack.aligned_files import AlignedReader, AlignedWriter, page_buffers
from tieredmoe.spec import PAGE_NBYTES

DATA = bytes(os.urandom(3 * PAGE_NBYTES + 700))


@pytest.fixture
def path(tmp_path):
    """A file of some pages and a rest."""
    (tmp_path / "file").write_bytes(DATA)
    return tmp_path / "file"


@pytest.fixture
def reader(path):
    """The file, open."""
    reader = AlignedReader(path, GGUFError)
    yield reader
    reader.close()


def read(reader, offset, nbytes):
    return bytes(reader.read(offset, nbytes, page_buffers(1, 8 * PAGE_NBYTES)[0].view))


def refuse_direct(monkeypatch, *, at_open):
    """Make direct I/O impossible; the rest works."""
    real_open, real_preadv, real_pwrite = os.open, os.preadv, os.pwrite
    direct = set()

    def opening(path, flags, *mode):
        if at_open and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags & ~os.O_DIRECT, *mode)
        direct.discard(fd)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def checked(real):
        def call(fd, *arguments):
            if fd in direct:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, *arguments)

        return call

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "preadv", checked(real_preadv))
    monkeypatch.setattr(os, "pwrite", checked(real_pwrite))


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 9000, len(DATA) - 1])
@pytest.mark.parametrize("nbytes", [1, 700, 4097])
def test_any_bytes_are_read(reader, offset, nbytes):
    nbytes = min(nbytes, len(DATA) - offset)
    assert read(reader, offset, nbytes) == DATA[offset : offset + nbytes]
    assert reader.fallback is None
    assert reader.read_nbytes == nbytes


@pytest.mark.parametrize("at_open", [True, False])
def test_a_refusal_of_direct_reads_is_a_reason_and_not_an_end(path, monkeypatch, at_open):
    refuse_direct(monkeypatch, at_open=at_open)
    reader = AlignedReader(path, GGUFError)
    assert read(reader, 100, 9000) == DATA[100:9100]
    assert "no direct I/O (Invalid argument)" in reader.fallback
    reader.close()


@pytest.mark.parametrize("at_open", [True, False])
def test_a_refusal_of_direct_writes_is_a_reason_and_not_an_end(tmp_path, monkeypatch, at_open):
    refuse_direct(monkeypatch, at_open=at_open)
    writer = AlignedWriter(tmp_path / "new", len(DATA))
    (buffer,) = page_buffers(1, 4 * PAGE_NBYTES)
    buffer.view[: len(DATA)] = DATA
    writer.write(buffer.view, 0)
    writer.sync()
    assert (tmp_path / "new").read_bytes() == DATA
    assert "no direct I/O (Invalid argument)" in writer.fallback
    writer.close()


@pytest.mark.parametrize("piece", [4096, 512, 5000])
def test_short_reads_are_continued(reader, monkeypatch, piece):
    real = os.preadv

    def short(fd, buffers, offset):
        # The disk reads whole sectors; that fewer bytes are told of is what is played here.
        return min(piece, real(fd, buffers, offset))

    monkeypatch.setattr(os, "preadv", short)
    assert read(reader, 10, len(DATA) - 10) == DATA[10:]
    assert (reader.fallback is not None) == (piece % 512 != 0)


def test_a_read_past_the_end_names_where_it_is(reader):
    with pytest.raises(GGUFError, match=rf"ends at byte {len(DATA)}, 50 bytes short of a read"):
        read(reader, len(DATA) - 50, 100)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PackError, match="gone: cannot be opened: No such file"):
        AlignedReader(tmp_path / "gone", PackError)


def test_a_write_that_makes_no_progress_is_an_error(tmp_path, monkeypatch):
    writer = AlignedWriter(tmp_path / "new", 8192)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="Input/output error"):
        writer.write(page_buffers(1, 8192)[0].view, 0)
    writer.close()


def test_what_a_file_held_is_left_alone_when_it_is_opened_again(path):
    writer = AlignedWriter(path, len(DATA))
    writer.sync()
    writer.close()
    assert path.read_bytes() == DATA


def test_buffers_begin_on_pages_and_do_not_overlap():
    buffers = page_buffers(3, 2 * PAGE_NBYTES)
    assert all(buffer.address % PAGE_NBYTES == 0 for buffer in buffers)
    for i, buffer in enumerate(buffers):
        buffer.view[:] = bytes([i]) * buffer.nbytes
    assert [set(buffer.view) for buffer in buffers] == [{0}, {1}, {2}]
