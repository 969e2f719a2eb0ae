"""A pack in another system's format is read where it lies, every expert byte for byte."""

import asyncio
import itertools
import shutil

import numpy as np
import pytest
from foreign_making import make
from small_moe import MIXED, UNIFORM, flip, make_small_moe

from tieredmoe.chain import open_hierarchy
from tieredmoe.config import HierarchyConfig
from tieredmoe.errors import GGUFError, PackError
from tieredmoe.gguf import open_inventory
from tieredmoe.pack import open_checkpoint
from tieredmoe.pack.foreign import is_foreign_pack, open_foreign_pack
from tieredmoe.spec import ExpertKey

FORMS = ["v1", "ggml"]
FORMATS = {"v1": "SGLANG-EXPERTPACK-v1", "ggml": "GGMLMOEPACKv1"}


def config(**options):
    return HierarchyConfig(vram="1MiB", reserve=0, stage_slots=2, **options)


def served(pack, **options):
    """Every expert of ``pack`` as a hierarchy on the real disk serves it."""

    async def serve():
        found = {}
        async with await open_hierarchy(pack, config(**options)) as hierarchy:
            for layer in pack.spec.layers:
                nbytes = pack.spec.layouts[layer].payload_nbytes
                for expert in range(pack.spec.n_experts):
                    async with hierarchy.acquire(layer, [expert]) as lease:
                        await lease.ready()
                        record = bytes(lease.slots[expert].view[:nbytes])
                        found[ExpertKey(layer, expert)] = record
        return found

    return asyncio.run(serve())


def assert_all_right(made, **options):
    pack = open_foreign_pack(made.path)
    found = served(pack, **options)
    assert list(found) == list(pack.spec.keys())
    assert found == {key: made.right(key) for key in found}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["threads", "buffered"])
def test_every_expert_is_served_byte_for_byte(tmp_path, form, backend):
    assert_all_right(make(tmp_path, form), backend=backend)


def test_layers_may_differ_in_types_and_sizes(tmp_path):
    assert_all_right(make(tmp_path, "ggml", types=MIXED))


@pytest.mark.parametrize("alignment", [1, 512, 2048, 8192])
def test_records_at_any_alignment_are_read_in_the_pages_around_them(tmp_path, alignment):
    assert_all_right(make(tmp_path, "v1", alignment=alignment))


@pytest.mark.parametrize("order", list(itertools.permutations(("gate", "up", "down"))))
def test_roles_in_any_order_come_to_their_uniform_places(tmp_path, order):
    assert_all_right(make(tmp_path, "ggml", types=MIXED, role_order=order))


def test_the_source_may_be_split_into_shards(tmp_path):
    assert_all_right(make(tmp_path, "ggml", n_shards=3))


@pytest.mark.parametrize("form", FORMS)
def test_experts_are_served_without_staging_too(tmp_path, form):
    made = make(tmp_path, form)

    async def serve():
        settings = HierarchyConfig(vram="1MiB", reserve=0, stage_slots=0)
        hierarchy = await open_hierarchy(open_foreign_pack(made.path), settings)
        async with hierarchy, hierarchy.acquire(1, [0, 3]) as lease:
            await lease.ready()
            roles = hierarchy.spec.layouts[1].roles
            views = [lease.slots[expert].view for expert in (0, 3)]
            return [b"".join(view[r.offset : r.offset + r.nbytes] for r in roles) for view in views]

    assert asyncio.run(serve()) == [made.right((1, expert)) for expert in (0, 3)]


ODD = [("v1", {}), ("v1", {"alignment": 64}), ("ggml", {}), ("ggml", {"types": MIXED})]


@pytest.mark.parametrize(("form", "options"), ODD)
def test_no_read_is_larger_than_a_slot_or_passes_what_is_needed(tmp_path, form, options):
    made = make(tmp_path, form, **options)
    pack = open_foreign_pack(made.path)
    size = made.path.stat().st_size
    for key in pack.spec.keys():
        extents = pack.extents(key)
        (read,) = extents.envelopes
        assert extents.nbytes <= pack.slot_nbytes
        assert read.offset + read.needed_nbytes <= size
        assert not read.offset % 4096
        assert not read.nbytes % 4096
    assert not pack.slot_nbytes % 4096


