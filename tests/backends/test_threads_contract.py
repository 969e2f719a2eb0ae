import pytest

from tieredmoe.backends import open_backend
from tieredmoe.errors import DirectIOUnavailableError
from tieredmoe.testing.contracts.backend import BackendContract


class TestThreads(BackendContract):
    async def open_backend(self, paths):
        try:
            return open_backend("threads", paths)
        except DirectIOUnavailableError as error:
            pytest.skip(str(error))


class TestThreadsWithASmallWindow(BackendContract):
    async def open_backend(self, paths):
        try:
            return open_backend("auto", paths, window_nbytes=8192)
        except DirectIOUnavailableError as error:
            pytest.skip(str(error))


class TestBuffered(BackendContract):
    async def open_backend(self, paths):
        return open_backend("buffered", paths)
