"""Every reason for which there may be no ring has its own code and its own way out."""

import ctypes
import errno
import os

import attrs
import pytest
from seccomp import opened_where_rings_answer

from tieredmoe.backends.datafile import DataFile
from tieredmoe.backends.kernel import Kernel, io_uring_disabled
from tieredmoe.backends.ring import Ring, find_liburing
from tieredmoe.backends.ringprobe import open_ring, prove_ring
from tieredmoe.errors import BackendUnavailableError

CONTENT = os.urandom(3 * 4096)


def refuses(error):
    def make_ring(path):
        raise error

    return make_ring


def kernel(**changes):
    """A machine with the library, on which ``changes`` hold."""
    usual = Kernel(
        system_and_machine=lambda: ("Linux", "x86_64"),
        find_liburing=lambda: "liburing.so",
        make_ring=refuses(AssertionError("no test gets this far")),
    )
    return attrs.evolve(usual, **changes)


def refused(code, **changes):
    return kernel(make_ring=refuses(OSError(code, os.strerror(code))), **changes)


REASONS = {
    "another processor": (
        kernel(system_and_machine=lambda: ("Linux", "aarch64")),
        "no_wheel_arch",
        "Linux on aarch64; the backend 'threads' reads as fast",
    ),
    "another system": (
        kernel(system_and_machine=lambda: ("Darwin", "x86_64")),
        "no_wheel_arch",
        "Darwin on x86_64",
    ),
    "not installed": (
        kernel(find_liburing=lambda: None),
        "no_library",
        "pip install 'liburing==2026.3.30'",
    ),
    "not loadable": (
        kernel(make_ring=refuses(OSError("invalid ELF header"))),
        "no_library",
        r"cannot be loaded \(invalid ELF header\); run: pip install",
    ),
    "too old a library": (
        kernel(make_ring=refuses(AttributeError("undefined symbol: io_uring_submit"))),
        "no_library",
        "lacks a function .* run: pip install",
    ),
    "an old kernel": (
        refused(errno.ENOSYS, release=lambda: "5.4.0-42-generic"),
        "enosys",
        "Linux 5.4.0-42-generic has no io_uring that reads, 5.6 is the first",
    ),
    "a sandbox": (
        refused(errno.ENOSYS, release=lambda: "6.18.44"),
        "enosys",
        "Linux 6.18.44 answers that it has no io_uring: .*a sandbox .gVisor",
    ),
    "a release without numbers": (
        refused(errno.ENOSYS, release=lambda: "custom"),
        "enosys",
        "Linux custom answers",
    ),
    "a container": (
        refused(errno.EPERM, io_uring_disabled=lambda: 0),
        "eperm_seccomp",
        "allow io_uring_setup, io_uring_enter and io_uring_register in its seccomp profile",
    ),
    "a container, by another number": (
        refused(errno.EACCES, io_uring_disabled=lambda: 0),
        "eperm_seccomp",
        "seccomp=unconfined",
    ),
    "the setting, for a group": (
        refused(errno.EPERM, io_uring_disabled=lambda: 1),
        "eperm_sysctl",
        "`sysctl -w kernel.io_uring_disabled=0` or join the group of kernel.io_uring_group",
    ),
    "the setting, for all": (
        refused(errno.EPERM, io_uring_disabled=lambda: 2),
        "eperm_sysctl",
        "io_uring_disabled is 2; as root run `sysctl -w kernel.io_uring_disabled=0`$",
    ),
    "locked memory": (
        refused(errno.ENOMEM),
        "enomem",
        r"\(now .*, at most .*\): raise it with `ulimit -l`",
    ),
    "descriptors": (refused(errno.EMFILE), "emfile", "raise `ulimit -n`"),
    "anything else": (refused(errno.EINVAL), "ring_einval", "refused the ring .Invalid argument"),
}


