"""The smallest model with routed experts that decodes in fixed memory, and its experts on a disk.

Two routed layers around a state that each token overwrites in the half that the next one does not
read; segments add in place, so one that ran twice or not at all shows.
"""

import attrs
import numpy as np
import torch
from gguf import GGMLQuantizationType as T

from tieredmoe.adapters.decode_state import DecodeState
from tieredmoe.adapters.decode_step import RoutedLayer
from tieredmoe.adapters.routing import Routing
from tieredmoe.adapters.streamed_layers import StreamedLayers
from tieredmoe.entry import READY
from tieredmoe.moe import RoutedBatch, SwiGLU, expert_matrices
from tieredmoe.moe.dequant import row_nbytes
from tieredmoe.spec import ROLES, ExpertKey, ExpertLayout, MoESpec
from tieredmoe.testing.tiny_pack import TinyPack

LAYERS = (1, 2, 4)
N_EXPERTS, TOP_K, VOCAB = 6, 2, 13
ACTIVATION = SwiGLU(1.0)


def toy_spec(*, hidden=8, width=16, ggml_type=T.F32, layers=LAYERS):
    shapes = dict(zip(ROLES, ((width, hidden), (width, hidden), (hidden, width)), strict=True))
    roles = {
        role: (ggml_type, shape, shape[0] * row_nbytes(ggml_type, shape[1]))
        for role, shape in shapes.items()
    }
    return MoESpec("toy", N_EXPERTS, TOP_K, dict.fromkeys(layers, ExpertLayout.build(roles)))


