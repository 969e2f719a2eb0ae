"""A conversion that fails or is stopped harms no source, says what it needs, and goes on."""

import asyncio
import errno
import os
import threading

import pytest
from pack_faults import failing, hook
from small_moe import MIXED, convert, make_small_moe, names, pack_files, rebuild_source

from tieredmoe.errors import ConfigError, GGUFError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import create_pack, holes
from tieredmoe.pack import progress as progress_module
from tieredmoe.pack import stream_copy as stream_copy_module
from tieredmoe.pack.journal import JOURNAL_NAME
from tieredmoe.pack.planning import plan_inventory
from tieredmoe.pack.units import units_of

FULL = (
    r"{what}.* failed: {reason}; [0-9,]+ bytes are still to be written and [0-9,]+ are free in "
    r"\S+: that would do, so raise the quota, .* and run the same command again"
)
NO_SPACE, QUOTA = "No space left on device", "Disk quota exceeded"
EARLY = [
    ("pwrite", errno.ENOSPC, FULL.format(what=f"writing {JOURNAL_NAME}", reason=NO_SPACE)),
    ("ftruncate", errno.EFBIG, "making experts-00000.bin of .*File too large.*file_nbytes_max"),
    ("mkdir", errno.EROFS, "making pack.partial failed: Read-only file system"),
    ("fdatasync", errno.EIO, f"writing {JOURNAL_NAME} failed: Input/output error"),
]
LATE = [
    ("pwrite", 1, errno.ENOSPC, FULL.format(what="writing .* at byte .* of", reason=NO_SPACE)),
    ("pwrite", 1, errno.EDQUOT, FULL.format(what="writing .* at byte .* of", reason=QUOTA)),
    ("pwrite", 7, errno.EIO, r"writing .* failed: Input/output error"),
    ("fdatasync", 3, errno.EIO, r"syncing \S+\.bin failed: Input/output error; run the same"),
    ("fdatasync", 3, errno.ENOSPC, FULL.format(what="syncing", reason=NO_SPACE)),
    ("rename", 0, errno.EIO, "writing manifest.json failed: Input/output error; run the same"),
    ("rename", 1, errno.EIO, "renaming pack.partial to pack failed: Input/output error"),
]


@pytest.fixture
def one_by_one(monkeypatch):
    """Calls come in one order, so that a number names one of them."""
    monkeypatch.setattr(stream_copy_module, "N_READERS", 1)
    monkeypatch.setattr(stream_copy_module, "N_WRITERS", 1)


@pytest.fixture
def unharmed(model, tmp_path):
    """The pack that a conversion without trouble makes."""
    convert(model, tmp_path / "unharmed")
    return pack_files(tmp_path / "unharmed")


@pytest.mark.parametrize(("function", "code", "message"), EARLY)
def test_a_failure_before_anything_is_finished_leaves_nothing(
    model, tmp_path, monkeypatch, function, code, message
):
    before = model.files
    hook(monkeypatch, function, failing(code))
    with pytest.raises(PackError, match=message):
        convert(model, tmp_path / "pack")
    assert names(tmp_path) == sorted(path.name for path in model.paths)
    assert model.files == before


@pytest.mark.parametrize(("function", "at", "code", "message"), LATE)
@pytest.mark.usefixtures("one_by_one")
def test_a_failure_is_explained_and_the_next_run_goes_on(
    model, tmp_path, monkeypatch, unharmed, function, at, code, message
):
    before = model.files
    with monkeypatch.context() as patch:
        hook(patch, function, failing(code), at=at)
        with pytest.raises(PackError, match=message):
            convert(model, tmp_path / "pack")
    assert model.files == before
    assert not (tmp_path / "pack").exists()
    report = convert(model, tmp_path / "pack")
    assert pack_files(tmp_path / "pack") == unharmed
    assert report.resumed_nbytes > 0 or function == "pwrite"


