"""The way of the next token into a decode step: its embedding, its id and its position.

All three reach the device in one copy that the host does not wait for. The embedding's row goes as
it lies in the file and is unpacked there, in the step's first segment: the dozens of small
operations that this takes of some types are then launched with the rest of the segment.

Rejected: the unpacked row copied from pageable memory and two numbers filled in beside it, which
was 0.21 ms of a token's 2.4 ms (an H200, eight layers of DeepSeek-V4-Flash).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tieredmoe.moe.dequant import dequantise

if TYPE_CHECKING:
    from tieredmoe.adapters.embedding import Embedding

_ALIGNMENT_NBYTES = 256
_INTEGER_NBYTES = 8


class TokenInput:
    """The token that a step on ``device`` was given last; its tensors stay where they are.

    ``token`` and ``position`` are int64 [1] on the device, at multiples of 16 bytes.
    """

    def __init__(self, embedding: Embedding, *, device: torch.device) -> None:
        self._embedding = embedding
        self._shape = (1, embedding.shape[1])
        n_row = embedding.row_nbytes
        at = -(-n_row // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        nbytes = at + 2 * _ALIGNMENT_NBYTES
        on_device = device.type == "cuda"
        self._staged = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_device)
        self._landed = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        # Written as numpy arrays: an element of a tensor costs ten times as much.
        self._staged_row = self._staged[:n_row].numpy()
        self._staged_token, self._staged_position = (
            _integer(self._staged, at + n * _ALIGNMENT_NBYTES).numpy() for n in range(2)
        )
        self._row = self._landed[:n_row]
        self.token, self.position = (
            _integer(self._landed, at + n * _ALIGNMENT_NBYTES) for n in range(2)
        )
        self._copied = torch.cuda.Event() if on_device else None

    def put(self, *, token_id: int, position: int) -> None:
        """Enqueue the next token on the current stream. Not to be recorded."""
        if self._copied is not None:
            # Long past, but for a token that failed on its way.
            self._copied.synchronize()
        self._staged_row[:] = self._embedding.packed_row(token_id)
        self._staged_token[0] = token_id
        self._staged_position[0] = position
        self._landed.copy_(self._staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def row(self) -> torch.Tensor:
        """The token's embedding, float32 [1, H]; may be recorded."""
        return dequantise(self._row, self._embedding.row_type, self._shape)

    def __repr__(self) -> str:
        return f"<TokenInput of {self._embedding!r}>"


def _integer(memory: torch.Tensor, at: int) -> torch.Tensor:
    return memory[at : at + _INTEGER_NBYTES].view(torch.int64)