@pytest.mark.parametrize("what", REASONS)
def test_every_refusal_has_its_reason_and_its_way_out(what):
    fake, reason, way_out = REASONS[what]
    with pytest.raises(BackendUnavailableError, match=way_out) as caught:
        open_ring(fake)
    assert (caught.value.backend, caught.value.reason) == ("uring", reason)
    assert f"the backend 'uring' cannot be had here ({reason}): " in str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason", "way_out"),
    [
        (errno.EPERM, "eperm_seccomp", "seccomp profile"),
        (errno.ENOSYS, "enosys", "a sandbox"),
    ],
)
def test_a_container_that_forbids_rings_gets_threads_and_is_told(tmp_path, code, reason, way_out):
    path = tmp_path / "experts.bin"
    path.write_bytes(CONTENT)
    if find_liburing() is None or io_uring_disabled():
        pytest.skip("there is no ring here that a filter could forbid")
    seen = opened_where_rings_answer(code, path, "auto", "uring", "threads")
    if seen is None:
        pytest.skip("this sandbox allows no filters of our own")
    told, warnings = seen["told"], seen["warnings"]
    if "refused" in told["threads"]:
        pytest.skip(f"no direct reads here: {told['threads']['text']}")
    assert told["auto"] == {"name": "threads", "fallbacks": [reason]}
    assert told["uring"]["refused"] == reason
    assert told["threads"] == {"name": "threads", "fallbacks": []}
    assert len(warnings) == 1
    assert "reading through 'threads'" in warnings[0]
    assert way_out in warnings[0]


def test_the_setting_is_read_as_it_is(tmp_path):
    path = tmp_path / "io_uring_disabled"
    assert io_uring_disabled(path) == 0
    path.write_text("2\n")
    assert io_uring_disabled(path) == 2
    path.write_text("yes")
    assert io_uring_disabled(path) == 0


class OneReadRing:
    """A ring that answers the probe's read with ``result`` bytes of ``content``, or an errno."""

    def __init__(self, result, content=CONTENT, refusal=0):
        self.result, self.content, self.refusal = result, content, refusal
        self.retracted = False

    def prep_read(self, fd, *, address, nbytes, offset, tag):
        self.address = address
        return True

    def submit_and_wait(self):
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        if self.result > 0:
            ctypes.memmove(self.address, self.content, self.result)

    def retract(self):
        self.retracted = True

    def reap(self):
        return [(1, self.result)]

    def clear_event(self):
        pass


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(CONTENT)
    file = DataFile(path, os.open(path, os.O_RDONLY), direct=False, reason="asked")
    yield file
    file.close()


def test_the_same_bytes_as_a_plain_read_prove_the_ring(file):
    prove_ring(OneReadRing(4096), file, Kernel())


@pytest.mark.parametrize(
    ("ring", "reason", "fact"),
    [
        (OneReadRing(4096, bytes(4096)), "probe_mismatch", "gave other bytes than a plain read"),
        (OneReadRing(512), "probe_mismatch", "gave other bytes than a plain read"),
        (OneReadRing(-errno.EINVAL), "probe_einval", "read through the ring failed .Invalid arg"),
        (OneReadRing(0, refusal=errno.EPERM), "eperm_seccomp", "seccomp"),
    ],
)
def test_a_ring_that_does_not_read_right_is_refused(file, ring, reason, fact):
    with pytest.raises(BackendUnavailableError, match=fact) as caught:
        prove_ring(ring, file, Kernel(io_uring_disabled=lambda: 0))
    assert caught.value.reason == reason
    assert ring.retracted == bool(ring.refusal)


def test_a_machine_without_a_descriptor_left_for_the_proof_says_so(file):
    def refuse(path, flags):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with pytest.raises(BackendUnavailableError, match="raise `ulimit -n`"):
        prove_ring(OneReadRing(4096), file, Kernel(open=refuse))


@pytest.mark.uring
@pytest.mark.parametrize("nbytes", [0, 1, 4096, 5000])
def test_a_real_ring_is_proven_on_a_file_of_any_size(tmp_path, nbytes):
    path = tmp_path / "experts.bin"
    path.write_bytes(os.urandom(nbytes))
    try:
        ring = open_ring(Kernel())
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    file = DataFile(path, os.open(path, os.O_RDONLY), direct=False, reason="asked")
    prove_ring(ring, file, Kernel())
    assert ring.n_unsubmitted == 0
    assert ring.reap() == []
    ring.close()
    file.close()


def test_the_library_is_found_without_importing_it():
    library = find_liburing()
    if library is None:
        pytest.skip("liburing is not installed")
    assert library.name == "liburing.so"


def test_a_library_that_is_none_is_told(tmp_path):
    path = tmp_path / "liburing.so"
    path.write_bytes(b"no library")
    with pytest.raises(BackendUnavailableError, match="cannot be loaded") as caught:
        open_ring(kernel(find_liburing=lambda: path, make_ring=Ring))
    assert caught.value.reason == "no_library"