class ToyPack(TinyPack):
    """Experts of random weights."""

    def payload(self, key):
        rng = np.random.default_rng([key.layer, key.expert])
        layout = self.spec.layouts[key.layer]
        role = layout.by_name["gate"]
        if role.ggml_type == T.F32:
            weights = rng.standard_normal(layout.payload_nbytes // 4) / role.shape[1] ** 0.5
            return weights.astype(np.float32).tobytes()
        assert role.ggml_type == T.MXFP4
        payload = np.zeros(layout.payload_nbytes, np.uint8)
        for role in layout.roles:
            blocks = rng.integers(0, 256, (role.nbytes // 17, 17), dtype=np.uint8)
            blocks[:, 0] = rng.integers(119, 124, len(blocks))
            payload[role.offset : role.offset + role.nbytes] = blocks.reshape(-1)
        return payload.tobytes()


TOY_PACK = ToyPack(toy_spec())


@attrs.frozen(eq=False)
class ToyState:
    """What the last token left."""

    memory: torch.Tensor

    def copy(self, *, n_context):
        return ToyState(self.memory.clone())


@attrs.frozen
class ToyConfig:
    vocab_size: int = VOCAB
    context_length: int = 5000


class ToyModel:
    """Its functional forward takes a token at a time, whatever the chunk."""

    def __init__(self, device="cpu", *, hidden=8, seed=0, layers=LAYERS):
        self.layers = layers
        self.device = torch.device(device)
        self.hidden = hidden
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape):
            drawn = torch.randn(*shape, generator=generator)
            return (drawn / shape[-1] ** 0.5).to(self.device)

        n = len(layers)
        self.embedding = weights(VOCAB, hidden) * hidden**0.5
        self.mix = weights(n, hidden, hidden)
        self.gate = weights(n, N_EXPERTS, hidden)
        self.shared = weights(n, hidden, hidden)
        self.head = weights(VOCAB, hidden)
        self.config = ToyConfig()

    def new_state(self, n_context):
        memory = torch.zeros(1, self.hidden, device=self.device)
        return DecodeState([ToyState(memory)], n_context=n_context, n_context_max=5000)

    def new_decode_step(self, n_capacity):
        return ToyStep(self, n_capacity)

    def enter_layer(self, i, h):
        x = torch.tanh(h @ self.mix[i])
        scores = torch.softmax(x @ self.gate[i].T, dim=-1)
        weights, ids = scores.topk(TOP_K, dim=-1)
        return x, Routing(ids, weights)

    async def forward(self, tokens, state, experts, *, logits):
        state.check_room(len(tokens))
        start, memory, rows = state.n_tokens, state.layers[0].memory, []
        for token in tokens:
            h = self.embedding[token.to(self.device)][None] + memory
            for i, layer in enumerate(self.layers):
                x, routing = self.enter_layer(i, h)
                routed, shared = await experts.run(
                    layer, x, routing, ACTIVATION, meanwhile=lambda i=i, x=x: x @ self.shared[i]
                )
                h = h + shared + routed
            rows.append(h @ self.head.T)
            memory = torch.tanh(h)
        state.commit([ToyState(memory)], start=start, n_new=len(tokens))
        return torch.cat(rows)[{"all": slice(None), "last": slice(-1, None), "none": []}[logits]]


class ToyStep:
    def __init__(self, model, n_capacity):
        def zeros(*shape, dtype=torch.float32):
            return torch.zeros(*shape, dtype=dtype, device=model.device)

        self.n_capacity, self.n_tokens = n_capacity, 0
        self.streamed = StreamedLayers.none()
        self.logits = zeros(1, VOCAB)
        self._model = model
        self._token, self._position = zeros(1, dtype=torch.int64), zeros(1, dtype=torch.int64)
        self._memory = zeros(2, model.hidden)
        self._h, self._shared = zeros(1, model.hidden), zeros(1, model.hidden)
        x, out = zeros(1, model.hidden), zeros(1, model.hidden)
        routing = Routing(zeros(1, TOP_K, dtype=torch.int64), zeros(1, TOP_K))
        self.layers = [
            RoutedLayer(layer=layer, activation=ACTIVATION, routing=routing, x=x, out=out)
            for layer in model.layers
        ]

    def load(self, layers, *, n_tokens):
        self.n_tokens = n_tokens
        self._memory[n_tokens % 2] = layers[0].memory[0]
        self._memory[1 - n_tokens % 2] = torch.nan

    def unload(self, *, n_context):
        return (ToyState(self._memory[self.n_tokens % 2][None].clone()),)

    def enter(self, token_id):
        self._token.fill_(token_id)
        self._position.fill_(self.n_tokens)

    def segment(self, i):
        model = self._model
        if i == 0:
            memory = self._memory.index_select(0, self._position % 2)
            self._h.copy_(model.embedding.index_select(0, self._token) + memory)
        else:
            self._h.add_(self._shared).add_(self.layers[i - 1].out)
        if i < len(self.layers):
            x, routing = model.enter_layer(i, self._h)
            self.layers[i].x.copy_(x)
            self.layers[i].routing.ids.copy_(routing.ids)
            self.layers[i].routing.weights.copy_(routing.weights)
        else:
            self.logits.copy_(self._h @ model.head.T)
            self._memory.index_copy_(0, 1 - self._position % 2, torch.tanh(self._h))

    def meanwhile(self, i):
        self._shared.copy_(self.layers[i].x @ self._model.shared[i])

    def leave(self):
        self.n_tokens += 1


class FenceStream:
    """A device's stream, as far as it was told to wait."""

    def __init__(self):
        self.waited_for = set()

    def wait_for(self, fence):
        self.waited_for.add(fence)


class ReferenceBatches:
    """``DeviceBatches`` by the reference, on host slots of ``hierarchy``.

    Its table is the residency itself. ``log`` notes for each layer run what was launched together.
    With a ``stream``, slots are a device's, whose bytes come when their fence passes: what is
    launched must be behind that fence, and finds the right bytes wherever they are yet.
    """

    device = torch.device("cpu")

    def __init__(self, hierarchy, *, n_tokens=512, kernels=True, stream=None):
        self.n_tokens = n_tokens
        self.log = []
        self._hierarchy = hierarchy
        self._kernels = kernels
        self._stream = stream

    def open(self, layer, x, routing, activation, *, host_ids):
        assert host_ids == routing.ids.tolist()
        portions = []
        self.log.append((layer, portions))
        return ReferenceDeviceBatch(self, layer, RoutedBatch(x, *routing, activation), portions)

    def has_kernels(self, layer):
        return self._kernels

    def execute_resident(self, routed):
        batch = RoutedBatch(routed.x, *routed.routing, routed.activation)
        self.log.append((routed.layer, "resident"))
        self.add(batch, routed.layer, batch.experts)
        routed.out.copy_(batch.finish())

    def add(self, batch, layer, experts):
        layout = self._hierarchy.spec.layouts[layer]
        for expert in experts:
            entry = self._hierarchy.top.residency.entries[ExpertKey(layer, expert)]
            assert entry.state is READY, entry
            assert entry.pins, entry
            slot = self._hierarchy.top.arena.slot(entry.slot_index)
            record = slot.view
            if self._stream is not None:
                assert slot.ready.passed() or slot.ready in self._stream.waited_for
                record = np.frombuffer(bytearray(TOY_PACK.payload(entry.key)), np.uint8)
            batch.add(expert, *expert_matrices(record, layout))


class ReferenceDeviceBatch:
    def __init__(self, batches, layer, batch, portions):
        self._batches, self._layer, self._batch = batches, layer, batch
        self._portions = portions
        self.experts = batch.experts

    @property
    def n_executed(self):
        return self._batch.n_executed

    def add(self, experts):
        self._portions.append(sorted(experts))
        self._batches.add(self._batch, self._layer, self._portions[-1])

    def finish(self, out=None):
        total = self._batch.finish()
        return total if out is None else out.copy_(total)


async def decoded(model, state, experts, tokens):
    """Logits of ``tokens`` fed one by one."""
    steps = [
        await model.forward(torch.tensor([token]), state, experts, logits="last")
        for token in tokens
    ]
    return torch.cat(steps)
