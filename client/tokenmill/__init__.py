"""Tokenmill's client: enqueue generation requests on Redis and stream every token back."""

from ._version import __version__

__all__ = ["__version__"]
