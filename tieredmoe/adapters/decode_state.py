"""One sequence in one model: the states of its layers, and how many tokens made them.

A step never changes a state; it makes the next one from it and commits it when all layers are done.
A step that fails or is cancelled half-way has therefore done nothing, and may be tried again.

While a sequence decodes on a device its layers lie in a ``DecodeStep``; whoever asks for them gets
a copy, so that snapshots and further prompts see no difference.

Rejected: caches updated in place (a load error in layer 20 would leave layers 0 to 19 one token
ahead, and a recurrent state cannot be taken back).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from tieredmoe.errors import ConfigError, PromptTooLongError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieredmoe.adapters.decode_step import DecodeStep


class LayerState(Protocol):
    """What one layer carries from step to step. Nobody changes its tensors once they are made."""

    def copy(self, *, n_context: int) -> Self:
        """The same in memory of its own, for a sequence of at most ``n_context`` tokens."""


L = TypeVar("L", bound=LayerState)


class DecodeState(Generic[L]):
    """One sequence in one model. Made by ``Model.new_state``; only that model understands it.

    It may grow to ``n_context`` tokens, of the ``n_context_max`` that the model was made for.
    Raises ``ConfigError`` for a context that is not positive or beyond those.
    """

    def __init__(
        self, layers: Sequence[L], *, n_context: int, n_context_max: int, n_tokens: int = 0
    ) -> None:
        _require_context(n_context, least=max(1, n_tokens), most=n_context_max)
        # None: they lie in the step, and nobody has asked for them since the last token.
        self._layers: tuple[L, ...] | None = tuple(layers)
        self._step: DecodeStep[L] | None = None
        self._n_tokens = n_tokens
        self._n_context = n_context
        self._n_context_max = n_context_max

    @property
    def n_tokens(self) -> int:
        """Tokens of all committed steps."""
        return self._n_tokens

    @property
    def n_context(self) -> int:
        """Tokens it may hold at most."""
        return self._n_context

    @property
    def layers(self) -> tuple[L, ...]:
        """The layers' states after the committed steps."""
        if self._layers is None:
            assert self._step is not None
            self._layers = self._step.unload(n_context=self._n_context)
        return self._layers

    def check_room(self, n_new: int) -> None:
        """Raise ``PromptTooLongError`` if ``n_new`` more tokens do not fit."""
        if self._n_tokens + n_new > self._n_context:
            raise PromptTooLongError(n_prompt=self._n_tokens + n_new, n_context=self._n_context)

    def commit(self, layers: Sequence[L], *, start: int, n_new: int) -> None:
        """Make ``layers`` the state after a step that added ``n_new`` tokens at ``start``."""
        assert start == self._n_tokens, "two steps ran on one state at the same time"
        self._layers = tuple(layers)
        self._step = None
        self._n_tokens += n_new

    def sit(self, step: DecodeStep[L]) -> None:
        """From here on the sequence lies in ``step``, where it has just been loaded."""
        assert step.n_tokens == self._n_tokens, (step, self)
        self._layers, self._step = None, step

    def sits_in(self, step: DecodeStep[L]) -> bool:
        """Whether the sequence lies in ``step``."""
        return self._step is step

    def stand(self) -> None:
        """Take the layers out of the step, if they lie in one."""
        self._layers, self._step = self.layers, None

    def commit_seated(self, *, start: int) -> None:
        """Count the token that the step has taken at ``start``."""
        assert start == self._n_tokens, "two steps ran on one state at the same time"
        assert self._step is not None, self
        self._n_tokens += 1
        self._layers = None
        assert self._step.n_tokens == self._n_tokens, self._step

    def copy(self, *, n_context: int | None = None) -> DecodeState[L]:
        """The same sequence in memory of its own; from here on neither sees the other's tokens.

        It may grow to ``n_context`` tokens, this state's by default. Raises ``ConfigError`` for a
        context that cannot hold the tokens already there or that the model was not made for.
        """
        if n_context is None:
            n_context = self._n_context
        _require_context(n_context, least=max(1, self._n_tokens), most=self._n_context_max)
        return DecodeState(
            [layer.copy(n_context=n_context) for layer in self.layers],
            n_context=n_context,
            n_context_max=self._n_context_max,
            n_tokens=self._n_tokens,
        )

    def __repr__(self) -> str:
        return f"<DecodeState {self._n_tokens}/{self._n_context} tokens>"


def _require_context(n_context: int, *, least: int, most: int) -> None:
    """Raise ``ConfigError`` unless a context of ``n_context`` tokens is within both bounds."""
    if not least <= n_context <= most:
        raise ConfigError(f"a context of {n_context} tokens is not within {least} and {most}")
