"""A descriptor can be lost; the file behind it is the same one or none."""

import errno
import os

import pytest
from gated import n_open_descriptors

from tieredmoe.backends.datafile import DataFile


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(b"x" * 4096)
    return path


@pytest.fixture
def file(path):
    file = DataFile(path, os.open(path, os.O_RDONLY), direct=False, reason="asked")
    yield file
    file.close()


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_stale_descriptor_is_replaced_and_kept_for_those_who_read_through_it(file):
    stale = file.fd
    assert file.reopen(stale, code=errno.ESTALE)
    fresh = file.fd
    assert fresh != stale
    assert is_open(stale)
    file.close()
    assert not is_open(stale)
    assert not is_open(fresh)


def test_who_comes_second_finds_it_done(file):
    stale = file.fd
    file.reopen(stale, code=errno.ESTALE)
    fresh = file.fd
    assert file.reopen(stale, code=errno.ESTALE)
    assert file.fd == fresh


def test_a_number_that_was_closed_under_us_is_not_ours_any_more(file, path):
    lost = file.fd
    os.close(lost)
    taken = [os.open(path.parent, os.O_RDONLY)]  # somebody else gets the number
    assert taken == [lost]
    assert file.reopen(lost, code=errno.EBADF)
    file.close()
    assert is_open(lost)
    os.close(lost)


@pytest.mark.parametrize("change", ["written", "grown", "replaced", "gone"])
def test_what_is_another_file_now_is_not_opened(file, path, change):
    if change == "written":
        os.utime(path, ns=(1, 1))
    elif change == "grown":
        os.truncate(path, 8192)
    else:
        path.unlink()
        if change == "replaced":
            path.write_bytes(b"x" * 4096)
            os.utime(path, ns=(file.opened_as.st_atime_ns, file.opened_as.st_mtime_ns))
    before, n_open = file.fd, n_open_descriptors()
    assert not file.reopen(file.fd, code=errno.ESTALE)
    assert file.fd == before
    assert n_open_descriptors() == n_open


def test_it_is_opened_as_it_was(path):
    asked = []

    def opener(path, flags):
        asked.append(flags)
        return os.open(path, flags & ~os.O_DIRECT)

    flags = os.O_RDONLY | os.O_DIRECT
    fd = opener(path, flags)
    file = DataFile(path, fd, direct=True, reason="statx", flags=flags, opener=opener)
    file.reopen(fd, code=errno.ESTALE)
    file.close()
    assert asked == [flags, flags]


def test_closing_twice_closes_nothing_of_others(file, path):
    number = file.fd
    file.close()
    other = os.open(path.parent, os.O_RDONLY)
    assert other == number
    file.close()
    assert is_open(other)
    os.close(other)
