"""A decode step's kernels against the same operations in torch."""

import attrs
import pytest
import torch

pytest.importorskip("triton", reason="kernels are written in Triton")

from tieredmoe.adapters.deepseek_v4.compressor import Compressor
from tieredmoe.adapters.deepseek_v4.config import (
    AttentionConfig,
    DeepSeekV4Config,
    ExpertConfig,
    RopeConfig,
    StreamConfig,
)
from tieredmoe.adapters.deepseek_v4.hyper import HyperConnection, StreamHead
from tieredmoe.adapters.deepseek_v4.kernel_operations import KernelOperations
from tieredmoe.adapters.deepseek_v4.moe import HashRouter, ScoreRouter
from tieredmoe.adapters.deepseek_v4.rope import Rope
from tieredmoe.adapters.deepseek_v4.static_state import Moment, StaticCompressor
from tieredmoe.adapters.deepseek_v4.step_operations import StreamBuffers
from tieredmoe.adapters.deepseek_v4.torch_operations import TorchOperations
from tieredmoe.adapters.norm import rms_norm
from tieredmoe.adapters.routing import Routing
from tieredmoe.moe.kernels import LinearWorkspace

pytestmark = pytest.mark.gpu

EPS = 1e-6
CONFIG = DeepSeekV4Config(
    vocab_size=50,
    context_length=2**20,
    n_layers=1,
    hidden_size=80,
    rms_eps=EPS,
    attention=AttentionConfig(4, 48, 32, 2, 16, 8, (0,), 5, 16, 6),
    rope=RopeConfig(16, 10000.0, 160000.0, 16.0, 4096, 32.0, 1.0),
    experts=ExpertConfig(20, 3, 32, 1, 0, 1.5, (10.0,), (10.0,)),
    streams=StreamConfig(4, 20, EPS),
)


def tiny(value):
    """A case that also runs where there is no device, in Triton's interpreter."""
    return pytest.param(value, id=f"tiny-{value}")


class Numbers:
    """Normal random tensors on a device."""

    def __init__(self, device, seed=0):
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, std=1.0):
        return (torch.randn(shape, generator=self._generator) * std).to(self.device)


@pytest.fixture
def numbers(device):
    return Numbers(device)


@pytest.fixture
def kernels(device):
    return KernelOperations(CONFIG.attention, LinearWorkspace(256, device=device))


@pytest.fixture
def moment_at(device):
    def at(position, token_id=0):
        moment = Moment(
            CONFIG,
            token=torch.tensor([token_id], device=device),
            position=torch.tensor([position], device=device),
        )
        moment.turn()
        return moment

    return at


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def stream_buffers(numbers, hidden, n=4):
    comb = numbers(1, n, n).abs()
    return StreamBuffers(
        streams=numbers(1, n, hidden), post=numbers(1, n).abs(), comb=comb, x=numbers(1, hidden)
    )


