"""Collections that may not be walked, or that count it: what C walks, no count of lines shows."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeVar

__all__ = ["Walked", "unwalked"]

Collection = TypeVar("Collection", bound="dict[Any, Any] | list[Any]")


def unwalked(collection: Collection) -> Collection:
    """A copy whose items no loop, `sorted`, `list` or `set` may take: that is an AssertionError.

    There is none for a set: other sets take its items without asking it.
    """
    base: Any = type(collection)

    def refuse(*_: object) -> Any:
        raise AssertionError(f"a {base.__name__} of {len(collection)} is walked")

    verbs = ("__iter__", "__reversed__", "copy", *(("keys", "values", "items") * (base is dict)))
    made: Collection = type("Unwalked", (base,), dict.fromkeys(verbs, refuse))(collection)
    return made


class Walked(OrderedDict[Any, Any]):
    """Counts the items that loops, `list` and the like take."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.count += 1
            yield key

    def items(self) -> Any:
        return ((key, self[key]) for key in self)
