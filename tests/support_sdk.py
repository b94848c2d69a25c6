"""What the worker double says in the SDK's tests."""

from __future__ import annotations

from tokenmill.testing import pieces_of, token_id_of

TEXT = "the quick brown fox jumps over the lazy dog"
PIECES = pieces_of(TEXT)
IDS = [token_id_of(piece) for piece in PIECES]
