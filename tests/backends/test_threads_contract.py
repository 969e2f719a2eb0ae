import pytest

from tieredmoe.backends import open_backend
from tieredmoe.errors import DirectIOUnavailableError
from tieredmoe.testing.contracts.files import FileBackendContract


class ThreadsContract(FileBackendContract):
    window_nbytes = None
    read_splits = 1
    # A thread that has taken a read may be kept from running while others end theirs: the order of
    # landing proves nothing here. The gated disk of `test_threads` is held to the order of starts.
    test_demand_goes_before_the_prefetch_that_waits = None

    async def open_backend(self, paths):
        try:
            how = {"window_nbytes": self.window_nbytes, "read_splits": self.read_splits}
            return open_backend("threads", paths, **how)
        except DirectIOUnavailableError as error:
            pytest.skip(str(error))

    def descriptors(self, backend):
        return [file.fd for file in backend._files]


class TestThreads(ThreadsContract):
    pass


class TestThreadsWithASmallWindow(ThreadsContract):
    window_nbytes = 8192


class TestThreadsInParts(ThreadsContract):
    read_splits = 3


class TestBuffered(ThreadsContract):
    async def open_backend(self, paths):
        return open_backend("buffered", paths)
