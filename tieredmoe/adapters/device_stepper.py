"""A decode step's tokens on a device: recorded graphs, with the host asked for experts in between.

A token of n routed layers is n + 1 launches of recorded graphs. Each but the last ends with the ids
of a layer's experts on their way to the host and with what the layer computes beside them. If all
experts are resident, their weighted sum is the beginning of the next graph: its kernels find slots
by a table on the device, so nothing in it depends on the host. Otherwise hits are launched at once
and each miss as it lands, and the next graph is the one without the sum. Every expert writes rows
of its own, so no bit depends on which way a layer went.

Rejected: the sum as a graph of its own, which needs no second graph of a segment, but 10 µs more of
each layer (medians of 300 tokens of a 24-layer toy on an H200, 66 against 56 µs per layer).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tieredmoe.adapters.device_graphs import Recorder, current_stream
from tieredmoe.adapters.device_ids import HostIds

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.decode_step import DecodeStep
    from tieredmoe.adapters.device_batches import DeviceBatches
    from tieredmoe.adapters.device_experts import DeviceExperts, SlotLease


class DeviceStepper:
    """A ``Stepper`` of ``step`` with ``experts``, which runs what it records once before.

    One token at a time, and nobody else runs the model meanwhile. The caller's thread waits for the
    device (for ids, without the interpreter's lock), and only a layer with misses suspends.
    """

    def __init__(self, step: DecodeStep[Any], experts: DeviceExperts) -> None:
        self._step = step
        self._experts = experts
        self._batches = experts.batches
        self._ids = HostIds(self._batches.device)
        recorder = Recorder(self._batches.device)
        pieces = _Pieces(step, self._batches, self._ids)
        numbers = range(len(step.layers) + 1)
        self.pieces = tuple(recorder.recording(partial(pieces.piece, i)) for i in numbers)
        """Recordings: from the sum of one routed layer to the ids of the next, and beside them."""
        self.with_sums = tuple(recorder.recording(partial(pieces.with_sum, i)) for i in numbers)
        """The same, each behind the sum of the layer before it (the first has none)."""
        # Where a type has no kernel, what is unpacked depends on the host's ids.
        self._has_kernels = [self._batches.has_kernels(layer.layer) for layer in step.layers]

    async def __call__(self, token_id: int) -> None:
        """``Stepper``: cancelled at any await, it has given back its lease and left nothing."""
        step, tiers = self._step, self._experts.tiers
        stream = current_stream(self._batches.device)
        lease: SlotLease | None = None
        is_hit = False
        with self._experts.turn():
            step.enter(token_id)
            try:
                for i, layer in enumerate(step.layers):
                    self._enqueue(i, with_sum=is_hit)
                    if lease is not None:
                        # Only now: the device has work while the host sees to it.
                        self._done(i - 1, lease)
                    ids = self._ids.wait()[0]
                    lease = await tiers.acquire(layer.layer, ids)
                    landed = lease.slots
                    lease.wait_on(stream)
                    is_hit = self._has_kernels[i] and len(landed) == len(set(ids))
                    if not is_hit:
                        await self._add_up(i, ids, lease, set(landed), stream)
                self._enqueue(len(step.layers), with_sum=is_hit)
                if lease is not None:
                    self._done(len(step.layers) - 1, lease)
            finally:
                if lease is not None:
                    lease.release()
            step.leave()

    def _enqueue(self, i: int, *, with_sum: bool) -> None:
        """Piece ``i``, behind the sum of the layer before it if that is not enqueued yet."""
        layers, streamed = self._step.layers, self._step.streamed
        if i < len(layers):
            streamed.before(layers[i].layer)
        recording = self.with_sums[i] if with_sum else self.pieces[i]
        recording()
        if i > 0:
            streamed.after(layers[i - 1].layer)

    def _done(self, i: int, lease: SlotLease) -> None:
        """Layer ``i`` has been enqueued to its end: give back its experts and count them."""
        lease.release()
        layer = self._step.layers[i]
        self._experts.tiers.count_executed(layer.layer, layer.routing.ids.shape[1])

    async def _add_up(
        self,
        i: int,
        ids: list[int],
        lease: SlotLease,
        landed: set[int],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Enqueue the weighted sum of layer ``i``: of those ``landed``, then of each that lands."""
        routed = self._step.layers[i]
        batch = self._batches.open(
            routed.layer, routed.x, routed.routing, routed.activation, host_ids=[ids]
        )
        batch.add(landed)
        async for expert in lease.as_completed():
            if expert not in landed:
                # Whatever else has landed by now goes with it.
                arrived = [expert for expert in lease.slots if expert not in landed]
                lease.wait_on(stream)
                batch.add(arrived)
                landed.update(arrived)
        batch.finish(out=routed.out)


class _Pieces:
    """What is recorded. It knows no recording, so a stepper is free as soon as nobody holds it.

    (One that waited for the garbage collector would keep a closed model's memory.)
    """

    def __init__(self, step: DecodeStep[Any], batches: DeviceBatches, ids: HostIds) -> None:
        self._step = step
        self._batches = batches
        self._ids = ids

    def piece(self, i: int) -> None:
        """Segment ``i``, the ids on their way to the host, and what the layer does beside them."""
        self._step.segment(i)
        if i < len(self._step.layers):
            self._ids.send(self._step.layers[i].routing.ids)
            self._step.meanwhile(i)

    def with_sum(self, i: int) -> None:
        """The sum of the layer before, then piece ``i``."""
        self._batches.execute_resident(self._step.layers[i - 1])
        self.piece(i)
