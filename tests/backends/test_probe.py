import errno
import mmap
import os

import attrs
import pytest

from tieredmoe.backends.kernel import Kernel, cached_nbytes, drop_cached
from tieredmoe.backends.probe import PROBE_NBYTES, open_buffered, open_direct
from tieredmoe.errors import DirectIOUnavailableError, ReadError

REFUSALS = ["EINVAL", "EOPNOTSUPP", "ENOTSUP", "EPERM", "EACCES", "ENOLCK"]


class FakeKernel:
    """A kernel on which everything works; the keyword arguments say what does not.

    ``fills_cache`` makes direct reads fill the page cache, ``sticky`` keeps pages from being
    dropped, ``alignment`` is what statx states.
    """

    def __init__(self, *, alignment=512, fills_cache=False, sticky=False, tells=True, memory=False):
        self.opened = []
        self.cached = sticky
        self.fills_cache, self.sticky, self.tells = fills_cache, sticky, tells
        self.alignment, self.memory = alignment, memory
        self.refuse_open = self.refuse_read = None
        self.broken = False

    def open(self, path, flags):
        if flags & os.O_DIRECT and self.refuse_open:
            self._raise(self.refuse_open)
        fd = os.open(path, flags & ~os.O_DIRECT)
        self.opened.append((fd, bool(flags & os.O_DIRECT)))
        return fd

    def preadv(self, fd, targets, offset):
        if self.broken or (self.refuse_read and dict(self.opened)[fd]):
            self._raise(self.refuse_read or "EIO")
        self.cached = self.cached or self.fills_cache
        return os.preadv(fd, targets, offset)

    def drop_cached(self, fd, offset, nbytes):
        self.cached = self.sticky

    def cached_nbytes(self, fd, offset, nbytes):
        return nbytes * self.cached if self.tells else None

    def as_kernel(self):
        return Kernel(
            open=self.open,
            preadv=self.preadv,
            direct_alignment=lambda fd: self.alignment,
            cached_nbytes=self.cached_nbytes,
            drop_cached=self.drop_cached,
            lives_in_memory=lambda fd: self.memory,
        )

    def leaked(self):
        return [fd for fd, _ in self.opened if _is_open(fd)]

    @staticmethod
    def _raise(name):
        code = getattr(errno, name)
        raise OSError(code, os.strerror(code))


def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(b"x" * 10_000)
    return path


def verdict(path, fake):
    file = open_direct(path, fake.as_kernel())
    os.close(file.fd)
    assert fake.leaked() == []
    return file.direct, file.reason


def refusal(path, fake):
    with pytest.raises(DirectIOUnavailableError, match="or choose the backend 'buffered'") as error:
        open_direct(path, fake.as_kernel())
    assert fake.leaked() == []
    assert str(path) in str(error.value)
    return error.value


def test_a_stated_alignment_is_proof(path):
    assert verdict(path, FakeKernel()) == (True, "statx")


@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_any_alignment_up_to_a_page_will_do(path, alignment):
    assert verdict(path, FakeKernel(alignment=alignment)) == (True, "statx")


@pytest.mark.parametrize("alignment", [8192, 65536])
def test_a_larger_alignment_is_refused(path, alignment):
    assert refusal(path, FakeKernel(alignment=alignment)).reason == "align"


def test_a_file_for_which_none_is_offered_is_refused(path):
    assert refusal(path, FakeKernel(alignment=0)).reason == "unsupported"


def test_without_a_statement_an_empty_page_cache_is_proof(path):
    assert verdict(path, FakeKernel(alignment=None)) == (True, "proven")


def test_a_file_system_that_fills_the_page_cache_is_found_out(path):
    assert refusal(path, FakeKernel(alignment=None, fills_cache=True)).reason == "cache_filled"


def test_a_cache_that_cannot_be_measured_proves_nothing(path):
    assert refusal(path, FakeKernel(alignment=None, tells=False)).reason == "dio_unproven"


def test_pages_that_cannot_be_dropped_prove_nothing(path):
    assert refusal(path, FakeKernel(alignment=None, sticky=True)).reason == "dio_unproven"


def test_another_place_is_tried_where_pages_stay(path):
    path.write_bytes(b"x" * (3 * PROBE_NBYTES))
    fake = FakeKernel(alignment=None, fills_cache=True)
    dropped = []

    def drop_first_place_sticks(fd, offset, nbytes):
        dropped.append(offset)
        fake.cached = offset == 0

    kernel = attrs.evolve(fake.as_kernel(), drop_cached=drop_first_place_sticks)
    with pytest.raises(DirectIOUnavailableError, match="cache_filled"):
        open_direct(path, kernel)
    assert dropped == [0, PROBE_NBYTES]


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("stage", ["open", "read"])
def test_every_refusal_has_its_reason_and_its_hint(path, stage, name):
    fake = FakeKernel()
    setattr(fake, f"refuse_{stage}", name)
    error = refusal(path, fake)
    code = getattr(errno, name)
    assert error.reason == f"{stage}_{errno.errorcode[code].lower()}"
    assert f"refused O_DIRECT at {stage}: {os.strerror(code)}" in str(error)


