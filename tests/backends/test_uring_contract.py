import pytest

from tieredmoe.backends import open_backend
from tieredmoe.errors import BackendUnavailableError, DirectIOUnavailableError
from tieredmoe.testing.contracts.files import FileBackendContract

pytestmark = pytest.mark.uring


class UringContract(FileBackendContract):
    window_nbytes = None
    read_splits = 1

    async def open_backend(self, paths):
        try:
            how = {"window_nbytes": self.window_nbytes, "read_splits": self.read_splits}
            return open_backend("uring", paths, **how)
        except (BackendUnavailableError, DirectIOUnavailableError) as error:
            pytest.skip(str(error))

    def descriptors(self, backend):
        return [file.fd for file in backend._files]


class TestUring(UringContract):
    pass


class TestUringWithASmallWindow(UringContract):
    window_nbytes = 8192


class TestUringInParts(UringContract):
    read_splits = 3
