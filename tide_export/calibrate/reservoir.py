"""A uniform sample of bounded size from a stream of unknown length, used by `collect` to keep tokens.

Algorithm R (Vitter 1985), one draw per item, done for a whole batch of items at once. It only decides *where* an item
goes: the owner of the memory stores the few that were accepted, and computes nothing for the others.
"""

import numpy as np


class Reservoir:
    """`capacity` slots; after any number of offers each item seen so far is in one of them with equal probability.

    Attributes:
        capacity: number of slots.
        seen: items offered so far.
    """

    def __init__(self, capacity: int, rng: np.random.Generator):
        self.capacity = capacity
        self.seen = 0
        self._rng = rng

    @property
    def filled(self) -> int:
        """Slots in use: the first this many."""
        return min(self.seen, self.capacity)

    def offer(self, items: int) -> tuple[np.ndarray, np.ndarray]:
        """Offers the next `items` items; returns which of them (0 .. items-1) to store and their slots, int64 [n] each.

        No slot appears twice: where two items of the batch drew the same one, the later has it, as it would one by one.
        """
        numbers = np.arange(self.seen, self.seen + items)
        slots = np.where(numbers < self.capacity, numbers, self._rng.integers(0, numbers + 1))
        self.seen += items
        rows = np.flatnonzero(slots < self.capacity)
        _, from_end = np.unique(slots[rows][::-1], return_index=True)
        rows = np.sort(rows[len(rows) - 1 - from_end])
        return rows, slots[rows]
