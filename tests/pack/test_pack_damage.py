"""Damaged data files are noticed at opening where that is cheap, and by verifying always."""

import asyncio
import errno
import os

import pytest
from small_moe import flip, make_small_moe, pack_files

from tieredmoe.errors import PackError
from tieredmoe.pack import create_pack, open_pack, verify_pack
from tieredmoe.pack import spans as spans_module
from tieredmoe.spec import ExpertKey


def test_a_path_without_a_pack_is_refused(tmp_path):
    with pytest.raises(PackError, match="nothing: does not exist"):
        open_pack(tmp_path / "nothing")
    with pytest.raises(PackError, match=r"is not a pack, or not a whole one: no manifest\.json"):
        open_pack(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PackError, match="file: is a file, not a pack"):
        open_pack(tmp_path / "file")


@pytest.mark.parametrize("name", ["experts-00000.bin", "dense-00000.bin", "dense-00001.bin"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_data_file_of_another_size_is_refused(pack, name, change):
    nbytes = (pack / name).stat().st_size
    os.truncate(pack / name, nbytes + change)
    with pytest.raises(
        PackError, match=f"{name} has {nbytes + change:,} bytes instead of {nbytes:,}"
    ):
        open_pack(pack)


def test_all_missing_data_files_are_listed(pack):
    (pack / "experts-00000.bin").unlink()
    (pack / "dense-00001.bin").unlink()
    with pytest.raises(PackError, match=r"experts-00000.bin: No such.*dense-00001.bin: No such"):
        open_pack(pack)


def test_a_damaged_header_is_refused_at_opening(pack):
    flip(pack / "dense-00001.bin", 30)
    with pytest.raises(PackError, match=r"dense-00001\.bin: is damaged: its header"):
        open_pack(pack)


def test_a_data_file_that_shrinks_after_opening_is_a_pack_error(pack):
    opened = open_pack(pack)
    for name, file in [
        ("output.weight", "dense-00000.bin"),
        ("blk.0.ffn_up_exps.weight", "experts-00000.bin"),
    ]:
        os.truncate(pack / file, 100)
        with pytest.raises(PackError, match=f"{file}: ends at byte"):
            opened.read(name)


def verified(pack):
    return asyncio.run(verify_pack(pack)).damage


@pytest.mark.parametrize(
    ("layer", "expert", "role", "offset"),
    [(0, 0, "gate", 0), (0, 3, "up", 1100), (1, 2, "down", 2 * 1088), (1, 3, "down", 3263)],
)
def test_verify_names_the_damaged_role(pack, layer, expert, role, offset):
    where = open_pack(pack).locate(ExpertKey(layer, expert))
    flip(pack / "experts-00000.bin", where.offset + offset)
    (damage,) = verified(pack)
    assert damage.what == f"layer {layer}, expert {expert}, {role}"
    assert damage.key == (layer, expert)
    assert damage.offset <= where.offset + offset < damage.offset + damage.nbytes
    assert "does not match its digest" in str(damage)


def test_verify_names_padding_that_is_not_zero(pack):
    where = open_pack(pack).locate(ExpertKey(1, 1))
    flip(pack / "experts-00000.bin", where.offset + where.nbytes - 1)
    (damage,) = verified(pack)
    assert (damage.what, damage.fact) == ("layer 1, expert 1, padding", "is not zero")


def test_verify_names_a_damaged_dense_tensor_across_reads(pack, monkeypatch):
    monkeypatch.setattr(spans_module, "PIECE_NBYTES", 64)
    flip(pack / "dense-00000.bin", (pack / "dense-00000.bin").stat().st_size - 40)
    (damage,) = verified(pack)
    assert damage.what == "tensor output.weight"
    assert damage.path.name == "dense-00000.bin"


def test_verify_finds_every_flipped_byte_of_the_dense_files(tmp_path):
    model = make_small_moe(tmp_path / "model.gguf", n_experts=2, trailing=b"tail", alignment=64)
    asyncio.run(create_pack(model.paths[0], tmp_path / "pack"))
    file = tmp_path / "pack" / "dense-00000.bin"
    whole = file.read_bytes()
    n_header = open_pack(tmp_path / "pack").manifest.layout.shards[0].segments[0].nbytes
    for offset in [*range(n_header, len(whole), 997), len(whole) - 1]:
        flip(file, offset)
        (damage,) = verified(tmp_path / "pack")
        assert damage.offset <= offset < damage.offset + damage.nbytes
        file.write_bytes(whole)


def test_verify_names_every_damaged_place(pack):
    opened = open_pack(pack)
    flip(pack / "experts-00000.bin", opened.locate(ExpertKey(0, 1)).offset)
    flip(pack / "experts-00000.bin", opened.locate(ExpertKey(1, 0)).offset)
    flip(pack / "dense-00000.bin", (pack / "dense-00000.bin").stat().st_size - 1)
    assert [damage.key for damage in verified(pack)] == [(0, 1), (1, 0), None]


def test_verify_goes_on_after_bytes_that_cannot_be_read(pack, monkeypatch):
    bad = open_pack(pack).locate(ExpertKey(0, 2))
    inode = (pack / "experts-00000.bin").stat().st_ino
    real = os.preadv

    def preadv(fd, buffers, offset):
        if os.fstat(fd).st_ino == inode and offset == bad.offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    (damage,) = verified(pack)
    assert damage.key == (0, 2)
    assert "cannot be read" in str(damage)
    assert "Input/output error" in str(damage)


def test_verify_changes_nothing(pack):
    before = pack_files(pack)
    verified(pack)
    assert pack_files(pack) == before


def test_cancelling_a_verification_ends_it(pack, monkeypatch):
    async def scenario():
        task = asyncio.create_task(verify_pack(pack, progress=lambda _: task.cancel()))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
