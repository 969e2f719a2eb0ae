import errno
import os

import pytest

from tieredmoe.backends.blockread import Effort, read_block
from tieredmoe.backends.probe import DataFile
from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ReadError

PAGE = 4096
CONTENT = os.urandom(8 * PAGE)


class Script:
    """A ``preadv`` that follows a script: a number caps the count, an errno name is raised."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.offsets = []

    def __call__(self, fd, targets, offset):
        self.offsets.append(offset)
        step = self.steps.pop(0) if self.steps else len(CONTENT)
        if isinstance(step, str):
            code = getattr(errno, step)
            raise OSError(code, os.strerror(code))
        (target,) = targets
        data = CONTENT[offset : offset + min(step, target.nbytes)]
        target[: len(data)] = data
        return len(data)


class Reading:
    """One block of ``nbytes`` at ``offset``, poisoned, read by a script."""

    def __init__(self, tmp_path, *steps, offset=0, nbytes=4 * PAGE, alignment=PAGE):
        self.path = tmp_path / "experts.bin"
        self.path.write_bytes(CONTENT)
        self.target = bytearray(b"\xee" * nbytes)
        self.script = Script(*steps)
        self.effort = Effort()
        self.op = ReadOp(0, offset, memoryview(self.target), 0x7F0000000000)
        self.alignment = alignment

    def run(self):
        fd = os.open(self.path, os.O_RDONLY)
        try:
            file = DataFile(self.path, fd, direct=False, reason="asked")
            how = {"alignment": self.alignment, "effort": self.effort}
            read_block(self.op, file, preadv=self.script, **how)
        finally:
            os.close(fd)

    @property
    def right(self):
        return self.target == CONTENT[self.op.offset : self.op.offset + len(self.target)]


def test_a_block_is_one_call(tmp_path):
    reading = Reading(tmp_path, offset=PAGE)
    reading.run()
    assert reading.right
    assert reading.script.offsets == [PAGE]
    assert (reading.effort.short_reads, reading.effort.retries) == (0, 0)


def test_short_counts_of_whole_pages_are_continued_where_they_ended(tmp_path):
    reading = Reading(tmp_path, PAGE, PAGE, PAGE, PAGE)
    reading.run()
    assert reading.right
    assert reading.script.offsets == [0, PAGE, 2 * PAGE, 3 * PAGE]
    assert reading.effort.short_reads == 3


def test_an_odd_short_count_reads_the_block_once_more_from_its_start(tmp_path):
    reading = Reading(tmp_path, PAGE, 100)
    reading.run()
    assert reading.right
    assert reading.script.offsets == [0, PAGE, 0]
    assert (reading.effort.short_reads, reading.effort.retries) == (2, 1)


def test_a_second_odd_short_count_is_an_error(tmp_path):
    reading = Reading(tmp_path, 100, 200)
    with pytest.raises(ReadError, match="expected 16384 bytes and got 200 of a file"):
        reading.run()
    assert reading.script.offsets == [0, 0]


def test_without_alignment_an_odd_count_is_continued(tmp_path):
    reading = Reading(tmp_path, 100, 7, offset=3, nbytes=1000, alignment=1)
    reading.run()
    assert reading.right
    assert reading.script.offsets == [3, 103, 110]


def test_the_files_end_says_what_was_expected_and_what_came(tmp_path):
    reading = Reading(tmp_path, offset=6 * PAGE)
    with pytest.raises(ReadError) as failure:
        reading.run()
    assert str(failure.value) == (
        f"{reading.path}: read of 16384 bytes at offset 24576: expected 16384 bytes and got 8192 "
        "of a file that has 32768, as when it was opened (unexpected end of file)"
    )
    assert failure.value.errno == 0


@pytest.mark.parametrize("name", ["EINTR", "EAGAIN"])
def test_interruptions_are_retried_three_times(tmp_path, name):
    reading = Reading(tmp_path, name, name, name)
    reading.run()
    assert reading.right
    assert reading.effort.retries == 3


RETRIED_ONCE = ["EIO", "ENODATA", "EILSEQ", "EREMOTEIO", "ETIMEDOUT"]


@pytest.mark.parametrize("name", RETRIED_ONCE)
def test_a_device_error_is_retried_once(tmp_path, name):
    reading = Reading(tmp_path, PAGE, name)
    reading.run()
    assert reading.right
    assert reading.effort.retries == 1


@pytest.mark.parametrize(
    ("name", "n_calls"),
    [("EINTR", 4), ("EAGAIN", 4)]
    + [(name, 2) for name in RETRIED_ONCE]
    + [(name, 1) for name in ("EINVAL", "EFAULT", "EBADF", "ESTALE", "ENOMEM", "EPERM", "EISDIR")],
)
def test_an_error_that_stays_is_final_and_names_everything(tmp_path, name, n_calls):
    reading = Reading(tmp_path, *[name] * 10, offset=PAGE, nbytes=2 * PAGE)
    with pytest.raises(ReadError) as failure:
        reading.run()
    error = failure.value
    assert (error.path, error.offset, error.nbytes) == (reading.path, PAGE, 2 * PAGE)
    assert error.errno == getattr(errno, name)
    assert os.strerror(error.errno) in str(error)
    assert len(reading.script.offsets) == n_calls


def test_a_refused_alignment_names_address_and_alignment(tmp_path):
    reading = Reading(tmp_path, "EINVAL")
    with pytest.raises(ReadError, match="at address 0x7f0000000000 with alignment 4096"):
        reading.run()


@pytest.mark.parametrize("last", [100, "EPERM"])
def test_no_view_of_the_target_outlives_the_read_even_in_its_error(tmp_path, last):
    reading = Reading(tmp_path, PAGE, "EIO", 100, last)
    with pytest.raises(ReadError) as failure:
        reading.run()
    reading.op.target.release()
    reading.target.clear()  # raises BufferError while a view is alive
    assert failure.value.__traceback__ is not None
