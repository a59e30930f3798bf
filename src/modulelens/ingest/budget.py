"""How many bytes a trace may keep, and what is dropped for it. Knows sizes, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from modulelens.capture.keep import Keep

WEIGHTS, TENSORS = "weights", "inputs and outputs"


class Budget:
    """Spends `Keep.max_bytes` and `Keep.max_module_bytes`.

    Args:
        keep: The limits, and what is kept within them.
        size_of: Bytes of snapshots, given their numbers.

    Attributes:
        users: Snapshot number -> who needs its bytes.
        dropped: Module number -> the reason, what did not fit, and its bytes.
    """

    def __init__(self, keep: Keep, size_of: Callable[[Iterable[int]], int]) -> None:
        self._keep = keep
        self._size_of = size_of
        self._total = 0
        self._spent: dict[int, int] = {}
        self._shapes: dict[str, set[int]] = {WEIGHTS: set(), TENSORS: set()}
        self.users: dict[int, set[int]] = {}
        self.dropped: dict[int, list[tuple[str, str, int]]] = {}

    def spend(self, number: int, what: str, wanted: Mapping[int, set[int]]) -> None:
        """Keeps what a module wants, as snapshot number -> users, or notes why it does not fit."""
        new = self._size_of(snapshot for snapshot in wanted if snapshot not in self.users)
        own = self._size_of(wanted) + self._spent.get(number, 0)
        for name, limit, need in (
            ("max_bytes", self._keep.max_bytes, self._total + new),
            ("max_module_bytes", self._keep.max_module_bytes, own),
        ):
            if limit is not None and new and need > limit:
                self._shapes[what].add(number)
                text = f"{name}={limit:,} is too little: only shapes were kept of"
                self.dropped.setdefault(number, []).append((text, what, new))
                return
        self._total += new
        self._spent[number] = own
        for snapshot, who in wanted.items():
            self.users.setdefault(snapshot, set()).update(who)

    def weights(self, number: int) -> str:
        """What to keep of a module's weights: "full" or "shape"."""
        return "shape" if number in self._shapes[WEIGHTS] else self._keep.weights

    def tensors(self, number: int) -> str:
        """What to keep of what goes through a module: "full" or "shape"."""
        return "shape" if number in self._shapes[TENSORS] else self._keep.tensors
