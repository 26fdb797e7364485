"""The keys of a store by their parents, so that those below a prefix are found without the others.

The parent of a key is what precedes its last slash, with the slash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class KeyIndex:
    """The keys below each parent, in the order in which they were set first."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        """Begin with `keys`."""
        self._children: dict[bytes, dict[bytes, None]] = {}
        for key in keys:
            self.add(key)

    def add(self, key: bytes) -> None:
        """Add a key that is not there."""
        self._children.setdefault(key[: key.rfind(b"/") + 1], {})[key] = None

    def remove(self, key: bytes) -> None:
        """Remove a key that is there."""
        parent = key[: key.rfind(b"/") + 1]
        children = self._children[parent]
        del children[key]
        if not children:
            del self._children[parent]

    def below(self, prefix: bytes) -> Iterator[bytes]:
        """Yield the keys that begin with `prefix`."""
        parent_of_prefix = prefix[: prefix.rfind(b"/") + 1]
        for parent, children in self._children.items():
            if parent.startswith(prefix):
                yield from children
            elif parent == parent_of_prefix:
                yield from (key for key in children if key.startswith(prefix))
