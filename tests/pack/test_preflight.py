"""Whatever forbids a conversion is told before a byte is written, all of it in one report."""

import os
import re
import resource
import shutil
import struct

import numpy as np
import pytest
from small_moe import convert, make_small_moe, names

from tieredmoe.errors import GGUFError, MetadataError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import filesystem
from tieredmoe.pack.manifest import digest_of
from tieredmoe.pack.preflight import check_conversion
from tieredmoe.testing.tiny_container import StoredTensor, write_shards

FIRST, SECOND, THIRD = (f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3))


@pytest.fixture
def folder(tmp_path):
    """A model of three shards in a folder of its own."""
    (tmp_path / "in").mkdir()
    make_small_moe(tmp_path / "in" / "m.gguf", n_shards=3)
    return tmp_path / "in"


@pytest.fixture
def problems(folder, tmp_path):
    """All problems of converting ``folder`` to ``pack``; nothing may have been written."""

    def look(source=folder, dest=tmp_path / "pack", **options):
        before = names(tmp_path), names(folder)
        found = check_conversion(source, dest, **options)
        assert (names(tmp_path), names(folder)) == before
        return list(found.problems)

    return look


def statvfs_of(free, real=os.statvfs):
    def statvfs(path):
        status = real(path)
        return os.statvfs_result((1, 1, *status[2:3], free, free, *status[5:]))

    return statvfs


@pytest.mark.parametrize("name", [FIRST, SECOND, THIRD, "."])
def test_a_sound_model_has_no_problems_whichever_of_its_files_is_named(folder, tmp_path, name):
    found = check_conversion(folder / name, tmp_path / "pack")
    assert found.problems == ()
    found.raise_problems()
    assert len(found.inventory.shards) == 3
    assert found.free_nbytes > 0
    convert(make_small_moe(folder / "m.gguf", n_shards=3), tmp_path / "pack")
    written = sum(file.stat().st_size for file in (tmp_path / "pack").iterdir())
    assert found.needed_nbytes == written


def test_missing_shards_are_all_named(folder, problems):
    (folder / FIRST).unlink()
    (folder / THIRD).unlink()
    for source in (folder, folder / SECOND, folder / THIRD):
        assert f"2 of 3 shards missing: {FIRST}, {THIRD}" in problems(source)[0]


def test_a_shard_that_is_there_twice_is_named(folder, problems):
    shutil.copy(folder / FIRST, folder / SECOND)
    (fact, *more) = problems()
    assert f"{SECOND}: split.no is 0, but this is shard 1 of 3" in fact
    assert any(f"is in {FIRST} and in {SECOND}" in fact for fact in more)


def test_a_truncated_shard_is_named_with_what_it_lacks(folder, problems):
    os.truncate(folder / THIRD, (folder / THIRD).stat().st_size - 100)
    (fact,) = problems()
    assert re.search(f"{THIRD} truncated: [0-9]+ bytes are missing", fact)


def test_a_shard_of_another_set_is_named(folder, tmp_path, problems):
    shards = [[StoredTensor(f"other{i}", np.zeros(4, np.uint8), 0)] for i in range(3)]
    (tmp_path / "alien").mkdir()
    alien = write_shards(
        tmp_path / "alien" / "m.gguf", architecture="llama", metadata={}, shards=shards
    )
    shutil.copy(alien[1], folder / SECOND)
    assert any(f"9 in {FIRST}, 3 in {SECOND}" in fact for fact in problems())


def test_a_shard_that_names_another_model_is_named(folder, problems):
    path = folder / SECOND
    for file, name in ((folder / FIRST, b"ours"), (path, b"else")):
        data = file.read_bytes()
        n_pairs = struct.unpack("<Q", data[16:24])[0]
        pair = struct.pack("<Q", 12) + b"general.name" + struct.pack("<IQ", 8, 4) + name
        file.write_bytes(data[:16] + struct.pack("<Q", n_pairs + 1) + pair + data[24:] + bytes(64))
    assert any(f"{SECOND} is of another model: general.name is 'else'" in f for f in problems())


def test_a_file_that_is_no_gguf_is_named(folder, problems):
    (folder / SECOND).write_bytes(b"<html>404</html>")
    assert f"{SECOND} is not a GGUF file: it starts with b'<htm'" in problems()[0]


def test_a_shard_that_may_not_be_read_is_named(folder, problems, monkeypatch):
    real = os.open

    def refusing(path, *arguments, **options):
        if str(path).endswith(SECOND):
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    (fact,) = problems()
    assert f"{SECOND} cannot be opened: Permission denied" in fact


