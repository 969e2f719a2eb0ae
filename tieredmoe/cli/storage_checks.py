"""What reads from a path really are, and how much room there is beside it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tieredmoe.backends.kernel import Kernel
from tieredmoe.backends.probe import PROBE_NBYTES, open_direct
from tieredmoe.budget import format_size
from tieredmoe.cli.findings import Finding, note, ok, problem
from tieredmoe.errors import DirectIOUnavailableError, ReadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def storage_findings(
    path: Path, files: Sequence[Path], kernel: Kernel | None = None
) -> Iterator[Finding]:
    """How ``files`` can be read, and the free space beside them.

    Without files, a small one is made in the folder ``path`` for the moment of the check.
    """
    kernel = kernel or Kernel()
    folders = list(dict.fromkeys(file.parent for file in files))
    if folders:
        for folder in folders:
            yield _direct(next(file for file in files if file.parent == folder), folder, kernel)
    else:
        yield _direct_in(path, kernel)
    for folder in folders or [path]:
        yield _free_space(folder)


def _direct_in(folder: Path, kernel: Kernel) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tieredmoe-") as file:
            file.write(os.urandom(PROBE_NBYTES))
            file.flush()
            os.fsync(file.fileno())
            return _direct(Path(file.name), folder, kernel)
    except OSError as error:
        return note(
            f"reads from {folder}",
            f"not known: no file can be made there ({error.strerror})",
            "name a model or another folder",
        )


def _direct(file: Path, folder: Path, kernel: Kernel) -> Finding:
    subject = f"reads from {folder}"
    try:
        opened = open_direct(file, kernel)
    except DirectIOUnavailableError as error:
        return problem(subject, f"not direct: {error.reason}", str(error))
    except ReadError as error:
        return problem(subject, str(error))
    window = kernel.queue_window_nbytes(opened.device)
    opened.close()
    if not opened.direct:
        return note(subject, f"it is memory ({opened.reason}), not a disk")
    how = {"statx": "the kernel states it", "proven": "a read left the page cache empty"}
    fact = f"direct ({how.get(opened.reason, opened.reason)})"
    if window is not None:
        fact += f"; half its queue takes {format_size(window)}"
    return ok(subject, fact)


def _free_space(folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    fact = f"{format_size(usage.free)} of {format_size(usage.total)}"
    return ok(f"free space at {folder}", fact)
