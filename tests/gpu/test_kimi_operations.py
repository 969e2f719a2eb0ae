"""The fused operations of a Kimi-K3 decode step against those in torch, one by one."""

import math
from types import SimpleNamespace

import pytest
import torch
from kernel_experts import relative_error

pytest.importorskip("triton", reason="kernels are written in Triton")

from tieredmoe.adapters.kimi_k3.config import KdaConfig
from tieredmoe.adapters.kimi_k3.device_operations import DeviceOperations
from tieredmoe.adapters.kimi_k3.feed_forward import SigmoidRouter
from tieredmoe.adapters.kimi_k3.kda import KdaWeights
from tieredmoe.adapters.kimi_k3.operations import KdaProducts, PlainOperations
from tieredmoe.adapters.kimi_k3.static_state import StaticKda
from tieredmoe.adapters.norm import RmsNorm
from tieredmoe.adapters.routing import Routing
from tieredmoe.moe.kernels import LinearWorkspace

pytestmark = pytest.mark.gpu

REAL = {"heads": 96, "dim": 128, "kernel": 4}
tiny_kda = pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"heads": 2, "dim": 16, "kernel": 4}, id="tiny"),
        pytest.param({"heads": 3, "dim": 12, "kernel": 2}, id="tiny-odd"),
        pytest.param(REAL, id="real"),
    ],
)


class Drawn:
    """Random float32 tensors on a device."""

    def __init__(self, device, seed=0):
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self._generator).to(self.device)

    def positive(self, *shape):
        return self(*shape).abs() + 0.1


def operations(device, *, kda=None):
    """Fused ones and plain ones."""
    kda = kda or KdaConfig(n_heads=1, head_dim=1, conv_kernel=1, gate_lower_bound=-5.0)
    mla = SimpleNamespace(n_heads=1, own_dim=32, kv_lora_rank=32)
    workspace = LinearWorkspace(32, device=device)
    fused = DeviceOperations(SimpleNamespace(kda=kda, mla=mla), workspace)
    return fused, PlainOperations(kda)


def skip_large_in_the_interpreter(request, device):
    if device.type == "cpu" and "tiny" not in request.node.name:
        pytest.skip("too large for the interpreter")


@pytest.mark.parametrize(
    ("H", "last", "n_terms", "restart"),
    [
        pytest.param(48, 0, 0, False, id="tiny-embedding"),
        pytest.param(48, 1, 1, True, id="tiny-restart"),
        pytest.param(1100, 3, 2, False, id="tiny-two-terms"),
        pytest.param(7168, 8, 2, False, id="real"),
        pytest.param(7168, 8, 1, True, id="real-restart"),
    ],
)
def test_the_mix_adds_to_the_stream_and_reads_all_streams(
    device, request, H, last, n_terms, restart
):
    skip_large_in_the_interpreter(request, device)
    fused, plain = operations(device)
    draw = Drawn(device)
    streams = draw(last + 3, H)
    streams[1:] *= torch.arange(1, last + 3, device=device).unsqueeze(1)
    if restart:
        streams[last] = math.nan  # what an earlier token left there is not read
    terms = [draw(1, H) for _ in range(n_terms)]
    score, norm = draw(H) / 10, RmsNorm(draw.positive(H), 1e-5)
    got, want = [], []
    for do, results in ((fused, got), (plain, want)):
        own, out = streams.clone(), draw(1, H)
        do.mix(own, last, terms, score, norm, restart=restart, out=out)
        results += [own, out]
    assert torch.equal(got[0].isnan(), want[0].isnan())
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)
    assert relative_error(got[1], want[1].cpu()) < 2e-6


@tiny_kda
def test_the_recurrence_reads_one_set_of_matrices_and_writes_the_other(device, request, sizes):
    skip_large_in_the_interpreter(request, device)
    heads, dim, kernel = sizes["heads"], sizes["dim"], sizes["kernel"]
    kda = KdaConfig(n_heads=heads, head_dim=dim, conv_kernel=kernel, gate_lower_bound=-5.0)
    fused, plain = operations(device, kda=kda)
    draw, width = Drawn(device), heads * dim
    weights = KdaWeights(
        **dict.fromkeys(("q", "k", "v", "decay_a", "decay_b", "strength", "gate", "output")),
        convolution=draw(3 * width, kernel),
        decay_bias=draw(width),
        negative_rates=-draw.positive(heads),
        norm=RmsNorm(draw.positive(dim), 1e-5),
    )
    state = StaticKda(draw(2, heads, dim, dim), draw(kernel, 3 * width))
    own = {do: StaticKda(state.memory.clone(), state.ring.clone()) for do in (fused, plain)}
    for n in range(6):
        position = torch.tensor([n], device=device)
        made = KdaProducts(*(draw(1, width) for _ in range(4)), draw(1, heads), draw(1, width))
        before = own[fused].memory[n % 2].clone()
        got, want = (do.recur(made, own[do], weights, position) for do in (fused, plain))
        assert relative_error(got, want.cpu()) < 3e-6
        assert torch.equal(own[fused].memory[n % 2], before)
        assert torch.equal(own[fused].ring, own[plain].ring)
        after = own[plain].memory[(n + 1) % 2]
        assert relative_error(own[fused].memory[(n + 1) % 2], after.cpu()) < 2e-6


@pytest.mark.parametrize(
    ("n_experts", "k"), [pytest.param(12, 3, id="tiny"), pytest.param(896, 16, id="real")]
)
def test_experts_are_chosen_in_the_order_of_their_biased_scores(device, request, n_experts, k):
    skip_large_in_the_interpreter(request, device)
    fused, plain = operations(device)
    draw = Drawn(device)
    router = SigmoidRouter(None, draw(n_experts) / 4, k=k, scale=2.5)
    logits = draw(1, n_experts)
    got, want = routed(fused, router, logits), routed(plain, router, logits)
    assert torch.equal(got.ids, want.ids)
    assert relative_error(got.weights, want.weights.cpu()) < 1e-6


def routed(do, router, logits):
    ids = torch.full((1, router.k), -1, dtype=torch.int64, device=logits.device)
    out = Routing(ids, torch.zeros((1, router.k), device=logits.device))
    do.choose(logits, router, out)
    return out


def test_tiny_ties_between_experts_go_to_the_lower_number(device):
    fused, _ = operations(device)
    router = SigmoidRouter(None, torch.zeros(10, device=device), k=4, scale=1.0)
    logits = torch.tensor([[0.0, 1, 0, 1, 0, 1, 0, 1, 0, 1]], device=device)
    assert routed(fused, router, logits).ids.tolist() == [[1, 3, 5, 7]]


def test_tiny_broken_scores_still_choose_distinct_experts(device):
    fused, plain = operations(device)
    router = SigmoidRouter(None, torch.zeros(10, device=device), k=4, scale=1.0)
    logits = torch.full((1, 10), math.nan, device=device)
    chosen = routed(fused, router, logits)
    assert chosen.ids.tolist() == routed(plain, router, logits).ids.tolist() == [[0, 1, 2, 3]]
    assert chosen.weights.isnan().all()