def test_two_models_in_one_folder_are_named(folder, problems):
    make_small_moe(folder / "other.gguf")
    (fact,) = problems()
    assert f"holds 2 models, name one of them: {FIRST} (3 of 3 shards), other.gguf" in fact


def test_tensors_of_unknown_types_are_counted_by_type(folder, problems):
    path = folder / FIRST
    data = bytearray(path.read_bytes())
    for tensor in list(open_inventory(path).tensors.values()):
        name = tensor.name.encode()
        if tensor.shard_index == 0 and len(tensor.shape) == 3:
            at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 8 * 3
            data[at : at + 4] = struct.pack("<I", 210)
    path.write_bytes(data)
    (fact,) = problems()
    assert f"{FIRST} tensor 'blk.0.ffn_down_exps.weight' has the unknown type 210" in fact
    assert ", and 1 more have" in fact


def test_a_model_without_routed_experts_is_refused(tmp_path):
    tensors = [StoredTensor("output.weight", np.zeros(4, np.uint8), 0)]
    path = write_shards(tmp_path / "d.gguf", architecture="llama", metadata={}, shards=[tensors])[0]
    found = check_conversion(path, tmp_path / "pack")
    assert "has no routed experts: architecture 'llama'" in found.problems[0]
    with pytest.raises(GGUFError, match="no routed experts"):
        found.raise_problems()


def test_faulty_experts_are_listed_one_by_one(tmp_path):
    def stored(layer, role, n_rows, n_columns):
        data = np.zeros((2, n_rows, 4 * n_columns), np.uint8)
        return StoredTensor(f"blk.{layer}.ffn_{role}_exps.weight", data, 0)

    keys = {"block_count": 2, "expert_count": 2, "expert_used_count": 1}
    path = write_shards(
        tmp_path / "x.gguf",
        architecture="deepseek4",
        metadata={f"deepseek4.{key}": value for key, value in keys.items()},
        shards=[[stored(0, "gate", 4, 32), stored(1, "gate", 4, 32), stored(1, "down", 32, 4)]],
    )[0]
    first, second = check_conversion(path, tmp_path / "pack").problems
    assert "layer 0 lacks the up and down experts" in first
    assert "layer 1 lacks the up experts" in second


def test_missing_metadata_is_a_metadata_error(tmp_path):
    model = make_small_moe(tmp_path / "m.gguf")
    data = model.paths[0].read_bytes().replace(b"expert_used_count", b"expert_used_c0unt")
    model.paths[0].write_bytes(data)
    found = check_conversion(model.paths[0], tmp_path / "pack")
    assert "expert_used_count" in found.problems[0]
    with pytest.raises(MetadataError):
        found.raise_problems()


def test_a_source_that_is_not_there_is_named(tmp_path, problems):
    (fact,) = problems(tmp_path / "gone.gguf")
    assert "gone.gguf: cannot be opened: No such file" in fact


def test_a_taken_name_and_a_missing_parent_are_named(problems, tmp_path):
    (tmp_path / "pack").mkdir()
    assert problems() == [f"{tmp_path}/pack: already exists; name a new directory"]
    (fact,) = problems(dest=tmp_path / "no" / "pack")
    assert "no is not a directory" in fact


def test_the_source_as_destination_is_named(folder, problems):
    for dest in (folder, folder / FIRST, folder / FIRST / "pack"):
        assert problems(dest=dest) == [f"{dest}: is the source itself; name a new directory"]


def test_a_destination_that_would_pass_for_a_shard_is_named(folder, problems):
    (fact,) = problems(dest=folder / "k3.gguf")
    assert "let it end in another way than .gguf: k3.pack" in fact
    assert problems(dest=folder / "k3.pack") == []


def test_too_little_space_is_told_with_the_margin_and_the_way_out(problems, monkeypatch, tmp_path):
    needed = check_conversion(tmp_path / "in", tmp_path / "pack").needed_nbytes
    monkeypatch.setattr(os, "statvfs", statvfs_of(needed))
    assert problems() == []
    (fact,) = problems(safety_margin_nbytes=5)
    assert f"needs {needed:,} bytes and 5 of margin, but {tmp_path} has {needed:,} free" in fact
    assert "make room for 5 more or choose another drive" in fact


