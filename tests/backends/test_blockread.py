import errno
import os

import pytest

from tieredmoe.backends.blockread import blocks_of, read_block
from tieredmoe.backends.datafile import DataFile
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

    def __init__(self, tmp_path, *steps, offset=0, nbytes=4 * PAGE, alignment=PAGE, needed=None):
        self.path = tmp_path / "experts.bin"
        self.path.write_bytes(CONTENT)
        self.target = bytearray(b"\xee" * nbytes)
        self.script = Script(*steps)
        self.op = ReadOp(0, offset, memoryview(self.target), 0x7F0000000000, needed)
        self.alignment = alignment

    def run(self):
        file = DataFile(self.path, os.open(self.path, os.O_RDONLY), direct=False, reason="asked")
        try:
            (self.block,) = blocks_of(self.op, file, alignment=self.alignment)
            read_block(self.block, self.script)
        finally:
            file.close()

    @property
    def right(self):
        return self.target == CONTENT[self.op.offset : self.op.offset + len(self.target)]


def test_a_block_is_one_call(tmp_path):
    reading = Reading(tmp_path, offset=PAGE)
    reading.run()
    assert reading.right
    assert reading.script.offsets == [PAGE]
    assert (reading.block.short_reads, reading.block.retries) == (0, 0)


def test_short_counts_of_whole_pages_are_continued_where_they_ended(tmp_path):
    reading = Reading(tmp_path, PAGE, PAGE, PAGE, PAGE)
    reading.run()
    assert reading.right
    assert reading.script.offsets == [0, PAGE, 2 * PAGE, 3 * PAGE]
    assert reading.block.short_reads == 3


def test_an_odd_short_count_reads_the_block_once_more_from_its_start(tmp_path):
    reading = Reading(tmp_path, PAGE, 100)
    reading.run()
    assert reading.right
    assert reading.script.offsets == [0, PAGE, 0]
    assert (reading.block.short_reads, reading.block.retries) == (2, 1)


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


def test_what_is_needed_is_enough_and_padding_may_lie_behind_the_files_end(tmp_path):
    reading = Reading(tmp_path, offset=6 * PAGE, needed=2 * PAGE - 7)
    reading.run()
    assert reading.target[: 2 * PAGE] == CONTENT[6 * PAGE :]
    assert reading.script.offsets == [6 * PAGE]
    assert reading.block.short_reads == 0


def test_one_byte_less_than_needed_is_not_enough(tmp_path):
    reading = Reading(tmp_path, offset=6 * PAGE, needed=2 * PAGE + 1)
    with pytest.raises(ReadError, match="expected 8193 bytes and got 8192 of a file"):
        reading.run()


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
    assert reading.block.retries == 3


RETRIED_ONCE = ["EIO", "ENODATA", "EILSEQ", "EREMOTEIO", "ETIMEDOUT"]


@pytest.mark.parametrize("name", RETRIED_ONCE)
def test_a_device_error_is_retried_once(tmp_path, name):
    reading = Reading(tmp_path, PAGE, name)
    reading.run()
    assert reading.right
    assert reading.block.retries == 1


@pytest.mark.parametrize(
    ("name", "n_calls"),
    [("EINTR", 4), ("EAGAIN", 4)]
    + [(name, 2) for name in (*RETRIED_ONCE, "EBADF", "ESTALE")]
    + [(name, 1) for name in ("EINVAL", "EFAULT", "ENOMEM", "EPERM", "EISDIR")],
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


@pytest.mark.parametrize(
    ("n_pages", "needed", "n_splits", "expected"),
    [
        (8, None, 1, [(0, 8, 8 * PAGE)]),
        (8, None, 4, [(0, 2, 2 * PAGE), (2, 2, 2 * PAGE), (4, 2, 2 * PAGE), (6, 2, 2 * PAGE)]),
        (7, None, 2, [(0, 4, 4 * PAGE), (4, 3, 3 * PAGE)]),
        (3, None, 8, [(0, 1, PAGE), (1, 1, PAGE), (2, 1, PAGE)]),
        (8, 5 * PAGE + 1, 4, [(0, 2, 2 * PAGE), (2, 2, 2 * PAGE), (4, 2, PAGE + 1)]),
    ],
)
def test_a_block_is_split_into_parts_of_whole_pages_without_padding(
    tmp_path, n_pages, needed, n_splits, expected
):
    op = ReadOp(0, 0, memoryview(bytearray(n_pages * PAGE)), 0, needed)
    blocks = blocks_of(op, None, alignment=PAGE, n_splits=n_splits)
    assert [(b.start // PAGE, b.nbytes // PAGE, b.needed_nbytes) for b in blocks] == expected


def test_parts_read_their_own_place_and_report_the_whole_block(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(CONTENT)
    file = DataFile(path, os.open(path, os.O_RDONLY), direct=False, reason="asked")
    target = bytearray(6 * PAGE)
    op = ReadOp(0, 4 * PAGE, memoryview(target), 0)
    first, second, third = blocks_of(op, file, alignment=PAGE, n_splits=3)
    read_block(second, os.preadv)
    assert target == bytes(2 * PAGE) + CONTENT[6 * PAGE :] + bytes(2 * PAGE)
    with pytest.raises(ReadError, match="expected 24576 bytes and got 16384") as failure:
        read_block(third, os.preadv)
    assert (failure.value.offset, failure.value.nbytes) == (4 * PAGE, 6 * PAGE)
    assert first.address == 0
    file.close()
