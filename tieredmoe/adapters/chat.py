"""What a conversation is, whatever the model."""

from __future__ import annotations

import attrs


@attrs.frozen
class Message:
    """One message: ``role`` is system, user or assistant; only the assistant has ``reasoning``."""

    role: str
    content: str
    reasoning: str | None = None
