import asyncio
import logging
import os
from pathlib import Path

import attrs
import pytest
from fake_ring import FakeRing

from tieredmoe.backends import ReadOp, open_backend
from tieredmoe.backends.kernel import Kernel
from tieredmoe.errors import (
    BackendUnavailableError,
    ConfigError,
    DirectIOUnavailableError,
    ReadError,
)


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / f"{i}.bin" for i in range(3)]
    for path in paths:
        path.write_bytes(b"x" * 8192)
    return paths


def kernel(**changes):
    """A machine with direct reads and without liburing, and its list of opened descriptors."""
    opened = []

    def open_and_note(path, flags):
        opened.append(os.open(path, flags & ~os.O_DIRECT))
        return opened[-1]

    fake = Kernel(
        open=open_and_note,
        direct_alignment=lambda fd: 512,
        lives_in_memory=lambda fd: False,
        queue_window_nbytes=lambda device: None,
        find_liburing=lambda: None,
    )
    return attrs.evolve(fake, **changes), opened


def described(*args, **options):
    async def scenario():
        backend = open_backend(*args, **options)
        await backend.close()
        return backend.info

    return asyncio.run(scenario())


def open_descriptors():
    return {link.name for link in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("name", ["auto", "threads"])
def test_direct_backends_ask_for_whole_pages(paths, name):
    info = described(name, paths, kernel=kernel()[0])
    assert (info.name, info.direct, info.alignment, info.reason) == ("threads", True, 4096, "statx")


def test_the_page_cache_is_used_where_it_is_chosen(paths):
    info = described("buffered", paths)
    assert (info.name, info.direct, info.alignment, info.reason) == ("buffered", False, 1, "asked")


@pytest.mark.parametrize("name", ["auto", "threads"])
def test_no_other_name_ever_means_the_page_cache(paths, name):
    refused, _ = kernel(direct_alignment=lambda fd: 0)
    with pytest.raises(DirectIOUnavailableError, match="unsupported"):
        described(name, paths, kernel=refused)


def test_one_file_in_memory_keeps_the_whole_from_being_called_direct(paths):
    fake, opened = kernel()
    fake = attrs.evolve(fake, lives_in_memory=lambda fd: opened[1:] == [fd])
    info = described("threads", paths, kernel=fake)
    assert (info.name, info.direct, info.reason) == ("threads", False, "tmpfs")


def test_the_window_is_the_callers_else_the_devices_else_the_default(paths):
    def window(device_nbytes, **options):
        fake = kernel(queue_window_nbytes=lambda device: device_nbytes)[0]
        return described("buffered", paths, kernel=fake, **options).window_nbytes

    assert window(1 << 20, window_nbytes=12_345) == 12_345
    assert window(1 << 20) == 1 << 20
    assert window(None) == 64 << 20


def test_a_relative_path_is_the_same_file_wherever_the_process_goes(paths, monkeypatch):
    async def scenario():
        monkeypatch.chdir(paths[0].parent)
        backend = open_backend("buffered", [paths[0].name])
        monkeypatch.chdir("/")
        os.close(backend._files[0].fd)
        with memoryview(bytearray(1)) as target:
            await backend.submit([ReadOp(0, 0, target, 0)])[0]
        await backend.close()

    asyncio.run(scenario())


def test_a_failure_at_the_last_file_leaves_none_open(paths):
    before = open_descriptors()
    with pytest.raises(ReadError, match=r"missing\.bin"):
        described("buffered", [*paths, paths[0].with_name("missing.bin")])
    assert open_descriptors() == before


def test_closing_leaves_no_file_open(paths):
    before = open_descriptors()
    described("buffered", paths)
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("name", "window_nbytes", "fact"),
    [
        ("mmap", 4096, "no backend 'mmap'; there are auto, uring, threads, buffered"),
        ("auto", 0, "a window of 0 bytes"),
    ],
)
def test_a_wrong_argument_is_named(paths, name, window_nbytes, fact):
    with pytest.raises(ConfigError, match=fact):
        described(name, paths, window_nbytes=window_nbytes)


def test_a_block_in_no_parts_is_refused(paths):
    with pytest.raises(ConfigError, match="cannot be read in 0 parts"):
        described("auto", paths, read_splits=0)


def test_strict_and_allow_buffered_contradict_each_other(paths):
    with pytest.raises(ConfigError, match="choose one of them"):
        described("auto", paths, strict=True, allow_buffered=True)


def test_no_files_are_refused():
    with pytest.raises(ConfigError, match="at least one file"):
        described("auto", [])


@pytest.fixture
def warned(caplog):
    """The warnings that opening gave."""

    def warned():
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    return warned


def steps(info):
    return [(step.backend, step.reason) for step in info.fallbacks]


