"""Collections that refuse or count iteration, which line counts of C code do not show."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeVar

__all__ = ["Walked", "unwalked"]

Collection = TypeVar("Collection", bound="dict[Any, Any] | list[Any]")


def unwalked(collection: Collection) -> Collection:
    """Copy a collection; raise AssertionError if a loop, `sorted`, `list` or `set` walks it.

    Sets are not supported, since other sets read their items directly.
    """
    base: Any = type(collection)

    def refuse(*_: object) -> Any:
        raise AssertionError(f"a {base.__name__} of {len(collection)} is walked")

    verbs = ("__iter__", "__reversed__", "copy", *(("keys", "values", "items") * (base is dict)))
    wrapped: Collection = type("Unwalked", (base,), dict.fromkeys(verbs, refuse))(collection)
    return wrapped


class Walked(OrderedDict[Any, Any]):
    """A collection that counts the items that loops, `list` and the like read."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.count += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)
