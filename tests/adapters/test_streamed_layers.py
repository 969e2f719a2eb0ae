"""Layers that stream through two buffers: no bit differs, and what is needed is there in time."""

import asyncio

import pytest
import torch
from late_link import LateLink, same, streamed_sizes
from model_runs import CPU, run

from tieredmoe.adapters.dense_experts import DenseExperts
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.streamed_layers import HostLink, StreamedLayers
from tieredmoe.gguf import open_inventory
from tieredmoe.testing import make_deepseek_v4, make_kimi_k3

TOKENS = torch.arange(5, 30) * 7 % 300


class Stage:
    """A tiny model's file, its experts, and its logits with all matrices in place."""

    def __init__(self, path):
        self.source = open_inventory(path)
        self.adapter = adapter_for(self.source.metadata)
        self.experts = DenseExperts.load(self.source)
        self.logits = run(self.adapter.load(self.source, device=CPU), self.experts, TOKENS)

    def load(self, link, layers=None):
        streamed = StreamedLayers(streamed_sizes(self.adapter, self.source, layers), link=link)
        return self.adapter.load(self.source, device=CPU, streamed=streamed)


@pytest.fixture(scope="module", params=[make_deepseek_v4, make_kimi_k3], ids=["deepseek", "kimi"])
def stage(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("streamed") / "tiny.gguf"
    request.param(path, seed=3)
    return Stage(path)


@pytest.mark.parametrize("layers", [None, (2, 3, 4, 5), (1, 4)], ids=["all", "four", "two"])
def test_a_model_whose_layers_stream_says_bit_for_bit_the_same(stage, layers):
    model = stage.load(LateLink(), layers)
    lengths = [9, 1, 1, 13, 1]
    logits = run(model, stage.experts, TOKENS, lengths)
    in_place = run(stage.adapter.load(stage.source, device=CPU), stage.experts, TOKENS, lengths)
    assert same(logits, in_place)


def test_every_layer_crosses_the_link_once_per_token_and_comes_ahead_of_its_turn(stage):
    link = LateLink()
    model = stage.load(link)
    n_layers = len(model.streamed.layers)
    run(model, stage.experts, TOKENS[:2], [1, 1])
    # The first two layers of the third token are on their way when the second ends.
    assert link.n_copies == 2 * n_layers + 2
    copied_in_time = []
    before = model.streamed.before

    def watched(layer):
        n_copies = link.n_copies
        before(layer)
        copied_in_time.append(link.n_copies == n_copies)

    model.streamed.before = watched
    run(model, stage.experts, TOKENS[:1])
    assert len(copied_in_time) > n_layers - 1
    assert all(copied_in_time)


class FailingExperts:
    """Fails in the layer given, once."""

    def __init__(self, experts, layer):
        self._experts = experts
        self._layer = layer

    async def run(self, layer, *args, **kwargs):
        if layer == self._layer:
            self._layer = None
            raise asyncio.CancelledError
        return await self._experts.run(layer, *args, **kwargs)


def test_after_a_step_that_ended_half_way_the_next_one_is_right(stage):
    model = stage.load(LateLink())
    for layer in model.streamed.layers:
        experts = FailingExperts(stage.experts, layer)
        with pytest.raises(asyncio.CancelledError):
            run(model, experts, TOKENS)
        assert same(run(model, experts, TOKENS), stage.logits)


def test_matrices_lie_at_the_same_place_in_every_step(stage):
    sizes = streamed_sizes(stage.adapter, stage.source)
    streamed = StreamedLayers(sizes, link=HostLink())
    names = [name for matrices in sizes.values() for name in matrices]
    places = {name: streamed.target(name).data_ptr() for name in names}
    assert all(place % 64 == 0 for place in places.values())
    for _ in range(3):
        for layer in streamed.layers:
            streamed.before(layer)
            streamed.after(layer)
    assert places == {name: streamed.target(name).data_ptr() for name in names}


def test_two_buffers_take_the_room_of_the_two_largest_and_the_host_holds_all():
    sizes = {3: {"a": 256, "b": 100}, 5: {"c": 700}, 6: {"d": 1}, 9: {"e": 256}}
    streamed = StreamedLayers(sizes, link=HostLink())
    assert streamed.device_nbytes == 2 * 768
    assert streamed.host_nbytes == 512 + 768 + 256 + 256
    assert "c" in streamed
    assert "f" not in streamed
    streamed.before(4)
    streamed.after(4)


def test_memory_that_cannot_be_had_leaves_nothing_held():
    class Refusing(LateLink):
        closed = False

        def host_memory(self, nbytes):
            if nbytes > 256:
                raise MemoryError
            return super().host_memory(nbytes)

        def close(self):
            self.closed = True

    link = Refusing()
    with pytest.raises(MemoryError):
        StreamedLayers({1: {"a": 1}, 2: {"b": 257}}, link=link)
    assert link.closed
