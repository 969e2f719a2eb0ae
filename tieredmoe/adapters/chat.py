"""What a conversation is, whatever the model, and what the formats of all models check alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from tieredmoe.errors import TokenizerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROLES = ("system", "user", "assistant")


@attrs.frozen
class Message:
    """One message: ``role`` is system, user or assistant; only the assistant has ``reasoning``."""

    role: str
    content: str
    reasoning: str | None = None


def message_problems(messages: Sequence[Message]) -> list[str]:
    """What no format can express: no messages, an unknown role, reasoning that is not the model's.

    Which roles may follow each other is the business of the format.
    """
    if not messages:
        return ["there are no messages"]
    problems = []
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            problems.append(
                f"message {i} has role {message.role!r}; tools are not supported, roles are "
                f"{', '.join(ROLES)}"
            )
        if message.role != "assistant" and message.reasoning is not None:
            problems.append(f"message {i} has reasoning, which only the assistant has")
    return problems


def require_marks(found: Mapping[str, int | None], *, model: str) -> tuple[int, ...]:
    """The ids of ``found``, by the name of each, in its order.

    Raises ``TokenizerError`` naming all that the vocabulary lacks.
    """
    missing = [name for name, token_id in found.items() if token_id is None]
    if missing:
        raise TokenizerError(
            f"this vocabulary cannot write a {model} chat: it lacks {', '.join(missing)}"
        )
    return tuple(token_id for token_id in found.values() if token_id is not None)
