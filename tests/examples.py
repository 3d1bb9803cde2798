"""Numbers of examples for tests that need more than the profile's."""

from hypothesis import settings

__all__ = ["at_least"]


def at_least(count: int) -> settings:
    """Return `count`, or the profile's number if it is larger, such as in `make sanitize`."""
    return settings(max_examples=max(count, settings().max_examples))