def test_auto_steps_down_to_threads_says_so_once_and_keeps_the_reason(paths, warned):
    info = described("auto", paths, kernel=kernel()[0])
    assert (info.name, info.direct, steps(info)) == ("threads", True, [("uring", "no_library")])
    (warning,) = warned()
    assert "reading through 'threads'" in warning
    assert "pip install 'liburing" in warning
    assert info.fallbacks[0].hint in warning


@pytest.mark.parametrize("name", ["threads", "buffered"])
def test_getting_what_was_asked_for_is_no_fallback(paths, warned, name):
    info = described(name, paths, kernel=kernel()[0])
    assert (info.name, info.fallbacks, warned()) == (name, (), [])


def test_a_ring_that_was_asked_for_by_name_is_had_or_refused(paths, warned):
    with pytest.raises(BackendUnavailableError, match="pip install") as caught:
        described("uring", paths, kernel=kernel()[0])
    assert caught.value.reason == "no_library"
    assert warned() == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", [("uring", "unsupported"), ("threads", "unsupported")]),
        ("uring", [("uring", "unsupported")]),
        ("threads", [("threads", "unsupported")]),
    ],
)
def test_the_page_cache_is_the_last_step_where_it_is_allowed(paths, warned, name, expected):
    fake, opened = kernel(direct_alignment=lambda fd: 0)
    info = described(name, paths, allow_buffered=True, kernel=fake)
    assert (info.name, info.direct, steps(info)) == ("buffered", False, expected)
    assert len(warned()) == 1
    assert "no direct I/O (unsupported)" in warned()[0]
    assert not open_descriptors() & {str(fd) for fd in opened}


def test_the_page_cache_is_not_used_where_it_is_only_allowed(paths):
    assert described("auto", paths, allow_buffered=True, kernel=kernel()[0]).name == "threads"


def test_strict_refuses_the_step_from_the_ring_to_threads(paths, warned):
    before = open_descriptors()
    with pytest.raises(BackendUnavailableError, match="no_library"):
        described("auto", paths, strict=True, kernel=kernel()[0])
    assert (open_descriptors(), warned()) == (before, [])


@pytest.mark.parametrize("name", ["threads", "buffered"])
def test_strict_gives_what_can_be_had(paths, name):
    assert described(name, paths, strict=True, kernel=kernel()[0]).name == name


def test_a_missing_file_is_no_reason_to_step_down(paths, warned):
    with pytest.raises(ReadError, match=r"missing\.bin"):
        described("auto", [paths[0].with_name("missing.bin")], allow_buffered=True)
    assert warned() == []


def with_ring(**changes):
    """A machine with a ring of which the probe's read is scripted; and that ring."""
    ring = FakeRing(is_open=True)
    ring.submit_and_wait = ring.submit
    usual = {
        "find_liburing": lambda: "liburing.so",
        "system_and_machine": lambda: ("Linux", "x86_64"),
        "make_ring": lambda library: ring,
    }
    return kernel(**(usual | changes))[0], ring


def test_auto_takes_the_ring_where_there_is_one(paths, warned):
    fake, ring = with_ring()
    info = described("auto", paths, kernel=fake)
    assert (info.name, info.direct, info.alignment) == ("uring", True, 4096)
    assert (info.reason, info.fallbacks, warned()) == ("statx", (), [])
    assert ring.closed


def test_a_ring_that_reads_wrong_bytes_is_not_used(paths, warned):
    fake, ring = with_ring()
    ring.answers = {0: [512]}
    n_open = len(open_descriptors())
    info = described("auto", paths, kernel=fake)
    assert (info.name, steps(info)) == ("threads", [("uring", "probe_mismatch")])
    assert "do not trust io_uring" in warned()[0]
    assert ring.closed
    assert len(open_descriptors()) == n_open - 1  # the ring's


def test_a_loop_that_cannot_watch_descriptors_gets_threads(paths, warned, monkeypatch):
    def refuse(loop, fd, callback):
        raise NotImplementedError

    fake, ring = with_ring()
    monkeypatch.setattr(asyncio.SelectorEventLoop, "add_reader", refuse)
    info = described("auto", paths, kernel=fake)
    assert (info.name, steps(info)) == ("threads", [("uring", "no_add_reader")])
    assert "cannot watch a descriptor" in warned()[0]
    assert ring.closed


@pytest.mark.uring
def test_the_real_machine_gives_a_ring_or_a_reason(paths, warned):
    try:
        info = described("auto", paths)
    except DirectIOUnavailableError as error:
        pytest.skip(str(error))
    assert (info.name == "uring") == (not info.fallbacks)
    assert len(warned()) == len(info.fallbacks)
