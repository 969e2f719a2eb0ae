"""Shares of the slots by layer: whose expert goes when one of a given layer comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Quotas:
    """Equal shares of the slots for the layers, or one for all where shares would be too small.

    A group is a layer, or all of them: ``group_of`` says which. ``excess`` is what each group has
    above its quota; whoever gives and takes slots keeps it.
    """

    __slots__ = ("_least", "_numbers", "excess")

    def __init__(self, layers: Sequence[int], *, n_slots: int, least: int) -> None:
        self._numbers = {layer: i for i, layer in enumerate(layers)}
        self._least = least
        self.excess: list[int] = []
        self.share(n_slots)

    def share(self, n_slots: int) -> None:
        """Share ``n_slots`` among groups that have none yet.

        A layer's quota is at least ``least``, or there is one group.
        """
        n_layers = len(self._numbers)
        n_groups = n_layers if n_slots // n_layers >= self._least else 1
        quota, rest = divmod(n_slots, n_groups)
        self.excess = [-quota - (i < rest) for i in range(n_groups)]

    def group_of(self, layer: int) -> int:
        """The number of the group that ``layer`` is of."""
        number = self._numbers[layer]
        return number if len(self.excess) > 1 else 0

    def donors(self, group: int) -> Iterator[int]:
        """The groups in the order in which to ask them for a victim on behalf of ``group``.

        First itself, unless it has less than its quota; then the one furthest above its own.
        O(layers) behind the first.
        """
        if self.excess[group] >= 0:
            yield group
        yield from sorted(range(len(self.excess)), key=self.excess.__getitem__, reverse=True)
