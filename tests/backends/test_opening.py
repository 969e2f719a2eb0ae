import asyncio
import os
from pathlib import Path

import attrs
import pytest

from tieredmoe.backends import open_backend
from tieredmoe.backends.kernel import Kernel
from tieredmoe.errors import ConfigError, DirectIOUnavailableError, ReadError


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / f"{i}.bin" for i in range(3)]
    for path in paths:
        path.write_bytes(b"x" * 8192)
    return paths


def kernel(**changes):
    """A kernel on which direct reads are stated to work, and its list of opened descriptors."""
    opened = []

    def open_and_note(path, flags):
        opened.append(os.open(path, flags & ~os.O_DIRECT))
        return opened[-1]

    fake = Kernel(
        open=open_and_note, direct_alignment=lambda fd: 512, lives_in_memory=lambda fd: False
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
    info = described("auto", paths, kernel=fake)
    assert (info.name, info.direct, info.reason) == ("threads", False, "tmpfs")


def test_the_window_is_the_callers(paths):
    assert described("buffered", paths, window_nbytes=12_345).window_nbytes == 12_345
    assert described("buffered", paths).window_nbytes == 32 << 20


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
        ("mmap", 4096, "no backend 'mmap'; there are auto, threads, buffered"),
        ("auto", 0, "a window of 0 bytes"),
    ],
)
def test_a_wrong_argument_is_named(paths, name, window_nbytes, fact):
    with pytest.raises(ConfigError, match=fact):
        described(name, paths, window_nbytes=window_nbytes)


def test_no_files_are_refused():
    with pytest.raises(ConfigError, match="at least one file"):
        described("auto", [])
