"""The operations of a decode step in torch: on any device, in many launches.

The same functions as in a forward pass wherever shapes allow, masks instead of lengths elsewhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from tieredmoe.adapters.deepseek_v4.rope import Angles
from tieredmoe.adapters.norm import rms
from tieredmoe.adapters.products import PlainProducts
from tieredmoe.adapters.top_k import top_k

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.deepseek_v4.hyper import HyperConnection, StreamHead
    from tieredmoe.adapters.deepseek_v4.moe import Router
    from tieredmoe.adapters.deepseek_v4.static_state import Moment, StaticCompressor
    from tieredmoe.adapters.deepseek_v4.step_operations import StreamBuffers
    from tieredmoe.adapters.norm import RmsNorm
    from tieredmoe.adapters.routing import Routing


class TorchOperations:
    """``StepOperations`` without kernels of our own."""

    products = PlainProducts()

    def connect(
        self,
        hyper: HyperConnection,
        before: StreamBuffers,
        outputs: Sequence[torch.Tensor],
        after: StreamBuffers,
    ) -> None:
        """Fill ``after``."""
        streams = _joined(before, outputs)
        mixed = hyper.split(streams)
        after.streams.copy_(streams)
        after.post.copy_(mixed.post)
        after.comb.copy_(mixed.comb)
        after.x.copy_(mixed.x)

    def collect(
        self, head: StreamHead, before: StreamBuffers, outputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The streams as one, normed."""
        return head(_joined(before, outputs))

    def turn_(
        self,
        x: torch.Tensor,
        moment: Moment,
        turn: int,
        *,
        rms_eps: float | None = None,
        back: bool = False,
    ) -> torch.Tensor:
        """Norm if asked for, then rotate."""
        if rms_eps is not None:
            x.copy_(rms(x, rms_eps))
        angles = _angles(moment, turn)
        every_head = x.unsqueeze(0)
        return (angles.unrotate_(every_head) if back else angles.rotate_(every_head)).squeeze(0)

    def keep_key(
        self,
        kv: torch.Tensor,
        norm: RmsNorm,
        window: torch.Tensor,
        moment: Moment,
        turn: int,
    ) -> None:
        """Write one place of the ring."""
        key = _angles(moment, turn).rotate_(norm(kv))
        window.index_copy_(0, moment.position % window.shape[0], key)

    def compress(
        self, values: torch.Tensor, gates: torch.Tensor, static: StaticCompressor, moment: Moment
    ) -> None:
        """Make a row at every token, of whatever the window holds: only whole ones are visible."""
        compressor, position = static.compressor, moment.position
        ratio, dim = compressor.ratio, compressor.dim
        place = position % static.values.shape[0]
        static.values.index_copy_(0, place, values)
        static.gates.index_copy_(0, place, gates + compressor.bias[position % ratio])
        window = position // ratio
        v, g = (
            _mixed_places(ring, window, ratio, dim) if compressor.overlaps else ring
            for ring in (static.values, static.gates)
        )
        row = compressor.norm((v * g.softmax(0)).sum(0, keepdim=True))
        turn = moment.window_turn(ratio)
        static.rows.index_copy_(0, window, _angles(moment, turn).rotate_(row))

    def pick(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        static: StaticCompressor,
        moment: Moment,
        picks: torch.Tensor,
    ) -> None:
        """Score all rows, those not visible last."""
        scale = 1 / math.sqrt(q.shape[0] * q.shape[1])
        scores = (weights * scale) @ (q @ static.rows.T).relu_()
        n_visible = (moment.position + 1) // static.compressor.ratio
        number = torch.arange(scores.shape[1], device=scores.device)
        scores.masked_fill_(number >= n_visible, -math.inf)
        picks.copy_(top_k(scores, picks.shape[0]).squeeze(0))

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        sinks: torch.Tensor,
        moment: Moment,
        *,
        n_window: int,
        ratio: int,
        picks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Masked attention over all places."""
        number = torch.arange(keys.shape[0], device=keys.device)
        if picks is not None:
            number = torch.cat((number[:n_window], n_window + picks))
            keys = keys[number]
        visible = number <= moment.position
        if ratio:
            n_visible = (moment.position + 1) // ratio
            visible = torch.where(number < n_window, visible, number - n_window < n_visible)
        scores = (q @ keys.T).mul_(q.shape[1] ** -0.5)
        scores.masked_fill_(~visible, -math.inf)
        shares = torch.cat((scores, sinks.unsqueeze(1)), dim=1).softmax(1)
        return shares[:, :-1] @ keys

    def route(self, router: Router, logits: torch.Tensor, moment: Moment, routing: Routing) -> None:
        """Ask the router."""
        chosen = router.choose(logits, moment.token)
        routing.ids.copy_(chosen.ids)
        routing.weights.copy_(chosen.weights)


def _joined(before: StreamBuffers, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    if not outputs:
        return before.streams
    y = sum(outputs[1:], outputs[0])
    return before.post.unsqueeze(2) * y.unsqueeze(1) + before.comb.mT @ before.streams


def _angles(moment: Moment, turn: int) -> Angles:
    return Angles(torch.view_as_complex(moment.turns[turn : turn + 1]))


def _mixed_places(ring: torch.Tensor, window: torch.Tensor, ratio: int, dim: int) -> torch.Tensor:
    """Of a ring of two windows, [2 ratio, d]: the one before for the next, and ``window``'s own."""
    windows = ring.unflatten(0, (2, ratio))
    before, own = windows[(window + 1) % 2, :, :dim], windows[window % 2, :, dim:]
    return torch.cat((before, own), dim=1).squeeze(0)