def test_where_giving_the_source_up_would_make_room_that_is_said(tmp_path, monkeypatch):
    types = [dict.fromkeys(("gate", "up", "down"), 0)] * 8  # F32: layers of many pages
    source = make_small_moe(tmp_path / "m.gguf", types=types).paths[0]
    gentle = check_conversion(source, tmp_path / "pack", reclaim_source=True)
    whole = check_conversion(source, tmp_path / "pack")
    assert gentle.needed_nbytes < whole.needed_nbytes // 2
    monkeypatch.setattr(os, "statvfs", statvfs_of(gentle.needed_nbytes))
    (fact,) = check_conversion(source, tmp_path / "pack").problems
    assert f"(--reclaim-source: {gentle.needed_nbytes:,} do)" in fact
    assert check_conversion(source, tmp_path / "pack", reclaim_source=True).problems == ()


def test_a_file_system_with_small_files_is_named(problems, monkeypatch, tmp_path):
    real = os.lseek

    def fat(fd, offset, how):
        if offset > 20_000:
            raise OSError(22, "Invalid argument")
        return real(fd, offset, how)

    monkeypatch.setattr(os, "lseek", fat)
    (fact,) = problems()
    assert "more than the file system of" in fact
    assert "smaller files (--max-file-gib) than experts-00000.bin" in fact
    assert problems(file_nbytes_max=1) == []


def test_the_real_file_system_answers_for_what_no_file_can_be(tmp_path):
    assert filesystem.size_problem(tmp_path, 1 << 30) is None
    assert "more than the file system" in filesystem.size_problem(tmp_path, (1 << 63) - 1)
    assert names(tmp_path) == []


def test_where_nameless_files_cannot_be_made_one_is_made_and_removed(tmp_path, monkeypatch):
    real = os.open

    def no_tmpfile(path, flags, *arguments, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", no_tmpfile)
    assert "more than the file system" in filesystem.size_problem(tmp_path, (1 << 63) - 1)
    assert names(tmp_path) == []


def test_a_limit_of_the_process_is_named(problems, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, resource.RLIM_INFINITY))
    (fact,) = problems()
    assert "this process may write 1,000 to one (ulimit -f)" in fact


def test_files_without_direct_reads_are_a_note_and_no_problem(folder, tmp_path, monkeypatch):
    real = os.open

    def cached_only(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", cached_only)
    found = check_conversion(folder, tmp_path / "pack")
    assert found.problems == ()
    assert {note.split(":")[0] for note in found.notes} == {str(folder), str(tmp_path)}
    assert all("no direct I/O" in note for note in found.notes)


def test_a_source_that_cannot_be_given_up_is_named_only_if_that_is_asked(folder, problems):
    os.link(folder / SECOND, folder / "second")
    assert problems() == []
    (fact,) = problems(reclaim_source=True)
    assert f"{SECOND} has another name (a hard link)" in fact


def test_a_damaged_journal_is_one_of_the_problems(problems, tmp_path):
    (tmp_path / "pack.partial").mkdir()
    for name, text in (("conversion.lock", ""), ("conversion.journal", '{"a": 1}\n' * 2)):
        (tmp_path / "pack.partial" / name).write_text(text)
    line = b'{"unit": 1}'
    with (tmp_path / "pack.partial" / "conversion.journal").open("ab") as file:
        file.write(digest_of(line).hex().encode() + b" " + line + b"\n")
    (fact,) = problems()
    assert "an interrupted conversion cannot be gone on with" in fact
    assert "is damaged at byte 0" in fact


def test_many_problems_are_one_message(folder, tmp_path, problems, monkeypatch):
    (folder / FIRST).unlink()
    os.truncate(folder / SECOND, 5000)
    (folder / THIRD).write_bytes(b"nothing")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack.partial").mkdir()
    (tmp_path / "pack.partial" / "photos").write_text("mine")
    monkeypatch.setattr(os, "statvfs", statvfs_of(1))
    found = problems()
    for fact in (
        f"1 of 3 shards missing: {FIRST}",
        f"{SECOND} truncated: ",
        f"{THIRD} is not a GGUF file",
        "already exists",
        "pack.partial is in the way and not a leftover of ours",
        "needs at least 5,007 bytes, but",
    ):
        assert sum(fact in problem for problem in found) == 1, fact
    with pytest.raises(PackError) as caught:
        check_conversion(folder, tmp_path / "pack").raise_problems()
    for fact in ("1 of 3 shards missing", "truncated", "not a GGUF file", "already exists"):
        assert fact in str(caught.value)


def test_many_problems_of_the_destination_are_one_message(tmp_path, folder, monkeypatch):
    os.link(folder / SECOND, folder / "second")
    (tmp_path / "pack").mkdir()
    monkeypatch.setattr(os, "statvfs", statvfs_of(1))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    found = check_conversion(folder, tmp_path / "pack", reclaim_source=True)
    for fact in ("already exists", "make room for", "ulimit -f", "hard link"):
        assert sum(fact in problem for problem in found.problems) == 1, fact
