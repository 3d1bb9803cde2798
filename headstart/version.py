"""The version of headstart."""

__all__ = ["__version__", "__version_tuple__"]

__version__ = "0.2.0"
__version_tuple__ = tuple(
    int(part) if part.isdecimal() else part for part in __version__.split(".")
)
