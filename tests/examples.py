"""Number of examples for a test that needs more than the profile's."""

from hypothesis import settings

__all__ = ["at_least"]


def at_least(count: int) -> settings:
    """So many, or the profile's if that is more: `make sanitize` tries a thousand."""
    return settings(max_examples=max(count, settings().max_examples))