@pytest.mark.parametrize(("form", "options"), ODD)
def test_a_slot_is_no_larger_than_the_largest_read(tmp_path, form, options):
    pack = open_foreign_pack(make(tmp_path, form, **options).path)
    assert pack.slot_nbytes == max(pack.extents(key).nbytes for key in pack.spec.keys())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("key", [(2, 0), (-1, 0), (0, 4), (0, -1)])
def test_an_expert_that_does_not_exist_is_a_key_error(tmp_path, form, key):
    pack = open_foreign_pack(make(tmp_path, form).path)
    with pytest.raises(KeyError):
        pack.extents(ExpertKey(*key))
    with pytest.raises(KeyError):
        pack.digests(ExpertKey(*key))


@pytest.mark.parametrize("form", FORMS)
def test_dense_tensors_and_metadata_are_those_of_the_source(tmp_path, form):
    made = make(tmp_path, form)
    pack, source = open_foreign_pack(made.path), open_inventory(made.model.paths[0])
    assert dict(pack.metadata) == dict(source.metadata)
    assert pack.tensors == source.tensors
    assert np.array_equal(pack.read("output.weight"), source.read("output.weight"))
    where = pack.locate_tensor("output.weight")
    data = pack.tensor_files[where.file_index].read_bytes()
    assert data[where.offset : where.offset + where.nbytes] == pack.read("output.weight").tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_the_form_is_recognised_by_its_first_bytes_alone(tmp_path, form):
    made = make(tmp_path, form)
    assert is_foreign_pack(made.path, made.path.read_bytes()[:64])
    assert not is_foreign_pack(made.path, made.path.read_bytes()[:12])
    assert not is_foreign_pack(made.path, b"")
    assert not is_foreign_pack(made.path, made.model.paths[0].read_bytes()[:64])
    assert open_foreign_pack(made.path).format == FORMATS[form]


# ---- where the source is


@pytest.mark.parametrize("form", FORMS)
def test_the_source_is_found_by_the_manifest(tmp_path, form):
    made = make(tmp_path, form)
    assert open_foreign_pack(made.path).source.path == made.model.paths[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_manifest_kept_elsewhere_may_be_named(tmp_path, form):
    made = make(tmp_path, form)
    elsewhere = tmp_path / "cache.json"
    made.manifest.rename(elsewhere)
    pack = open_foreign_pack(made.path, manifest=elsewhere)
    assert pack.source.path == made.model.paths[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_source_is_found_beside_the_pack(tmp_path, form):
    made = make(tmp_path, form)
    made.manifest.unlink()
    shutil.move(made.model.paths[0], tmp_path / "model.gguf")
    assert open_foreign_pack(made.path).source.path == tmp_path / "model.gguf"


@pytest.mark.parametrize("form", FORMS)
def test_a_named_source_comes_before_the_manifests(tmp_path, form):
    made = make(tmp_path, form)
    moved = tmp_path / "moved.gguf"
    shutil.move(made.model.paths[0], moved)
    pack = open_foreign_pack(made.path, source=moved)
    assert served(pack) == {key: made.right(key) for key in pack.spec.keys()}


@pytest.mark.parametrize("form", FORMS)
def test_a_recorded_source_that_is_gone_is_named_with_the_way_out(tmp_path, form):
    made = make(tmp_path, form)
    gone = made.model.paths[0]
    gone.unlink()
    with pytest.raises(PackError, match=rf"{gone} by its manifest, which does not exist\): name"):
        open_foreign_pack(made.path)


@pytest.mark.parametrize("form", FORMS)
def test_no_source_and_no_manifest_is_one_clear_error(tmp_path, form):
    made = make(tmp_path, form)
    made.manifest.unlink()
    with pytest.raises(PackError, match=r"experts only.*there is no manifest.*: name that file"):
        open_foreign_pack(made.path)


def test_two_models_beside_the_pack_are_not_guessed_between(tmp_path):
    made = make(tmp_path, "ggml")
    made.manifest.unlink()
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(made.model.paths[0], tmp_path / name)
    with pytest.raises(GGUFError, match="holds 2 models"):
        open_foreign_pack(made.path)


# ---- a source that is another model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"n_experts": 5},
        {"types": (UNIFORM,)},
        {"types": MIXED},
        {"types": (UNIFORM, MIXED[1])},
    ],
    ids=["other bytes", "more experts", "fewer layers", "more layers", "other types"],
)
def test_the_source_of_another_model_is_refused(tmp_path, form, other):
    made = make(tmp_path, form)
    model = make_small_moe(tmp_path / "other.gguf", **other)
    with pytest.raises(PackError) as error:
        open_foreign_pack(made.path, source=model.paths[0])
    assert error.value.path == made.path


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("role", ["gate", "up", "down"])
def test_a_fine_tune_that_changed_one_matrix_of_one_layer_is_refused(tmp_path, form, layer, role):
    made = make(tmp_path, form)
    model = made.model.paths[0]
    info = open_inventory(model).tensors[f"blk.{layer}.ffn_{role}_exps.weight"]
    data = bytearray(model.read_bytes())
    for offset in range(info.offset, info.offset + info.nbytes):
        data[offset] ^= 1
    model.write_bytes(data)
    with pytest.raises(PackError, match=f"the {role} matrix of layer {layer}, .* another model"):
        open_foreign_pack(made.path)


