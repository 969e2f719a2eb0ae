"""What every reader of files must do with any input: a right answer, or an error of ours.

A target is a strategy and a check. The check asserts what a right answer is; any exception but ours
is a failure.
"""

import asyncio
import contextlib
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import fuzz_inputs
from small_moe import MIXED, convert, make_small_moe

from tieredmoe.errors import GGUFError, MetadataError, PackError, TieredMoEError
from tieredmoe.gguf import (
    GGUFInventory,
    ShardInfo,
    merge_headers,
    parse_header,
    predicting_layers,
)
from tieredmoe.pack import VirtualPack, check_conversion, split_pack
from tieredmoe.pack.conversion_state import ConversionState
from tieredmoe.pack.document import dump_manifest, parse_manifest
from tieredmoe.pack.drive_index import parse_index, read_part
from tieredmoe.pack.journal import read_journal
from tieredmoe.pack.manifest import DIGEST_NBYTES, Manifest
from tieredmoe.pack.planning import plan_inventory
from tieredmoe.pack.sealed import stated_digest
from tieredmoe.spec import ExpertKey

PATH = Path("fuzzed")


class Target(NamedTuple):
    """Inputs and what is done with them."""

    strategy: object
    check: object


def check_header(data):
    """A header, its experts, the pack that it would become and where its records would be read."""
    data, file_nbytes = data
    header = _header(data, file_nbytes)
    assert header.data_offset > 0
    stored = sorted((t for t in header.tensors if t.nbytes), key=lambda tensor: tensor.offset)
    for tensor in stored:
        assert header.data_offset <= tensor.offset
        assert tensor.offset + tensor.nbytes <= header.file_nbytes
        assert tensor.offset % header.alignment == 0
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(stored))
    metadata, tensors = merge_headers([header])
    predicting_layers(_inventory(header, metadata, tensors))
    model = VirtualPack(_inventory(header, metadata, tensors))
    layout = plan_inventory(model.inventory)
    spec = model.spec
    for layer in spec.layers:
        for key in (ExpertKey(layer, 0), ExpertKey(layer, spec.n_experts - 1)):
            for envelope in model.extents(key).envelopes:
                assert envelope.offset + envelope.needed_nbytes <= header.file_nbytes
            assert model.extents(key).nbytes <= model.slot_nbytes
            record = layout.record(key)
            assert record.offset + record.nbytes <= layout.files[record.file_index].nbytes
    assert sum(s.nbytes for shard in layout.shards for s in shard.segments) == header.file_nbytes
    _check_openable(layout)


def _header(data, file_nbytes):
    return parse_header(data, path=PATH, file_nbytes=max(file_nbytes, len(data)))


def _inventory(header, metadata, tensors):
    shard = ShardInfo(PATH, header.file_nbytes, header.data_offset, header.alignment, 0)
    return GGUFInventory((shard,), metadata, tensors)


def _check_openable(layout):
    """What may be converted must be opened afterwards: an hour later is too late to refuse it."""
    blank = tuple(
        tuple(bytes(DIGEST_NBYTES * layout.n_pieces(segment)) for segment in shard.segments)
        for shard in layout.shards
    )
    manifest = Manifest(layout, blank)
    assert parse_manifest(dump_manifest(manifest), PATH) == manifest


def check_manifest(data):
    """A manifest that is accepted is one that could have been written."""
    manifest = parse_manifest(data, PATH)
    layout = manifest.layout
    assert parse_manifest(dump_manifest(manifest), PATH) == manifest
    for name, stored in layout.tensors.items():
        extents = list(layout.tensor_extents(name))
        assert sum(extent.nbytes for extent in extents) == stored.nbytes
        for extent in extents:
            assert extent.offset + extent.nbytes <= layout.files[extent.file_index].nbytes
        assert stored.source_offset + stored.nbytes <= layout.shards[stored.shard_index].nbytes


class _Stage:
    """A small model, its pack on two drives, and the documents that go with them."""

    def __init__(self, directory):
        self.directory = directory
        model = make_small_moe(directory / "m.gguf", types=MIXED, n_shards=2)
        self.source = model.paths[0]
        self.pack = directory / "pack"
        convert(model, self.pack)
        asyncio.run(split_pack(self.pack, [directory / "a", directory / "b"]))
        self.manifest = (self.pack / "manifest.json").read_bytes()
        self.spec = parse_manifest(self.manifest, PATH).layout.spec
        self.index = (self.pack / "drives.json").read_bytes()
        self.part = (directory / "a" / "manifest.json").read_bytes()
        self.partial = directory / "again.partial"
        self.partial.mkdir()
        (self.partial / "conversion.lock").touch()

    def check_index(self, data):
        digest = stated_digest(self.manifest)
        index = parse_index(data, PATH, pack_digest=digest, spec=self.spec)
        assert index.directories
        assert index.weights is None or len(index.weights) == len(index.directories)

    def check_part(self, data):
        (self.directory / "manifest.json").write_bytes(data)
        part = read_part(self.directory)
        assert 0 <= part.drive < len(part.weights)

    def check_journal(self, data):
        """The records that are read are a beginning of the file; going on is decided from them."""
        path = self.partial / "conversion.journal"
        path.write_bytes(data)
        found = check_conversion(self.source, self.directory / "again")
        assert isinstance(found.problems, tuple)
        records, nbytes = read_journal(path)
        assert b"".join(map(fuzz_inputs.line, records)) == data[:nbytes] or not records
        ConversionState.of(records)

    def records(self):
        """What a conversion notes that has written one unit, given it up and begun another."""
        digests = ["00" * 16, "11" * 16]
        head = {
            "format": "tieredmoe-journal",
            "version": 1,
            "work": "conversion",
            "plan": "00" * 16,
            "file_nbytes_max": None,
            "shards": [{"path": str(self.source), "nbytes": 1, "mtime_ns": 2, "header": "00" * 16}],
            "files": ["experts-00000.bin"],
        }
        return [
            head,
            {"unit": 0, "state": "written", "digests": digests},
            {"unit": 0, "state": "giving"},
            {"unit": 0, "state": "given"},
            {"unit": 2, "state": "written", "digests": digests},
            {"unit": 2, "state": "returned"},
        ]


@contextlib.contextmanager
def targets():
    """All targets by name; files that they need are there meanwhile."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        stage = _Stage(Path(name))
        yield {
            "gguf": Target(fuzz_inputs.headers, check_header),
            "manifest": Target(fuzz_inputs.sealed([stage.manifest]), check_manifest),
            "drives": Target(fuzz_inputs.sealed([stage.index]), stage.check_index),
            "drive": Target(fuzz_inputs.sealed([stage.part]), stage.check_part),
            "journal": Target(fuzz_inputs.journals(stage.records()), stage.check_journal),
        }


OURS = (GGUFError, MetadataError, PackError, TieredMoEError)
