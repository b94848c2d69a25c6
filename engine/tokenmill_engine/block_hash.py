"""Content identity of full KV blocks, chained so that a hash stands for the whole prefix before it.

    hash[i] = sha256(hash[i-1] + token ids of block i),   hash[-1] = sha256(extra key)

The extra key holds everything besides the tokens that the K/V depend on or that must keep tenants
apart: the cache salt and the LongRoPE regime. Scheme after vLLM's `hash_block_tokens`; SHA-256 and
not Python's `hash`, because a collision would hand one request another one's context.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from .request import Request


def extend_block_hashes(request: Request, num_blocks: int, block_size: int) -> None:
    """Grows `request.block_hashes` to `num_blocks` entries; hashes already there are not redone.

    Valid because tokens are only ever appended. Whoever changes the extra key clears the list.
    """
    hashes = request.block_hashes
    if len(hashes) >= num_blocks:
        return
    parent = hashes[-1] if hashes else _root(request)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        token_ids = array("q", request.token_ids[start : start + block_size])
        parent = sha256(parent + token_ids.tobytes()).digest()
        hashes.append(parent)


def _root(request: Request) -> bytes:
    # repr tells None from 'None' and escapes quotes, so two different keys never read the same.
    return sha256(repr((request.cache_salt, request.rope_regime)).encode()).digest()
