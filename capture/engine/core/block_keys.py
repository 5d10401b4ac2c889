"""Extra keys of KV blocks, folded into vLLM's own hash of a block.

A request's keys are attached to its sampling parameters as an attribute that is not a field: it is found in
one lookup while the request is constructed, and neither copies nor messages nor pickles of the parameters carry it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

from headgate.capture.engine import vllm_names
from headgate.capture.engine.contracts.core_part import BlockKeys
from headgate.capture.engine.vllm_types import Function, OffloadState, Request, RequestParams
from headgate.capture.schema.errors import UnsupportedError

_KEYS = "_headgate_block_keys"
_HASHED_WITH = "_headgate_hashed_with"
_REHASHED = "_headgate_rehashed"
_LOOKAHEAD = 64
"""More tokens than any hash of a block reads after that block."""


def attach_keys(sampling_params: RequestParams | None, keys: BlockKeys | None) -> None:
    """Attach `keys` to a request's parameters: the blocks that are hashed from now on have them."""
    if keys is not None or getattr(sampling_params, _KEYS, None) is not None:
        setattr(sampling_params, _KEYS, keys)


def note_hashed(request: Request, keys: BlockKeys | None) -> None:
    """Remember the keys that the blocks of vLLM's `request` were hashed with. Samples of a prompt share parameters."""
    if keys is not None:
        _follow(request, keys)


def unsalted(request: Request) -> BlockKeys | None:
    """Return the keys that the blocks of `request` were hashed with last, without their salt."""
    keys: BlockKeys | None = vars(request).get(_HASHED_WITH)
    return keys.keys if isinstance(keys, SaltedKeys) else keys


def _follow(request: Request, keys: BlockKeys | None) -> None:
    setattr(request, _HASHED_WITH, keys)
    if keys is not None and keys.skips_reading:
        request.skip_reading_prefix_cache = True


def rehash(request: Request, keys: BlockKeys | None) -> None:
    """Hash the blocks of vLLM's `request` with `keys`, unless they are; none of them may be in use.

    Args:
        request: Waits, in the scheduler or outside.
        keys: The block keys as of now.
    """
    if vars(request).get(_HASHED_WITH) == keys:
        return
    rehash_from(request, keys, 0, 1)


def rehash_from(request: Request, keys: BlockKeys | None, num_computed: int, block_size: int) -> None:
    """Hash the blocks of vLLM's `request` that end after its computed tokens with `keys`; others stay as they are.

    Args:
        request: May run: a block that is not full is not in use under a hash.
        keys: The block keys as of now.
        num_computed: Tokens whose rows are computed, or whose steps were launched.
        block_size: Tokens of one hash.
    """
    # Not to its parameters, which other samples of its prompt may have, too.
    setattr(request, _KEYS, keys)
    _follow(request, keys)
    del request.block_hashes[num_computed // block_size :]
    request.update_block_hashes()
    setattr(request, _REHASHED, True)


@dataclass(frozen=True, slots=True)
class SaltedKeys:
    """Block keys of one request whose earlier rows were computed under others: no other request has the same.

    Attributes:
        keys: As of now.
        salt: Unique.
    """

    keys: BlockKeys | None
    salt: str

    @property
    def skips_reading(self) -> bool:
        """See `BlockKeys`."""
        return self.keys is not None and self.keys.skips_reading

    def of_block(self, start: int, end: int, num_prompt: int) -> tuple[tuple[str, str], ...]:
        """See `BlockKeys.of_block`."""
        found = () if self.keys is None else self.keys.of_block(start, end, num_prompt)
        return (*found, ("headgate-salt", self.salt))


def extra_keys(original: Function) -> Function:
    """Wrap ``generate_block_hash_extra_keys``: add a request's own pairs to those of stock vLLM."""

    @wraps(original)
    def wrapped(
        request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[object, ...] | None, int]:
        found, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        own = vars(request)
        keys: BlockKeys | None = own[_KEYS] if _KEYS in own else getattr(request.sampling_params, _KEYS, None)
        if keys is not None and (ours := keys.of_block(start_token_idx, end_token_idx, request.num_prompt_tokens)):
            return (*(found or ()), *ours), next_mm_idx
        return found, next_mm_idx

    return wrapped


def follow_extra_keys(original: Function) -> Function:
    """Replace a copy of ``generate_block_hash_extra_keys`` that was imported by name, perhaps before it was wrapped."""

    @wraps(original)
    def wrapped(*args: object) -> object:
        return vllm_names.BLOCK_EXTRA_KEYS.get()(*args)

    return wrapped


def offload_keys(original: Function) -> Function:
    """Wrap ``RequestOffloadState.update_offload_keys``: it extends a list of keys that it made of earlier hashes.

    Stock vLLM never changes the hash of a block. After `rehash_from` the connector would store and look up blocks under
    keys of what steered the request before.
    """

    @wraps(original)
    def wrapped(self: OffloadState) -> None:
        if vars(self.req).pop(_REHASHED, False):
            for group in self.group_states:
                group.offload_keys.clear()
        original(self)

    return wrapped


class _Probe:
    skips_reading = False

    def of_block(self, start: int, end: int, num_prompt: int) -> tuple[tuple[str, str], ...]:
        return (("headgate", "probe"),)


def verify_block_keys(block_hasher: Callable[[Request], list[object]] | None, block_size: int) -> None:
    """Check that the keys of a request reach the hashes of its blocks.

    Args:
        block_hasher: The engine core's; None if it caches no prefixes.
        block_size: Tokens of one hash.

    Raises:
        UnsupportedError: If they do not: two requests would share the KV of one of them.
    """
    if block_hasher is None:
        return

    def request_with(keys: BlockKeys | None) -> Request:
        params = vllm_names.SAMPLING_PARAMS.get()(max_tokens=1)
        attach_keys(params, keys)
        request: Request = vllm_names.REQUEST.get()(
            request_id="headgate-probe",
            prompt_token_ids=[0] * (block_size + _LOOKAHEAD),
            sampling_params=params,
            pooling_params=None,
            block_hasher=block_hasher,
        )
        return request

    plain, probe = request_with(None), request_with(_Probe())
    found, _ = vllm_names.BLOCK_EXTRA_KEYS_COPY.get()(probe, 0, 1, 0)
    are_distinct = bool(plain.block_hashes) and not set(plain.block_hashes) & set(probe.block_hashes)
    if not are_distinct or ("headgate", "probe") not in (found or ()):
        raise UnsupportedError(
            "the block hasher of this vLLM does not call generate_block_hash_extra_keys as headgate wrapped it, so "
            "steered requests would share KV with others: another plugin replaced it; start without that plugin, or "
            "with --no-enable-prefix-caching"
        )
