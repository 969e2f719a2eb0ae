"""Packs of odd layouts on several drives, and reads of all their experts through a backend."""

import asyncio
from functools import partial

from small_moe import MIXED, convert, make_small_moe

from tieredmoe.backends import open_backend
from tieredmoe.pack import PackSource, open_pack
from tieredmoe.pack.attach import attach_drives
from tieredmoe.pack.mirror import mirror_pack
from tieredmoe.pack.split import split_pack
from tieredmoe.spec import ROLES
from tieredmoe.testing import host_arena

N_EXPERTS = 12

buffered = partial(open_backend, "buffered")


def make_pack(directory, *, seed=0, types=MIXED, n_experts=N_EXPERTS):
    """A pack of three unlike layers in three expert files, and the model that it was made from."""
    model = make_small_moe(
        directory / f"model{seed}.gguf", types=types, n_experts=n_experts, n_shards=2, seed=seed
    )
    convert(model, directory / f"pack{seed}", file_nbytes_max=1)
    return directory / f"pack{seed}", model


def split(pack, *drives, **options):
    return asyncio.run(split_pack(pack, drives, **options))


def mirror(pack, directory, **options):
    return asyncio.run(mirror_pack(pack, directory, **options))


def attach(pack, *directories):
    return asyncio.run(attach_drives(pack, directories))


def tree(directory):
    """Every file below a directory, by its path in it."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


async def read_experts(pack, keys, backend):
    """The payload of each key, as a leaf source brings it; the source's counters."""
    keys = list(keys)
    arena = host_arena(len(keys), pack.slot_nbytes)
    source = PackSource(pack, backend)
    fills = source.read_into([(key, arena.slot(i)) for i, key in enumerate(keys)])
    await asyncio.gather(*(fill.done for fill in fills))
    payloads = {
        key: bytes(arena.slot(i).view[: pack.spec.layouts[key.layer].payload_nbytes])
        for i, key in enumerate(keys)
    }
    return payloads, source.counters


def payload(model, key):
    return b"".join(model.slabs[key.layer, role, key.expert] for role in ROLES)


def assert_reads_all(pack, model):
    """Every expert comes whole through one backend over all drives."""

    async def main():
        backend = await pack.open_backend(buffered)
        payloads, counters = await read_experts(pack, pack.spec.keys(), backend)
        stats, drives = backend.stats(), backend.drive_stats()
        await backend.close()
        assert payloads == {key: payload(model, key) for key in pack.spec.keys()}
        assert counters.pack_reads == stats.reads == sum(drive.reads for drive in drives)
        assert counters.pack_read_bytes == sum(drive.read_nbytes for drive in drives)
        return drives

    return asyncio.run(main())


def assert_opens_plainly(path, model):
    """The pack is a pack as it was before it had drives."""
    pack = open_pack(path)
    for name in pack.tensors:
        pack.read(name)
    assert pack.spec.n_experts * len(pack.spec.layers) * len(ROLES) == len(model.slabs)
