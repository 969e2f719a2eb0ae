"""Providers whose experts come one by one, until one does not."""

import asyncio

from tieredmoe.adapters.routed_experts import run_routed


class Interrupted:
    """Experts that come one by one; at ``layer`` the second one does not. ``lent`` are out now."""

    def __init__(self, experts, layer, error):
        self.spec = experts.spec
        self.lent = []
        self._experts = experts
        self._layer = layer
        self._error = error

    async def run(self, layer, x, routing, activation, *, meanwhile):
        return await run_routed(layer, x, routing, activation, self, meanwhile=meanwhile)

    def executed(self, layer, n_pairs):
        pass

    async def stream(self, layer, experts):
        for n, expert in enumerate(experts):
            if layer == self._layer and n == 1:
                raise self._error
            self.lent.append((layer, expert))
            try:
                yield [(expert, self._experts.record(layer, expert))]
            finally:
                self.lent.pop()


class Stuck(Interrupted):
    """Experts of which the second at ``layer`` never comes."""

    def __init__(self, experts, layer):
        super().__init__(experts, layer, None)
        self.waiting = asyncio.Event()

    async def stream(self, layer, experts):
        async for portion in super().stream(
            layer, experts[:1] if layer == self._layer else experts
        ):
            yield portion
        if layer == self._layer:
            self.waiting.set()
            await asyncio.Event().wait()
