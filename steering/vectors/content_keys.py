"""Keys of steering content: equal vectors at equal sites have equal keys, whatever form they arrived in.

A key is the first 16 bytes of a SHA-256, which processors compute faster than any other hash of its strength. It
decides which KV blocks and which vectors requests share, so it must be hard to forge: a client who could make two
contents of one key could feed the one to users of the other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from headgate.capture.schema.sites import Site
from headgate.steering.vectors.dtypes import StoredType

KEY_BYTES = 16

_CONTENT = b"headgate vectors\n"
_SUM = b"headgate sum\n"
"""What each kind of key begins with: it keeps them apart."""


def content_key(sites: Sequence[Site], hidden_size: int, dtype: StoredType, payload: bytes) -> bytes:
    """The key of rows at sites.

    Args:
        sites: In the order of the forward pass, one for each row.
        hidden_size: Values of a row.
        dtype: The canonical type of the values (`headgate.steering.vectors.dtypes.narrowest`).
        payload: The rows, one after the other.
    """
    digest = hashlib.sha256(_CONTENT)
    names = " ".join([f"{layer}.{hook._value_}" for layer, hook in sites])
    digest.update(f"{dtype} {hidden_size} {len(sites)} {names}\n".encode())
    digest.update(payload)
    return digest.digest()[:KEY_BYTES]


def sum_key(parts: Iterable[tuple[bytes, float]]) -> bytes | None:
    """The key of a weighted sum of contents, from their keys alone; None if nothing is left of it.

    The order of the parts does not matter, and parts of scale 0 count for nothing. One part of scale 1 has its own
    key. Sums of equal value that were put together from different parts have different keys: they then share
    nothing, which costs memory and never correctness.
    """
    counted = sorted(part for part in parts if part[1] != 0)
    if not counted:
        return None
    if len(counted) == 1 and counted[0][1] == 1:
        return counted[0][0]
    digest = hashlib.sha256(_SUM)
    for key, scale in counted:
        digest.update(key + struct.pack("<d", scale))
    return digest.digest()[:KEY_BYTES]
