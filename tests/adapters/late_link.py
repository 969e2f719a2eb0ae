"""Links for layers that stream to a "device" of host memory: one that is late, one that counts."""

import torch

from tieredmoe.adapters.streamed_layers import HostLink


class LateLink(HostLink):
    """What it copies is garbage until somebody waits for it."""

    def __init__(self):
        self.n_copies = 0

    def copy(self, target, source):
        self.n_copies += 1
        target.fill_(0xFF)
        return target, source

    def wait(self, fence):
        target, source = fence
        target.copy_(source)


def streamed_sizes(adapter, source, layers=None):
    """The sizes that ``StreamedLayers`` takes: those of ``layers``, by default all with experts."""
    dense = adapter.needs(source, n_context=64, chunk_length=32).dense
    routed = [n for n in dense.layers if f"blk.{n}.ffn_gate_exps.weight" in source.tensors]
    chosen = routed[: len(routed) // 2 * 2] if layers is None else layers
    return {layer: dense.layers[layer] for layer in chosen}


def same(a, b):
    return torch.equal(a, b) and bool(a.isfinite().all())
