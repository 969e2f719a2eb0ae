"""States of token sequences computed before, so that a conversation's next turn starts from them.

A state goes forwards only: recurrent layers cannot take back a token. So a snapshot serves a prompt
that begins with exactly the snapshot's tokens and has more behind them; a prompt that differs in
the last of a thousand tokens gets nothing of it. Rejected: cutting a state at the common prefix
(right for attention caches, silently wrong for recurrent state, which is how others corrupted the
second turn of a chat), and a cache hidden in the model (a state can take hundreds of megabytes;
whoever wants it kept holds the object that keeps it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tieredmoe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.protocol import Model, State


class PromptCache:
    """At most ``n_max`` snapshots of one model's states; the one used longest ago goes first.

    Pass it to ``LanguageModel.generate`` for every turn of a conversation. A generation takes the
    longest snapshot that its prompt continues and leaves two: at its prompt's end and at its own
    end (also when it is cancelled). Generations running side by side may share one cache.
    """

    def __init__(self, n_max: int = 2) -> None:
        """Raise ``ConfigError`` unless ``n_max`` is 1 or more."""
        if isinstance(n_max, bool) or not isinstance(n_max, int) or n_max < 1:
            raise ConfigError(f"PromptCache: n_max is a number of snapshots, 1 or more: {n_max!r}")
        self._n_max = n_max
        self._model: Model[Any] | None = None
        self._states: dict[tuple[int, ...], State] = {}

    def longest(self, model: Model[Any], prompt: Sequence[int], *, n_context: int) -> State | None:
        """A state of ``model`` holding a proper prefix of ``prompt``, for the caller to go on with.

        It is a copy with room for ``n_context`` tokens. Raises ``ConfigError`` when the cache holds
        states of another model.
        """
        self._bind(model)
        ids = tuple(prompt)
        found = [known for known in self._states if len(known) < len(ids) and _starts(ids, known)]
        if not found:
            return None
        best = max(found, key=len)
        state = self._states[best] = self._states.pop(best)
        return state.copy(n_context=n_context)

    def belongs_to(self, model: Model[Any]) -> bool:
        """Whether ``keep`` would take a state of ``model``: it holds no other model's."""
        return self._model is None or self._model is model

    def keep(self, model: Model[Any], ids: Sequence[int], state: State) -> None:
        """Take over ``state``, which holds exactly ``ids``; the caller no longer uses it."""
        self._bind(model)
        assert state.n_tokens == len(ids), (state.n_tokens, len(ids))
        self._states.pop(tuple(ids), None)
        self._states[tuple(ids)] = state
        while len(self._states) > self._n_max:
            del self._states[next(iter(self._states))]

    def clear(self) -> None:
        """Forget every snapshot, and the model."""
        self._states.clear()
        self._model = None

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        lengths = ", ".join(str(len(ids)) for ids in self._states)
        return f"<PromptCache {len(self)}/{self._n_max} snapshots of [{lengths}] tokens>"

    def _bind(self, model: Model[Any]) -> None:
        if self._model is None:
            self._model = model
        elif not self.belongs_to(model):
            raise ConfigError("PromptCache: it holds states of another model; use one for each")


def _starts(ids: tuple[int, ...], known: tuple[int, ...]) -> bool:
    return ids[: len(known)] == known
