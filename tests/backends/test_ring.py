"""The real ring: bytes, tags, errors, and that nothing queued outlives its retraction."""

import errno
import os
import select

import pytest
from gated import n_open_descriptors

from tieredmoe.backends import ring as ring_module
from tieredmoe.backends.kernel import Kernel
from tieredmoe.backends.ring import Liburing, Ring, find_liburing
from tieredmoe.backends.ringprobe import open_ring
from tieredmoe.errors import BackendUnavailableError
from tieredmoe.testing.contracts.target import Target

pytestmark = pytest.mark.uring
PAGE = 4096


@pytest.fixture
def ring():
    try:
        ring = open_ring(Kernel())
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    yield ring
    ring.close()


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([i]) * PAGE for i in range(8)))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def prep(ring, fd, target, *, page, tag, nbytes=PAGE):
    return ring.prep_read(fd, address=target.address, nbytes=nbytes, offset=page * PAGE, tag=tag)


def reaped(ring, n):
    """The next ``n`` completions."""
    done = []
    while len(done) < n:
        select.select([ring.event_fd], [], [])
        ring.clear_event()
        while some := ring.reap():
            done += some
    return done


def readable(ring):
    return bool(select.select([ring.event_fd], [], [], 0)[0])


def test_reads_come_back_by_tag_with_their_count(ring, fd):
    targets = {tag: Target() for tag in (2**40, 7, 1)}
    for tag, target in targets.items():
        assert prep(ring, fd, target, page=tag % 8, tag=tag)
    assert ring.n_unsubmitted == 3
    ring.submit()
    assert ring.n_unsubmitted == 0
    assert sorted(reaped(ring, 3)) == [(1, PAGE), (7, PAGE), (2**40, PAGE)]
    for tag, target in targets.items():
        assert set(target.view) == {tag % 8}
    assert not readable(ring)


def test_the_ends_of_files_and_errors_are_numbers(ring, fd):
    targets = [Target(2) for _ in range(3)]
    prep(ring, fd, targets[0], page=8, tag=1, nbytes=2 * PAGE)
    prep(ring, fd, targets[1], page=7, tag=2, nbytes=2 * PAGE)
    prep(ring, 10**6, targets[2], page=0, tag=3)
    ring.submit()
    assert sorted(reaped(ring, 3)) == [(1, 0), (2, PAGE), (3, -errno.EBADF)]
    assert set(targets[1].view[:PAGE]) == {7}


def test_a_full_queue_takes_no_more_until_it_is_submitted(fd):
    library = find_liburing()
    try:
        open_ring(Kernel()).close()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    small = Ring(library, 2)
    target = Target()
    assert [prep(small, fd, target, page=1, tag=tag) for tag in (1, 2, 3)] == [True, True, False]
    small.submit()
    assert prep(small, fd, target, page=1, tag=3)
    small.submit()
    assert sorted(tag for tag, _ in reaped(small, 3)) == [1, 2, 3]
    small.close()


def test_what_was_retracted_writes_nothing_and_has_no_completion(ring, fd):
    gone, kept = Target(), Target()
    prep(ring, fd, gone, page=1, tag=1)
    prep(ring, fd, gone, page=2, tag=2)
    assert ring.retract() == [1, 2]
    assert ring.n_unsubmitted == 0
    prep(ring, fd, kept, page=3, tag=3)
    ring.submit()
    assert reaped(ring, 1) == [(3, PAGE)]
    assert gone.untouched()
    assert ring.retract() == []


def test_more_completions_than_one_look_takes(ring, fd):
    target = Target()
    for tag in range(1, 201):
        prep(ring, fd, target, page=1, tag=tag)
    ring.submit()
    assert sorted(tag for tag, _ in reaped(ring, 200)) == list(range(1, 201))


def test_waiting_for_the_first_completion(ring, fd):
    target = Target()
    prep(ring, fd, target, page=5, tag=1)
    ring.submit_and_wait()
    assert ring.reap() == [(1, PAGE)]
    assert set(target.view) == {5}


def test_a_closed_ring_is_never_called_again(fd, ring):
    other = Ring(find_liburing())
    other.close()
    with pytest.raises(AssertionError, match="closed ring"):
        other.submit()
    with pytest.raises(AssertionError, match="closed ring"):
        other.reap()


@pytest.mark.parametrize("what", ["eventfd", "register"])
def test_a_ring_that_fails_half_made_leaves_nothing_open(ring, monkeypatch, what):
    n_open = n_open_descriptors()

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    if what == "eventfd":
        monkeypatch.setattr(ring_module.os, "eventfd", refuse)
    else:
        init = Liburing.__init__

        def without_registration(self, path):
            init(self, path)
            self.register_eventfd = lambda *_: -errno.EMFILE

        monkeypatch.setattr(Liburing, "__init__", without_registration)
    with pytest.raises(OSError, match="Too many open files"):
        Ring(find_liburing())
    assert n_open_descriptors() == n_open


def test_taking_nothing_is_an_error_to_try_again(ring, fd):
    prep(ring, fd, Target(), page=0, tag=1)
    ring._lib.submit = lambda _: 0
    with pytest.raises(BlockingIOError):
        ring.submit()
    assert ring.retract() == [1]


def test_signals_do_not_end_the_wait(ring, fd):
    wait = ring._lib.submit_and_wait
    answers = [-errno.EINTR, -errno.EINTR]
    ring._lib.submit_and_wait = lambda *args: answers.pop() if answers else wait(*args)
    target = Target()
    prep(ring, fd, target, page=0, tag=1)
    ring.submit_and_wait()
    assert ring.reap() == [(1, PAGE)]
