"""A child process in which a seccomp filter answers io_uring_setup with an errno."""

import json
import subprocess
import sys
import textwrap

_CHILD = textwrap.dedent(
    """
    import asyncio, ctypes, json, logging, struct, sys

    code, path, names = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
    ALLOW, ERRNO, IO_URING_SETUP = 0x7FFF0000, 0x00050000, 425
    instructions = [
        (0x20, 0, 0, 0),                    # load the number of the system call
        (0x15, 0, 1, IO_URING_SETUP),       # is it this one?
        (0x06, 0, 0, ERRNO | code),
        (0x06, 0, 0, ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *i) for i in instructions))
    header = struct.pack("@HP", len(instructions), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, FILTER, ctypes.c_char_p(header), 0, 0
    ):
        sys.exit(77)

    from tieredmoe.backends import open_backend
    from tieredmoe.errors import BackendUnavailableError, DirectIOUnavailableError

    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("tieredmoe").addHandler(handler)

    async def describe(name):
        try:
            backend = open_backend(name, [path])
        except (BackendUnavailableError, DirectIOUnavailableError) as error:
            return {"refused": error.reason, "text": str(error)}
        await backend.close()
        info = backend.info
        return {"name": info.name, "fallbacks": [f.reason for f in info.fallbacks]}

    told = {name: asyncio.run(describe(name)) for name in names}
    print(json.dumps({"told": told, "warnings": warnings}))
    """
)


def opened_where_rings_answer(code, path, *names):
    """What opening ``path`` by each name gives in such a child; None where filters are refused."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(code), str(path), ",".join(names)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        return None
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
