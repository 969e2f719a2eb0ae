"""Every error survives the way to another process, and a copy: attributes, message and class."""

import copy
import errno
import pickle

import pytest

from tieredmoe import errors
from tieredmoe.spec import ExpertKey

READ = {"path": "/m.gguf", "offset": 4096, "nbytes": 8192}
EVERY = [
    errors.ConfigError("vram: 0 is less than one byte"),
    errors.GGUFError("/m.gguf", "ends in the header"),
    errors.PackError("/m.pack", "does not exist"),
    errors.WorkingSetTooLargeError(n_wanted=5, n_slots=4, n_held=3),
    errors.QueueFullError(waiting_max=7),
    errors.ReadError(errno=errno.EIO, fact="failed", **READ),
    errors.ReadError(errno=0, fact="ended", kind="changed", **READ),
    errors.DigestMismatchError(key=ExpertKey(3, 4), role="up", **READ),
    errors.ExpertLoadError(ExpertKey(3, 4), OSError(errno.EIO, "no")),
    errors.DirectIOUnavailableError("/m.gguf", "tmpfs", "move it"),
    errors.BackendUnavailableError("uring", "ENOSYS", "use threads"),
    errors.ClosedError("the hierarchy was closed"),
    errors.PromptTooLongError(n_prompt=9, n_context=8, n_context_max=64),
]


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("move", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_arrives_as_it_was_sent(error, move):
    there = move(error)
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert there.args == error.args
    assert vars(there) == vars(error)
    assert getattr(there, "errno", None) == getattr(error, "errno", None)