@pytest.mark.parametrize("n_outputs", [0, 1, 2])
@pytest.mark.parametrize("hidden", [tiny(80), 256])
def test_streams_are_joined_and_split(numbers, kernels, device, n_outputs, hidden):
    n = 4
    hyper = HyperConnection(
        numbers((2 + n) * n, n * hidden, std=0.3),
        numbers((2 + n) * n),
        numbers(3),
        numbers(hidden),
        config=CONFIG.streams,
        rms_eps=EPS,
    )
    before = stream_buffers(numbers, hidden)
    outputs = [numbers(1, hidden) for _ in range(n_outputs)]
    got, want = (StreamBuffers.empty(n, hidden, device) for _ in range(2))
    kernels.connect(hyper, before, outputs, got)
    TorchOperations().connect(hyper, before, outputs, want)
    for name in ("streams", "post", "comb", "x"):
        close(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("hidden", [tiny(80), 256])
def test_the_last_streams_become_one(numbers, kernels, hidden):
    n = 4
    head = StreamHead(
        numbers(n, n * hidden, std=0.3),
        numbers(n),
        numbers(1),
        numbers(hidden),
        config=CONFIG.streams,
        rms_eps=EPS,
    )
    before, outputs = stream_buffers(numbers, hidden), [numbers(1, hidden), numbers(1, hidden)]
    kept = attrs.evolve(before, streams=before.streams.clone())
    want = TorchOperations().collect(head, before, outputs)
    close(kernels.collect(head, before, outputs), want)
    assert torch.equal(before.streams, kept.streams)


@pytest.mark.parametrize("rms_eps", [None, EPS])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dim", [tiny(16), 48])
def test_heads_are_normed_and_turned(numbers, kernels, moment_at, rms_eps, back, dim):
    moment, x = moment_at(12345), numbers(5, dim)
    turn = Moment.COMPRESSED
    want = TorchOperations().turn_(x.clone(), moment, turn, rms_eps=rms_eps, back=back)
    close(kernels.turn_(x, moment, turn, rms_eps=rms_eps, back=back), want)


@pytest.mark.parametrize("position", [0, tiny(7), 8, 1001])
def test_a_key_is_kept_in_its_place_of_the_ring(numbers, kernels, moment_at, position):
    moment, kv, norm = moment_at(position), numbers(1, 48), rms_norm(numbers(48), EPS)
    got = numbers(8, 48)
    want = got.clone()
    kernels.keep_key(kv, norm, got, moment, Moment.PLAIN)
    TorchOperations().keep_key(kv, norm, want, moment, Moment.PLAIN)
    close(got, want)
    assert not torch.equal(got[position % 8], torch.zeros_like(got[0]))


@pytest.mark.parametrize(("ratio", "n_halves"), [(4, 2), (128, 1)])
@pytest.mark.parametrize("start", [0, tiny(3)])
def test_windows_are_compressed(numbers, kernels, moment_at, device, ratio, n_halves, start):
    dim = 48
    compressor = Compressor(
        None,
        None,
        numbers(ratio, n_halves * dim),
        numbers(dim),
        rope=Rope.compressed(CONFIG.rope, device),
        rms_eps=EPS,
    )
    n_rows = 8
    got, want = (
        StaticCompressor(compressor, torch.zeros((n_rows, dim), device=device)) for _ in range(2)
    )
    first = start * ratio
    positions = [*range(first, first + 11)] if ratio == 4 else [first, first + 126, first + 127]
    for position in positions:
        if ratio == 128:
            values, gates = numbers(*got.values.shape), numbers(*got.gates.shape)
            for static in (got, want):
                static.values.copy_(values)
                static.gates.copy_(gates)
        moment = moment_at(position)
        values, gates = numbers(1, n_halves * dim), numbers(1, n_halves * dim)
        kernels.compress(values, gates, got, moment)
        TorchOperations().compress(values, gates, want, moment)
        close(got.values, want.values)
        close(got.gates, want.gates)
        n_closed = (position + 1) // ratio
        close(got.rows[start:n_closed], want.rows[start:n_closed])
    assert got.rows[start].abs().max() > 0


@pytest.mark.parametrize("position", [3, 30, tiny(200), 399])
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_rows_are_picked(numbers, kernels, moment_at, device, position, ties):
    n_rows, dim, n_heads, n_picks = 100, 16, 5, 6
    rope = Rope.compressed(CONFIG.rope, device)
    compressor = Compressor(None, None, numbers(4, 2 * dim), numbers(dim), rope=rope, rms_eps=EPS)
    static = StaticCompressor(compressor, numbers(n_rows, dim))
    if ties:
        static.rows[:] = static.rows[0]
    moment, q, weights = moment_at(position), numbers(n_heads, dim), numbers(1, n_heads)
    got, want = (torch.full((n_picks,), -1, device=device) for _ in range(2))
    kernels.pick(q, weights, static, moment, got)
    TorchOperations().pick(q, weights, static, moment, want)
    n_seen = min(n_picks, (position + 1) // 4)
    assert torch.equal(got[:n_seen], want[:n_seen])
    assert got.unique().numel() == n_picks


@pytest.mark.parametrize(
    ("ratio", "picked"), [(0, False), (4, False), (128, False), pytest.param(4, True, id="tiny")]
)
@pytest.mark.parametrize("position", [0, 6, 7, 300])
def test_attention_sees_the_ring_and_the_rows(
    numbers, kernels, moment_at, device, ratio, position, picked
):
    n_window, n_rows, dim = 8, (0 if not ratio else 80), 48
    q, keys, sinks = numbers(4, dim), numbers(n_window + n_rows, dim), numbers(4)
    picks = torch.arange(0, 80, 9, device=device) if picked else None
    how = {"n_window": n_window, "ratio": ratio, "picks": picks}
    got = kernels.attend(q, keys, sinks, moment_at(position), **how)
    close(got, TorchOperations().attend(q, keys, sinks, moment_at(position), **how))


@pytest.mark.parametrize("std", [tiny(0.1), 10.0])
def test_experts_are_chosen_by_score(numbers, kernels, moment_at, device, std):
    for _ in range(5):
        router = ScoreRouter(None, numbers(20, std=0.1), k=3, scale=1.5)
        same_routing(router, numbers(1, 20, std=std), kernels, moment_at(3), device)


@pytest.mark.parametrize("token_id", [0, tiny(17), 49])
def test_experts_are_chosen_by_token(numbers, kernels, moment_at, device, token_id):
    table = torch.arange(150, device=device).view(50, 3) % 20
    router = HashRouter(None, table, scale=1.5)
    same_routing(router, numbers(1, 20), kernels, moment_at(3, token_id), device)


def test_of_equal_scores_the_lower_expert_is_chosen(kernels, moment_at, device):
    router = ScoreRouter(None, torch.zeros(20, device=device), k=3, scale=1.5)
    routing = nothing_chosen(device)
    kernels.route(router, torch.ones((1, 20), device=device), moment_at(0), routing)
    assert routing.ids.tolist() == [[0, 1, 2]]


def test_an_undefined_score_still_chooses_experts_that_exist(kernels, moment_at, device):
    router = ScoreRouter(None, torch.zeros(20, device=device), k=3, scale=1.5)
    routing = nothing_chosen(device)
    logits = torch.full((1, 20), float("nan"), device=device)
    kernels.route(router, logits, moment_at(0), routing)
    assert routing.ids.tolist() == [[0, 1, 2]]
    assert routing.weights.isnan().all()


def same_routing(router, logits, kernels, moment, device):
    got, want = nothing_chosen(device), nothing_chosen(device)
    kernels.route(router, logits, moment, got)
    TorchOperations().route(router, logits, moment, want)
    assert torch.equal(got.ids, want.ids)
    close(got.weights, want.weights)


def nothing_chosen(device):
    return Routing(torch.full((1, 3), -1, device=device), torch.zeros((1, 3), device=device))
