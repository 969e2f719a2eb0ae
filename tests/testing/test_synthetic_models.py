import asyncio
import shutil
import subprocess
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

from tieredmoe import HierarchyConfig, open_hierarchy
from tieredmoe.adapters import open_model
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.errors import ConfigError, GGUFError
from tieredmoe.gguf import find_experts, open_inventory
from tieredmoe.pack import open_checkpoint
from tieredmoe.testing import (
    RoutingStatistics,
    make_deepseek_v4,
    make_kimi_k3,
    make_synthetic,
    text_like_tokens,
)
from tieredmoe.testing.synthetic import deepseek_v4, files
from tieredmoe.testing.synthetic.blocks import SCALED_TYPES, BlockScales
from tieredmoe.testing.synthetic.kimi_k3 import kimi_k3_shape, kimi_k3_tensors
from tieredmoe.testing.tiny_kimi_shape import KimiK3Shape
from tieredmoe.testing.tiny_shape import DeepSeekV4Shape

DEEPSEEK = {"model": "deepseek-v4-flash", "n_layers": 2, "n_experts": 6, "vocab_size": 320}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Two layers, CSA and HCA, by hash and by score."""
    path = tmp_path_factory.mktemp("synthetic") / "m.gguf"
    yield make_synthetic(**DEEPSEEK, path=path)
    path.unlink()


@pytest.fixture
def scratch(tmp_path):
    """A directory whose files go at once: pytest would keep gigabytes of three runs."""
    yield tmp_path
    for path in tmp_path.iterdir():
        path.unlink()


def read(path, nbytes, offset=0):
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)


@pytest.mark.parametrize("ggml_type", sorted(SCALED_TYPES), ids=lambda t: T(t).name)
def test_scaled_blocks_mean_weights_of_the_deviation_asked_for(ggml_type):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, 20_000 * GGML_QUANT_SIZES[ggml_type][1], dtype=np.uint8)
    BlockScales(ggml_type, 0.02, rng).put(blocks, 0, begin=0, end=len(blocks))
    weights = dequantize(blocks.reshape(1, -1), ggml_type)
    assert weights.std() == pytest.approx(0.02, rel=0.03)
    assert abs(weights.mean()) < 0.02 * 0.02


def test_a_tensor_in_pieces_has_the_scales_of_the_whole():
    rng = np.random.default_rng(0)
    scales = BlockScales(T.Q2_K, 0.02, rng)
    whole = np.zeros(84 * 70_000, np.uint8)
    scales.put(whole, 0, begin=0, end=len(whole))
    cut = 84 * 66_000 + 81  # inside of a block's scales
    piece = np.zeros(4096 + len(whole) - cut, np.uint8)
    scales.put(piece, 4096 - cut, begin=cut, end=len(whole))
    assert np.array_equal(piece[4096:], whole[cut:])


def test_deepseek_has_the_tensors_of_the_tiny_maker_and_real_sizes(scratch):
    shape = DeepSeekV4Shape(num_hidden_layers=6)
    tiny = make_deepseek_v4(scratch / "tiny.gguf", shape=shape)
    planned = {tensor.name: tensor for tensor in deepseek_v4.deepseek_v4_tensors(shape)}
    assert {name: tensor.size for name, tensor in planned.items()} == {
        name: values.shape for name, values in tiny.items()
    }
    real = deepseek_v4.deepseek_v4_shape(n_layers=43)
    tensors = list(deepseek_v4.deepseek_v4_tensors(real))
    assert len(tensors) == 1328
    # The published file with every BF16 matrix but the router as Q8_0, by tensors.
    assert sum(tensor.nbytes for tensor in tensors) == 155_089_895_772
    assert real.compress_ratios[:6] == (0, 0, 4, 128, 4, 128)
    assert real.num_hash_layers == 3


def test_kimi_has_the_tensors_of_the_tiny_maker_and_real_sizes(scratch):
    shape = KimiK3Shape()
    tiny = make_kimi_k3(scratch / "tiny.gguf", shape=shape)
    planned = {tensor.name: tensor.size for tensor in kimi_k3_tensors(shape)}
    assert planned == {name: values.shape for name, values in tiny.items()}
    tensors = list(kimi_k3_tensors(kimi_k3_shape(n_layers=93)))
    assert len(tensors) == 2573
    assert sum(t.nbytes for t in tensors if t.is_expert) == 985_575_456_768
    assert sum(t.nbytes for t in tensors) == pytest.approx(1008.94e9, rel=1e-4)


def test_few_layers_have_every_kind_of_attention_and_of_routing():
    for n_layers, ratios, n_hash in (
        (2, (4, 128), 1),
        (3, (0, 4, 128), 1),
        (4, (0, 0, 4, 128), 1),
        (8, (0, 0, 4, 128, 4, 128, 4, 128), 1),
        (30, None, 2),
    ):
        shape = deepseek_v4.deepseek_v4_shape(n_layers=n_layers)
        assert ratios in (None, shape.compress_ratios)
        assert shape.num_hash_layers == n_hash
    assert kimi_k3_shape(n_layers=2).full_attn_layers == (2,)
    assert kimi_k3_shape(n_layers=6).full_attn_layers == (4, 6)


def test_records_have_the_published_size(deepseek):
    spec = find_experts(open_inventory(deepseek.paths[0])).spec
    assert {layout.payload_nbytes for layout in spec.layouts.values()} == {13_369_344}
    assert deepseek.expert_nbytes == 13_369_344
    assert deepseek.paths[0].stat().st_size == deepseek.nbytes


def test_every_byte_is_written_and_none_can_be_compressed(deepseek):
    path = deepseek.paths[0]
    seen, n_pages = set(), 0
    for at in range(0, deepseek.nbytes, 8 << 20):
        data = read(path, 8 << 20, at)
        assert len(zlib.compress(data[: 1 << 18], 1)) > 0.9 * min(len(data), 1 << 18)
        pages = [data[page : page + 4096] for page in range(0, len(data), 4096)]
        seen.update(map(hash, pages))
        n_pages += len(pages)
    assert len(seen) == n_pages  # no page comes twice, nor one of zeros where nothing was written
    experts = find_experts(open_inventory(path))
    for role in ("gate", "up", "down"):
        slab = experts.slab(1, role, 3)
        data = read(path, slab.nbytes, slab.offset)
        assert len(zlib.compress(data, 1)) > 0.97 * len(data)


def test_a_seed_always_gives_the_same_bytes_on_any_number_of_threads(scratch, monkeypatch):
    monkeypatch.setattr(files, "_THREADS_MAX", 1)
    sizes = DEEPSEEK | {"n_layers": 1}
    of_one_thread, other = (
        make_synthetic(**sizes, path=scratch / f"{seed}.gguf", seed=seed).paths[0]
        for seed in (0, 1)
    )
    monkeypatch.undo()
    again = make_synthetic(**sizes, path=scratch / "again.gguf").paths[0]
    for at in range(0, again.stat().st_size, 8 << 20):
        data = read(again, 8 << 20, at)
        assert read(of_one_thread, 8 << 20, at) == data
        assert read(other, 8 << 20, at) != data


def test_shards_of_about_equal_size_are_one_model(scratch):
    made = make_synthetic(**DEEPSEEK, path=scratch / "m.gguf", n_shards=3)
    assert [path.name for path in made.paths] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    sizes = [path.stat().st_size for path in made.paths]
    assert sum(sizes) == made.nbytes
    assert max(sizes) < 0.5 * made.nbytes
    assert len(find_experts(open_inventory(made.paths[1])).tensors) == 6


def logits_of(path, n_tokens, *, budget):
    """The logits of a few tokens by ``open_model``, and the counters of the run."""

    async def main():
        config = HierarchyConfig(vram=budget, reserve=0, allow_buffered=True)
        async with await open_model(path, config, n_context=8, chunk_length=8) as language:
            ids = torch.tensor(text_like_tokens(n_tokens, vocab_size=320))
            model = language.model
            logits = await model.forward(ids, model.new_state(8), language._experts, logits="all")
            return logits, language.stats()

    return asyncio.run(main())


def test_deepseek_opens_and_runs_like_any_model(deepseek):
    logits, stats = logits_of(deepseek.paths[0], 2, budget=14 * deepseek.expert_nbytes)
    assert torch.isfinite(logits).all()
    assert float(logits.std()) == pytest.approx(2, rel=0.3)  # what its head is scaled to
    assert sum(stats.executed_experts.values()) == 2 * 6 * 2


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """A dense KDA layer and a routed MLA layer."""
    path = tmp_path_factory.mktemp("synthetic") / "m.gguf"
    yield make_synthetic("kimi-k3", path, n_layers=2, n_experts=16, vocab_size=320)
    path.unlink()


def test_kimi_opens_with_records_of_the_published_size(kimi):
    path = kimi.paths[0]
    assert kimi.expert_nbytes == 11_956_224
    model = open_checkpoint(path)
    adapter_for(model.metadata).check(model)

    async def main():
        config = HierarchyConfig(vram=17 * model.slot_nbytes, reserve=0, allow_buffered=True)
        async with (
            await open_hierarchy(model, config) as hierarchy,
            hierarchy.acquire(1, [3, 15]) as lease,
        ):
            await lease.ready()
            role = hierarchy.spec.layouts[1].by_name["down"]
            view = lease.slots[15].view
            return bytes(view[role.offset : role.offset + role.nbytes])

    slab = find_experts(open_inventory(path)).slab(1, "down", 15)
    assert asyncio.run(main()) == read(path, slab.nbytes, slab.offset)


@pytest.mark.slow
def test_kimi_runs_like_any_model(kimi):
    logits, stats = logits_of(kimi.paths[0], 2, budget=17 * kimi.expert_nbytes)
    assert torch.isfinite(logits).all()
    assert float(logits.std()) == pytest.approx(1, rel=0.3)
    assert sum(stats.executed_experts.values()) == 2 * 16


def test_all_wrong_settings_are_told_at_once_before_a_file_is_touched(scratch):
    with pytest.raises(ConfigError) as raised:
        make_synthetic(
            "kimi-k3", scratch / "m.gguf", n_layers=1, n_experts=15, vocab_size=9, n_shards=0
        )
    for name in ("n_layers is 1", "n_experts is 15", "vocab_size is 9", "n_shards is 0"):
        assert name in str(raised.value)
    with pytest.raises(ConfigError, match="deepseek-v4-flash, kimi-k3"):
        make_synthetic("gpt", scratch / "m.gguf", n_layers=1)
    assert not list(scratch.iterdir())


def test_a_drive_without_room_is_refused_with_the_numbers(scratch, monkeypatch):
    usage = SimpleNamespace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(GGUFError, match=r"room for .*MB?|GB.*takes .*GB|GiB") as raised:
        make_synthetic("deepseek-v4-flash", scratch / "m.gguf", n_layers=8, tokenizer=None)
    assert str(scratch) in str(raised.value)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_leaves_nothing(scratch, monkeypatch, error):
    real, written = files.os.pwrite, []

    def pwrite(fd, data, offset):
        if offset > 100 << 20:
            raise error
        written.append(offset)
        return real(fd, data, offset)

    monkeypatch.setattr(files.os, "pwrite", pwrite)
    wanted = GGUFError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(wanted):
        make_synthetic(**DEEPSEEK, path=scratch / "m.gguf", n_shards=2)
    assert written
    assert not list(scratch.iterdir())


def test_where_direct_writes_cannot_be_had_the_bytes_are_the_same(deepseek, scratch, monkeypatch):
    real = files.os.open

    def refuse(path, flags, mode=0o777):
        if flags & files.os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(files.os, "open", refuse)
    path = make_synthetic(**DEEPSEEK, path=scratch / "m.gguf").paths[0]
    assert read(path, 32 << 20, 64 << 20) == read(deepseek.paths[0], 32 << 20, 64 << 20)


def test_tokens_come_back_like_words_in_a_text():
    tokens = text_like_tokens(4000, vocab_size=129280, seed=3)
    assert tokens == text_like_tokens(4000, vocab_size=129280, seed=3)
    assert max(tokens) < 129280
    again = [token in tokens[max(0, i - 8) : i] for i, token in enumerate(tokens)]
    assert 0.35 < np.mean(again) < 0.65


def test_routing_statistics_tell_skew_and_overlap():
    ids = np.tile(np.array([[0, 1], [0, 2]]), (32, 1))
    statistics = RoutingStatistics.of(ids, n_experts=32)
    assert statistics.n_touched == 3
    assert statistics.top_share == 0.75
    assert statistics.overlaps == (0.5, 1.0, 1.0, 1.0)


def test_the_command_makes_a_model_and_tells_its_size(scratch):
    command = [sys.executable, "-m", "tieredmoe.testing.synthetic", "deepseek-v4-flash"]
    options = ["--layers", "1", "--experts", "6", "--vocabulary", "320"]
    path = scratch / "m.gguf"
    done = subprocess.run(
        [*command, str(path), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "13.4 MB an expert" in done.stdout
    assert path.stat().st_size > 80e6
    refused = subprocess.run(
        [*command, str(scratch / "absent" / "m.gguf"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 1
    assert "cannot be written" in refused.stderr