@pytest.mark.usefixtures("one_by_one")
def test_a_disk_too_small_for_a_layer_is_told_before_it_is_written(
    model, tmp_path, monkeypatch, unharmed
):
    real, n = holes.fallocate, iter(range(100))

    def full(fd, mode, offset, nbytes):
        if next(n) == 3:
            raise OSError(errno.ENOSPC, NO_SPACE)
        real(fd, mode, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(holes, "fallocate", full)
        match = FULL.format(what="reserving [0-9,]+ bytes at byte [0-9,]+ of", reason=NO_SPACE)
        with pytest.raises(PackError, match=match):
            convert(model, tmp_path / "pack")
    layout = plan_inventory(open_inventory(model.paths[0]))
    before = [unit.nbytes for unit in units_of(layout)[:3]]
    assert convert(model, tmp_path / "pack").resumed_nbytes == sum(before)
    assert pack_files(tmp_path / "pack") == unharmed


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    model, tmp_path, monkeypatch, unharmed
):
    def refusing(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(holes, "fallocate", refusing)
    convert(model, tmp_path / "pack")
    assert pack_files(tmp_path / "pack") == unharmed


def test_short_writes_are_continued(model, tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:777], offset))
    report = convert(model, tmp_path / "pack")
    assert rebuild_source(tmp_path / "pack") == model.files
    assert report.fallbacks


def test_short_writes_of_whole_pages_stay_direct(model, tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:8192], offset))
    report = convert(model, tmp_path / "pack")
    assert rebuild_source(tmp_path / "pack") == model.files
    assert report.fallbacks == ()


