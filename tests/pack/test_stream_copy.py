"""What a copy says is written, is; and of several failures, the one that began is told."""

import threading

import pytest

from tieredmoe.pack import stream_copy as stream_copy_module
from tieredmoe.pack.stream_copy import Part, Stream, StreamCopy, first_failure
from tieredmoe.spec import PAGE_NBYTES

N_PAGES = 12


class Zeros:
    """A file of zeros, whose pages from ``bad_from`` on cannot be read; waits for ``ready``."""

    def __init__(self, bad_from=N_PAGES, ready=None):
        self.bad_from = bad_from
        self.ready = ready

    def read(self, offset, nbytes, buffer):
        if offset // PAGE_NBYTES >= self.bad_from:
            assert self.ready is None or self.ready.wait(10)
            raise OSError("bad sector")
        return buffer[:nbytes]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(stream_copy_module, "WINDOW_NBYTES", PAGE_NBYTES)
    monkeypatch.setattr(stream_copy_module, "N_WRITERS", 1)


def whole(file_index, n_pages=N_PAGES):
    return Stream(file_index, 0, [Part(file_index, 0, n_pages * PAGE_NBYTES)])


def test_a_stream_whose_last_writes_were_left_out_is_not_copied():
    all_read, go_on = threading.Event(), threading.Event()
    n_read, written = iter(range(4)), []

    def write(target_index, data, offset):
        assert go_on.wait(10)
        written.append((target_index, offset))

    def advance(nbytes):
        if next(n_read) == 3:
            all_read.set()

    # While the first write waits, all of the good stream is read, and then the other one fails.
    readers = [Zeros(), Zeros(bad_from=0, ready=all_read)]
    with StreamCopy(readers, write, advance, stream_nbytes=N_PAGES * PAGE_NBYTES) as copy:
        good = copy.start(whole(0, 4))
        bad = copy.start(whole(1, 1))
        assert isinstance(bad.exception(10), OSError)
        go_on.set()
        assert good.exception(10) is not None
        assert first_failure([good, bad]) is bad.exception()
    assert len(written) < 4


def test_a_write_that_fails_in_the_middle_of_a_stream_is_what_is_told():
    reached = threading.Event()

    def write(target_index, data, offset):
        reached.set()
        raise OSError("disk full")

    class Slow(Zeros):
        def read(self, offset, nbytes, buffer):
            if offset:
                assert reached.wait(10)
            return super().read(offset, nbytes, buffer)

    with StreamCopy([Slow()], write, lambda _: None, stream_nbytes=N_PAGES * PAGE_NBYTES) as copy:
        streams = [copy.start(whole(0)) for _ in range(3)]
        for stream in streams:
            assert stream.exception(10) is not None
        assert str(first_failure(streams)) == "disk full"