def test_a_source_whose_matrices_differ_in_size_has_no_v1_pack(tmp_path):
    made = make(tmp_path, "v1", types=(UNIFORM,) * 3)
    other = make_small_moe(tmp_path / "other.gguf", types=MIXED)
    with pytest.raises(PackError, match="holds matrices of one size, and the source's have"):
        open_foreign_pack(made.path, source=other.paths[0])


def test_a_model_whose_first_layers_are_dense_has_no_v1_pack(tmp_path):
    """The format counts layers from 0; SGLang's Kimi pack is for such models."""
    made = make(tmp_path, "v1", types=(UNIFORM, UNIFORM))
    data = made.model.paths[0].read_bytes()
    for layer in (1, 0):
        data = data.replace(b"blk.%d.ffn_" % layer, b"blk.%d.ffn_" % (layer + 1))
    data = data.replace(b"block_count\x04\0\0\0\x02", b"block_count\x04\0\0\0\x03")
    made.model.paths[0].write_bytes(data)
    with pytest.raises(PackError, match=r"from 0 on, and the source routes layers \(1, 2\)"):
        open_foreign_pack(made.path)


# ---- files that change, files that are none


@pytest.mark.parametrize("form", FORMS)
def test_a_pack_or_source_that_changed_since_it_was_opened_is_noticed(tmp_path, form):
    made = make(tmp_path, form)
    pack = open_foreign_pack(made.path)
    pack.check_unchanged()
    with made.model.paths[0].open("ab") as file:
        file.write(b"\0")
    with pytest.raises(GGUFError, match="changed since it was opened"):
        pack.check_unchanged()
    with made.path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(PackError, match="changed since it was opened"):
        pack.check_unchanged()
    made.path.unlink()
    with pytest.raises(PackError, match="cannot be read any more"):
        pack.check_unchanged()


def test_what_is_no_foreign_pack_is_refused(tmp_path):
    with pytest.raises(PackError, match="cannot be opened"):
        open_foreign_pack(tmp_path / "nothing")
    with pytest.raises(PackError, match="is a directory"):
        open_foreign_pack(tmp_path)
    (tmp_path / "file").write_bytes(b"SGLANG")
    with pytest.raises(PackError, match="does not begin like a pack of the format SGLANG-EXPERT"):
        open_foreign_pack(tmp_path / "file")


@pytest.mark.parametrize("form", FORMS)
def test_a_foreign_pack_is_opened_like_any_other_model(tmp_path, form):
    made = make(tmp_path, form)
    assert open_checkpoint(made.path).format == FORMATS[form]


def test_repair_from_names_the_source_of_a_foreign_pack(tmp_path):
    made = make(tmp_path, "v1")
    where = open_foreign_pack(made.path).extents(ExpertKey(0, 3)).envelopes[0]
    flip(made.path, where.offset + 5)
    pack = open_foreign_pack(made.path)
    found = served(pack, verify="always", repair_from=made.model.paths[0])
    assert found == {key: made.right(key) for key in pack.spec.keys()}