@pytest.mark.parametrize("change", ["grown", "rewritten", "truncated"])
def test_a_source_that_changes_while_it_is_read_is_refused(model, tmp_path, monkeypatch, change):
    victim = model.paths[1]

    def alter():
        if change == "truncated":
            os.truncate(victim, 1000)
        else:
            with victim.open("ab" if change == "grown" else "r+b") as file:
                file.write(b"later")

    hook(monkeypatch, "pwrite", alter, at=2)
    with pytest.raises(GGUFError, match=rf"{victim.name}: (changed since|ends at byte)"):
        convert(model, tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_a_source_that_changed_since_its_inventory_is_refused(model, tmp_path):
    inventory = open_inventory(model.paths[0])
    with model.paths[0].open("ab") as file:
        file.write(b"more")
    with pytest.raises(GGUFError, match="changed since it was opened"):
        asyncio.run(create_pack(inventory, tmp_path / "pack"))
    assert names(tmp_path) == sorted(path.name for path in model.paths)


@pytest.mark.usefixtures("one_by_one")
def test_a_source_that_cannot_be_read_is_named_and_the_next_run_goes_on(
    model, tmp_path, monkeypatch, unharmed
):
    inventory = open_inventory(model.paths[0])
    with monkeypatch.context() as patch:
        hook(patch, "preadv", failing(errno.EIO), at=9)
        with pytest.raises(GGUFError, match=r"gguf: cannot be read at byte \d+: Input/output err"):
            asyncio.run(create_pack(inventory, tmp_path / "pack"))
    assert convert(model, tmp_path / "pack").resumed_nbytes > 0
    assert pack_files(tmp_path / "pack") == unharmed


@pytest.mark.parametrize("n_cancels", [1, 3])
@pytest.mark.parametrize(("function", "at"), [("pwrite", 1), ("pwrite", 7), ("fdatasync", 3)])
def test_cancelling_returns_when_all_is_at_rest_and_the_next_run_goes_on(
    model, tmp_path, monkeypatch, unharmed, function, at, n_cancels
):
    heard = threading.Event()
    real_stop = progress_module.Reporter.stop

    def stop(reporter):
        real_stop(reporter)
        heard.set()

    async def scenario(patch):
        patch.setattr(progress_module.Reporter, "stop", stop)
        patch.setattr(stream_copy_module, "WINDOW_NBYTES", 4096)
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(create_pack(model.paths[0], tmp_path / "pack"))

        def cancel():
            for _ in range(n_cancels):
                loop.call_soon_threadsafe(task.cancel)
            assert heard.wait(10)

        hook(patch, function, cancel, at=at)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert heard.is_set(), "the work was told to stop; it was not just waited for"
        assert not [t for t in threading.enumerate() if t.name.startswith("tieredmoe-pack")]

    with monkeypatch.context() as patch:
        asyncio.run(scenario(patch))
    assert not (tmp_path / "pack").exists()
    convert(model, tmp_path / "pack")
    assert pack_files(tmp_path / "pack") == unharmed


def interrupted(model, dest, monkeypatch, **options):
    """A conversion that stopped after some of its units."""
    with monkeypatch.context() as patch:
        hook(patch, "rename", failing(errno.EIO), at=0)
        with pytest.raises(PackError):
            convert(model, dest, **options)


def test_finished_layers_are_not_repeated(model, tmp_path, monkeypatch, unharmed):
    interrupted(model, tmp_path / "pack", monkeypatch)
    report = convert(model, tmp_path / "pack")
    assert report.source_read_nbytes == 0
    assert report.resumed_nbytes == sum(
        len(data) for name, data in unharmed.items() if name != "manifest.json"
    )


def test_other_parameters_are_refused_and_the_first_ones_go_on(
    model, tmp_path, monkeypatch, unharmed
):
    interrupted(model, tmp_path / "pack", monkeypatch)
    with pytest.raises(PackError, match=r"cannot go on so: file_nbytes_max was None, now it is 9"):
        convert(model, tmp_path / "pack", file_nbytes_max=9)
    convert(model, tmp_path / "pack")
    assert pack_files(tmp_path / "pack") == unharmed


@pytest.mark.parametrize("change", ["time", "header", "size", "model"])
def test_a_source_that_is_another_one_now_is_refused(model, tmp_path, monkeypatch, change):
    interrupted(model, tmp_path / "pack", monkeypatch)
    kept = pack_files(tmp_path / "pack.partial")
    path = model.paths[0]
    if change == "time":
        os.utime(path)
    elif change == "header":
        status, data = path.stat(), path.read_bytes()
        path.write_bytes(data.replace(b"attn_norm", b"attn_nerm", 1))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif change == "size":
        with path.open("ab") as file:
            file.write(b"more")
    else:
        make_small_moe(tmp_path / "model.gguf", types=MIXED, n_shards=2)
    fact = {"time": "was changed since", "header": "another header", "size": "bytes, now"}
    with pytest.raises(PackError, match=f"cannot go on so: .*{fact.get(change, '')}.*rollback"):
        convert(model, tmp_path / "pack")
    assert pack_files(tmp_path / "pack.partial") == kept


def test_a_source_that_was_moved_is_the_same_source(model, tmp_path, monkeypatch, unharmed):
    interrupted(model, tmp_path / "pack", monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    moved = [path.rename(tmp_path / "elsewhere" / path.name) for path in model.paths]
    asyncio.run(create_pack(moved[0], tmp_path / "pack"))
    assert pack_files(tmp_path / "pack") == unharmed


def test_what_is_not_ours_in_the_partial_directory_is_refused(model, tmp_path, monkeypatch):
    interrupted(model, tmp_path / "pack", monkeypatch)
    (tmp_path / "pack.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(PackError, match=r"holds 'thesis.txt', which is not ours"):
        convert(model, tmp_path / "pack")
    assert (tmp_path / "pack.partial" / "thesis.txt").read_text() == "mine"


def test_a_safety_margin_is_kept_free(model, tmp_path):
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    with pytest.raises(PackError, match="make room for"):
        convert(model, tmp_path / "pack", safety_margin_nbytes=2 * free)
    with pytest.raises(ConfigError, match="safety_margin_nbytes is -1"):
        convert(model, tmp_path / "pack", safety_margin_nbytes=-1)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("name", ["manifest.json", JOURNAL_NAME])
def test_a_disk_that_is_full_to_the_last_byte_says_how_much_is_needed(
    model, tmp_path, monkeypatch, name
):
    def full(path):
        status = os.statvfs_result((4096, 4096, 1000, 0, 0, 0, 0, 0, 0, 255))
        return status if path == tmp_path else None

    def write(fd, data, offset):
        if name in os.readlink(f"/proc/self/fd/{fd}"):  # noqa: PTH115 (a text)
            patch.setattr(os, "statvfs", full)
            raise OSError(errno.ENOSPC, NO_SPACE)
        return real(fd, data, offset)

    real = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        with pytest.raises(PackError, match=r"0 are free in \S+: make room for [1-9][0-9,]+ more"):
            convert(model, tmp_path / "pack")
    convert(model, tmp_path / "pack")
