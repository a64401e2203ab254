"""Names for the beginnings of token sequences: a chain of keyed hashes over blocks of tokens.

A block's name says what is in it and everything before it. The key is random for each process, so
nobody can construct prompts whose names collide; a *salt* keeps users apart who must not learn
from each other's timing (the salts of vLLM's cache_salt).
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence

_KEY = os.urandom(32)


def root(salt: str = "") -> bytes:
    """The name of the empty beginning, for all who share the salt."""
    return hashlib.blake2b(salt.encode("utf-8", "replace"), digest_size=16, key=_KEY).digest()


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of ``parent`` with ``tokens`` behind it."""
    data = parent + array("i", tokens).tobytes()
    return hashlib.blake2b(data, digest_size=16, key=_KEY).digest()
