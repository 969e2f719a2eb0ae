"""Opens a model in whatever form it is: one function for all who take a path from a user.

Each form is a row: how it is recognised, by names and first bytes only, and what opens it. The
first row that recognises a path opens it, and its errors are then about that form. Rejected: trying
one opener after another (the error would be that of the last, not of the form that it is).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gguf.constants import GGUF_MAGIC

from tieredmoe.errors import NotAModelError, PackError
from tieredmoe.gguf import GGUFInventory
from tieredmoe.pack.drives import has_drives, is_drive, open_drives, refuse_drive
from tieredmoe.pack.foreign import is_foreign_pack, open_foreign_pack
from tieredmoe.pack.manifest import MANIFEST_NAME
from tieredmoe.pack.partial import LOCK_NAME
from tieredmoe.pack.reader import open_pack
from tieredmoe.pack.virtual import VirtualPack, open_virtual_pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredmoe.pack.records import Checkpoint

_GGUF_MAGIC = GGUF_MAGIC.to_bytes(4, "little")
_N_NAMED = 5


class Form(NamedTuple):
    """One form that a model on disk can have."""

    description: str
    recognises: Callable[[Path, bytes], bool]
    """Given a directory and no bytes, or a regular file and its first bytes."""
    open: Callable[[Path], Checkpoint]


def _is_pack(path: Path, _: bytes) -> bool:
    return (path / MANIFEST_NAME).exists() or has_drives(path)


def _open_packed(path: Path) -> Checkpoint:
    """A pack in one directory or on several drives; one drive of several is refused by name."""
    if has_drives(path):
        return open_drives(path)
    if is_drive(path):
        refuse_drive(path)
    return open_pack(path)


def _is_gguf(path: Path, beginning: bytes) -> bool:
    if path.is_dir():
        return any(entry.suffix == ".gguf" for entry in path.iterdir())
    return beginning.startswith(_GGUF_MAGIC) or path.suffix == ".gguf"


FORMS: tuple[Form, ...] = (
    Form("a pack's directory", _is_pack, _open_packed),
    Form("a GGUF file, one of its shards or their directory", _is_gguf, open_virtual_pack),
    Form("an expert pack of SGLang's", is_foreign_pack, open_foreign_pack),
)


def open_checkpoint(model: Path | str | GGUFInventory) -> Checkpoint:
    """The model at a path, in any form of ``FORMS``, checked as its own opener does; blocks.

    An inventory is a model whose headers have been read already. Raises what the opener raises,
    ``NotAModelError`` for what no form recognises, and ``PackError`` for what cannot be looked at.
    """
    if isinstance(model, GGUFInventory):
        return VirtualPack(model)
    path = Path(model).absolute()
    beginning = _beginning(path)
    for form in FORMS:
        if form.recognises(path, beginning):
            return form.open(path)
    raise NotAModelError(path, f"is not a pack, nor another form of a model{_what_it_is(path)}")


def _beginning(path: Path) -> bytes:
    """The first bytes of a file, none of a directory; ``PackError`` for anything else."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            # Only to learn now whether it may be listed, and what is in it be looked at.
            os.listdir(path)  # noqa: PTH208 (no entry is used)
            os.stat(f"{path}/.")  # noqa: PTH116 (a Path leaves the dot away)
            return b""
        if stat.S_ISREG(status.st_mode):
            with path.open("rb") as file:
                return file.read(64)
    except FileNotFoundError as error:
        raise PackError(path, "does not exist") from error
    except OSError as error:
        raise PackError(path, f"cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise PackError(path, f"cannot be opened: {error}") from error
    raise PackError(path, "is neither a regular file nor a directory")


def _what_it_is(path: Path) -> str:
    """What can be said of a path that no form recognises, and the way out."""
    forms = "; ".join(form.description for form in FORMS)
    if not path.is_dir():
        if path.name == MANIFEST_NAME:
            return f": it is a file of one; name its directory, {path.parent}"
        return f"; a model is {forms}"
    if (path / LOCK_NAME).exists():
        return (
            ": it is left over from a conversion that did not end; go on with it by `tieredmoe "
            "pack create`, or undo it by `tieredmoe pack rollback`"
        )
    names = sorted(entry.name for entry in path.iterdir())
    models = [name for name in names if (path / name).is_dir() and _is_pack(path / name, b"")]
    if models:
        shown = ", ".join(models[:_N_NAMED]) + (", …" if len(models) > _N_NAMED else "")
        return f"; it holds {len(models)}, name one of them: {shown}"
    return f": it is {'a directory without one' if names else 'empty'}; a model is {forms}"
