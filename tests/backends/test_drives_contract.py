"""Split and mirrored drives keep every promise that one drive keeps."""

import shutil

import pytest

from tieredmoe.backends import open_backend
from tieredmoe.backends.drives import Drive, SplitBackend
from tieredmoe.backends.mirror import MirrorBackend
from tieredmoe.errors import DirectIOUnavailableError
from tieredmoe.testing import SimDisk, sim_run
from tieredmoe.testing.contracts.backend import BackendContract
from tieredmoe.testing.contracts.files import FileBackendContract


def on_threads(*paths):
    try:
        return open_backend("threads", paths)
    except DirectIOUnavailableError as error:
        pytest.skip(str(error))


def simulated(*paths):
    contents = [path.read_bytes() for path in paths]
    return SimDisk(contents, paths=paths, queue_depth=4, window_nbytes=5 * 4096)


class SplitContract(BackendContract):
    open_drive = staticmethod(on_threads)

    async def open_backend(self, paths):
        return SplitBackend([Drive(f"drive {i}", self.open_drive(p)) for i, p in enumerate(paths)])


class TestSplitOnThreads(SplitContract):
    # Real reads of a page may end while others are still being submitted, so their order proves
    # nothing here; the simulated drives are held to it.
    test_demand_goes_before_the_prefetch_that_waits = None

    test_a_forked_child_is_refused_and_takes_nothing_from_its_parent = (
        FileBackendContract.test_a_forked_child_is_refused_and_takes_nothing_from_its_parent
    )


class TestSplitSimulated(SplitContract):
    open_drive = staticmethod(simulated)

    def run(self, main):
        return sim_run(main)


class MirrorContract(BackendContract):
    open_drive = staticmethod(on_threads)

    async def open_backend(self, paths):
        other = paths[0].parent / "other"
        other.mkdir(exist_ok=True)
        copies = [shutil.copy(path, other) for path in paths]
        drives = [list(paths), [type(paths[0])(copy) for copy in copies]]
        return MirrorBackend(
            [Drive(files[0].parent, self.open_drive(*files), len(files)) for files in drives]
        )


class TestMirrorOnThreads(MirrorContract):
    # Real reads of a page may end while others are still being submitted, so their order proves
    # nothing here; the simulated drives are held to it.
    test_demand_goes_before_the_prefetch_that_waits = None

    test_a_forked_child_is_refused_and_takes_nothing_from_its_parent = (
        FileBackendContract.test_a_forked_child_is_refused_and_takes_nothing_from_its_parent
    )


class TestMirrorSimulated(MirrorContract):
    open_drive = staticmethod(simulated)

    def run(self, main):
        return sim_run(main)
