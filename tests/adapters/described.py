"""Models of full size as a memory plan sees them: metadata and tensors' facts, and no bytes."""

from functools import cache
from types import SimpleNamespace

import torch

from tieredmoe.adapters.machine import Machine
from tieredmoe.adapters.registry import adapter_for
from tieredmoe.adapters.settings import plain_from
from tieredmoe.gguf import Metadata, find_experts
from tieredmoe.gguf.tensors import TensorInfo
from tieredmoe.testing.synthetic.published import PUBLISHED

GiB = 1 << 30
N_LAYERS = {"deepseek-v4-flash": 43, "kimi-k3": 93}


@cache
def described(name):
    """The published model of that name, all its layers."""
    published = PUBLISHED[name]
    planned = published.plan(N_LAYERS[name], published.n_experts, published.vocab_size, None)
    values = {key: plain_from(value) for key, value in planned.metadata.items()}
    values["general.architecture"] = published.architecture
    tensors = {
        t.name: TensorInfo(t.name, int(t.ggml_type), tuple(t.size), t.nbytes, 0, 0)
        for t in planned.tensors
    }
    source = SimpleNamespace(metadata=Metadata(values), tensors=tensors, path=name)
    source.spec = find_experts(source).spec
    source.slot_nbytes = source.spec.slot_nbytes
    return source


def needs_of(source, *, n_context=8192, chunk_length=512):
    adapter = adapter_for(source.metadata)
    return adapter.needs(source, n_context=n_context, chunk_length=chunk_length)


def gpu(free_nbytes, *, host_nbytes=256 * GiB, link_bytes_per_s=25e9):
    """A machine with a GPU of so much free memory, whether this one has any or not."""
    return Machine(
        device=torch.device("cuda", 0),
        name="cuda:0 (a GPU)",
        free_nbytes=int(free_nbytes),
        host_free_nbytes=int(host_nbytes),
        link_bytes_per_s=lambda: link_bytes_per_s,
    )