def test_tmpfs_is_accepted_and_not_called_direct(path):
    assert verdict(path, FakeKernel(alignment=None, memory=True)) == (False, "tmpfs")


def test_a_tmpfs_that_refuses_direct_reads_is_refused(path):
    fake = FakeKernel(alignment=None, memory=True)
    fake.refuse_open = "EINVAL"
    assert refusal(path, fake).reason == "open_einval"


@pytest.mark.parametrize(("alignment", "reason"), [(512, "statx"), (None, "empty")])
def test_an_empty_file_needs_no_proof(path, alignment, reason):
    path.write_bytes(b"")
    assert verdict(path, FakeKernel(alignment=alignment)) == (True, reason)


@pytest.mark.parametrize("nbytes", [1, 511, 4095, 4096, 4097])
def test_a_file_shorter_than_a_block_can_be_proven(path, nbytes):
    path.write_bytes(b"x" * nbytes)
    assert verdict(path, FakeKernel(alignment=None)) == (True, "proven")


@pytest.mark.parametrize("opener", [open_direct, open_buffered])
def test_a_missing_file_is_a_read_error_not_a_refusal(tmp_path, opener):
    with pytest.raises(ReadError, match=r"none.bin: .*cannot be opened \(ENOENT: No such file"):
        opener(tmp_path / "none.bin", Kernel())


@pytest.mark.parametrize("opener", [open_direct, open_buffered])
def test_who_has_no_descriptor_left_is_told_what_to_raise(path, opener):
    def refuse(path, flags):
        FakeKernel._raise("EMFILE")

    with pytest.raises(ReadError, match=r"cannot be opened; raise `ulimit -n` \(EMFILE"):
        opener(path, Kernel(open=refuse))


@pytest.mark.parametrize("opener", [open_direct, open_buffered])
def test_a_directory_is_refused_by_name(tmp_path, opener):
    with pytest.raises(ReadError, match=r"not a regular file"):
        opener(tmp_path, Kernel())


@pytest.mark.parametrize("opener", [open_direct, open_buffered])
def test_a_pipe_is_refused_without_waiting_for_who_writes_to_it(tmp_path, opener):
    os.mkfifo(tmp_path / "pipe")
    opened = []
    kernel = Kernel(open=lambda path, flags: opened.append(path) or os.open("/dev/null", flags))
    with pytest.raises(ReadError, match=r"pipe: .*not a regular file"):
        opener(tmp_path / "pipe", kernel)
    assert opened == []


@pytest.mark.parametrize(
    ("broken", "expected"), [(True, ReadError), (False, DirectIOUnavailableError)]
)
def test_a_place_of_the_proof_that_cannot_be_read_is_told_like_any_other(path, broken, expected):
    class FailsInTheMiddle(FakeKernel):
        def preadv(self, fd, targets, offset):
            if offset and (broken or dict(self.opened)[fd]):
                self._raise("EIO")
            return super().preadv(fd, targets, offset)

        def cached_nbytes(self, fd, offset, nbytes):
            return 0 if offset else nbytes

    path.write_bytes(bytes(3 * PROBE_NBYTES))
    fake = FailsInTheMiddle(alignment=None)
    with pytest.raises(expected) as error:
        open_direct(path, fake.as_kernel())
    assert error.value.offset == PROBE_NBYTES if broken else error.value.reason == "read_eio"
    assert fake.leaked() == []


def test_a_disk_that_cannot_read_at_all_is_a_read_error(path):
    fake = FakeKernel()
    fake.broken = True
    with pytest.raises(ReadError, match="cannot be read") as error:
        open_direct(path, fake.as_kernel())
    assert error.value.errno == errno.EIO
    assert fake.leaked() == []


def test_buffered_reads_ask_no_questions(path):
    fake = FakeKernel(alignment=0, fills_cache=True)
    fake.refuse_open = fake.refuse_read = "EINVAL"
    file = open_buffered(path, fake.as_kernel())
    os.close(file.fd)
    assert (file.direct, file.reason) == (False, "asked")


def test_a_file_called_direct_really_bypasses_the_page_cache(path):
    path.write_bytes(b"x" * PROBE_NBYTES)
    try:
        file = open_direct(path, Kernel())
    except DirectIOUnavailableError as error:
        pytest.skip(str(error))
    os.fsync(file.fd)
    drop_cached(file.fd, 0, PROBE_NBYTES)
    with mmap.mmap(-1, PROBE_NBYTES) as target:
        assert os.preadv(file.fd, [target], 0) == PROBE_NBYTES
    cached = cached_nbytes(file.fd, 0, PROBE_NBYTES)
    os.close(file.fd)
    assert not (file.direct and cached)
