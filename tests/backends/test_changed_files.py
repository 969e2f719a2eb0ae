"""A read that fails says so when its file is no longer the one that was opened."""

import errno
import os

import pytest

from tieredmoe.backends.blockread import blocks_of, read_block
from tieredmoe.backends.datafile import DataFile
from tieredmoe.backends.protocol import ReadOp
from tieredmoe.errors import ReadError

PAGE = 4096


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(bytes(4 * PAGE))
    fd = os.open(path, os.O_RDONLY)
    yield DataFile(path, fd, direct=False, reason="asked")
    os.close(fd)


def failure(file, *, offset=4 * PAGE, preadv=os.preadv):
    op = ReadOp(0, offset, memoryview(bytearray(PAGE)), 0)
    with pytest.raises(ReadError) as caught:
        read_block(*blocks_of(op, file, alignment=PAGE), preadv)
    assert (caught.value.path, caught.value.offset, caught.value.nbytes) == (
        file.path,
        offset,
        PAGE,
    )
    return caught.value


def refuses(fd, targets, offset):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def replace(file):
    other = file.path.with_name("other")
    other.write_bytes(bytes(4 * PAGE))
    other.replace(file.path)


CHANGES = {
    "written": (
        lambda file: os.utime(file.path, ns=(1, 1)),
        "was changed after it was opened: it had 16384 bytes, now 16384",
    ),
    "grown": (
        lambda file: os.truncate(file.path, 4 * PAGE + 1),
        "was changed after it was opened: it had 16384 bytes, now 16385",
    ),
    "replaced": (replace, "was replaced by another after it was opened"),
    "deleted": (lambda file: file.path.unlink(), "was deleted or moved after it was opened"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_device_error_of_a_changed_file_says_so_and_keeps_its_errno(file, change):
    make, fact = CHANGES[change]
    make(file)
    error = failure(file, offset=0, preadv=refuses)
    assert f"the read failed; the file {fact} (EIO: " in str(error)
    assert (error.kind, error.errno) == ("changed", errno.EIO)


@pytest.mark.parametrize("change", CHANGES)
def test_the_end_of_a_changed_file_says_so(file, change):
    make, fact = CHANGES[change]
    make(file)
    error = failure(file, offset=8 * PAGE)
    assert f"expected 4096 bytes and got 0 of a file that {fact} (unexp" in str(error)
    assert (error.kind, error.errno) == ("changed", 0)


def test_the_end_of_a_file_that_was_cut_short_is_its_end(file):
    os.truncate(file.path, PAGE)
    error = failure(file, offset=PAGE)
    assert "was truncated after it was opened: it had 16384 bytes, now 4096" in str(error)
    assert error.kind == "eof"


def test_failures_of_an_unchanged_file_keep_their_own_kind(file):
    assert failure(file).kind == "eof"
    assert failure(file, offset=0, preadv=refuses).kind == "EIO"


def test_a_file_that_will_not_tell_leaves_the_error_as_it_is(tmp_path):
    path = tmp_path / "experts" / "0.bin"
    path.parent.mkdir()
    path.write_bytes(bytes(PAGE))
    fd = os.open(path, os.O_RDONLY)
    file = DataFile(path, fd, direct=False, reason="asked")
    os.close(fd)
    path.unlink()
    path.parent.rmdir()
    path.parent.write_bytes(b"now a file")
    assert failure(file, offset=0).kind == "EBADF"


def test_a_name_that_cannot_be_looked_up_is_no_change(file):
    file.path.unlink()
    file.path.parent.rmdir()
    file.path.parent.write_bytes(b"now a file")
    assert failure(file, offset=0, preadv=refuses).kind == "EIO"


def test_a_kind_can_be_no_known_number(file):
    assert ReadError(path="p", offset=0, nbytes=1, errno=4321, fact="odd").kind == "4321"
