"""One layer's attention on one token, over a state that never moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredmoe.adapters.deepseek_v4.static_state import Moment, StaticLayer

if TYPE_CHECKING:
    import torch

    from tieredmoe.adapters.deepseek_v4.attention import Attention
    from tieredmoe.adapters.deepseek_v4.step_operations import StepOperations


class StaticAttention:
    """``attention`` for one sequence of up to ``n_capacity`` tokens; ``state`` is the sequence's.

    Where there may be no more rows than the indexer picks, all are attended to and nothing is
    picked.
    """

    def __init__(
        self,
        attention: Attention,
        operations: StepOperations,
        moment: Moment,
        *,
        n_capacity: int,
    ) -> None:
        past = attention.past
        self.state = StaticLayer(
            () if past is None else past.compressors,
            n_window=attention.n_window,
            head_dim=attention.head_dim,
            n_capacity=n_capacity,
            device=moment.position.device,
        )
        self._attention = attention
        self._operations = operations
        self._moment = moment
        self._turn = Moment.PLAIN if past is None else Moment.COMPRESSED
        n_rows = self.state.keys.shape[0] - attention.n_window
        indexer = None if past is None else past.indexer
        self._indexer = indexer if indexer is not None and n_rows > indexer.n_picks else None
        self._picks = (
            None if self._indexer is None else moment.position.new_zeros(self._indexer.n_picks)
        )
        weights = attention.weights
        self._of_input = [weights.q_a, weights.kv]
        for static in self.state.compressors:
            self._of_input += (static.compressor.values, static.compressor.gates)
        self._of_query = [weights.q_b]
        if self._indexer is not None:
            self._of_input.append(self._indexer.weights)
            self._of_query.append(self._indexer.q_b)

    def __call__(self, u: torch.Tensor) -> torch.Tensor:
        """The normed input ``u`` [1, H] of the token to [1, H]; puts the token into the state."""
        attention, run, moment, turn = self._attention, self._operations, self._moment, self._turn
        weights, state = attention.weights, self.state
        products = run.products.shared
        qr, kv, *rest = products(u, self._of_input)
        qr = attention.q_a_norm(qr)
        run.keep_key(kv, attention.kv_norm, state.window, moment, turn)
        for static in state.compressors:
            values, gates, *rest = rest
            run.compress(values, gates, static, moment)
        q, *wanted = products(qr, self._of_query)
        q = q.view(attention.n_heads, attention.head_dim)
        q = run.turn_(q, moment, turn, rms_eps=attention.rms_eps)
        if self._indexer is not None and self._picks is not None:
            index_q = run.turn_(wanted[0].view(self._indexer.n_heads, -1), moment, turn)
            run.pick(index_q, rest[0], state.compressors[1], moment, self._picks)
        out = run.attend(
            q,
            state.keys,
            weights.sinks,
            moment,
            n_window=state.n_window,
            ratio=state.compressors[0].compressor.ratio if state.compressors else 0,
            picks=self._picks,
        )
        groups = run.turn_(out, moment, turn, back=True).view(len(attention.output_a), -1)
        low = run.products.each(groups, weights.output_a)
        return run.products.shared(low.view(1, -1), (weights.output_b,))[0]
