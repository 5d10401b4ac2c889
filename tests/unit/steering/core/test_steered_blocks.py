"""Blocks share a key exactly if the same vectors acted on the same of their tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.steering.core.resolved import SteeredBlocks

BLOCK = 4
KEY = st.none() | st.sampled_from([b"a", b"b", b"ab"])


def keys_of(num_tokens: int, num_prompt: int, keys: SteeredBlocks) -> list[tuple[tuple[str, str], ...]]:
    return [keys.of_block(at, at + BLOCK, num_prompt) for at in range(0, num_tokens - BLOCK + 1, BLOCK)]


def acting(num_tokens: int, num_prompt: int, keys: SteeredBlocks) -> list[tuple[str | None, ...]]:
    """Return the names that act on each token of each block."""
    by_token = [keys.prefill if position < num_prompt else keys.decode for position in range(num_tokens)]
    return [tuple(by_token[at : at + BLOCK]) for at in range(0, num_tokens - BLOCK + 1, BLOCK)]


def joined(shared: bytes | None, own: bytes | None) -> SteeredBlocks:
    return SteeredBlocks.join(global_prefill=shared, global_decode=shared, prefill=own, decode=own)


@given(
    prompts=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    keys=st.tuples(*[st.builds(SteeredBlocks, *[st.sampled_from([None, "a", "b"])] * 2)] * 2),
)
def test_blocks_have_equal_keys_exactly_if_the_same_acted_on_each_token(
    prompts: tuple[int, int], keys: tuple[SteeredBlocks, SteeredBlocks]
) -> None:
    one, other = (keys_of(16, *pair) for pair in zip(prompts, keys, strict=True))
    tokens_one, tokens_other = (acting(16, *pair) for pair in zip(prompts, keys, strict=True))

    for key, tokens in zip(one, tokens_one, strict=True):
        for other_key, other_tokens in zip(other, tokens_other, strict=True):
            assert (key == other_key) == (tokens == other_tokens)


@given(num_prompt=st.integers(1, 14), decode=st.sampled_from(["a", "b"]))
def test_decode_steering_leaves_the_prompts_blocks_alone(num_prompt: int, decode: str) -> None:
    keys = keys_of(16, num_prompt, SteeredBlocks(None, decode))

    assert all(key == () for key in keys[: num_prompt // BLOCK])
    assert all(key for key in keys[num_prompt // BLOCK :])


def test_blocks_on_which_nothing_acts_have_stock_keys() -> None:
    assert keys_of(16, 6, joined(None, None)) == [()] * 4
    assert keys_of(16, 8, SteeredBlocks("a", None))[2:] == [(), ()]


@given(first=KEY, second=KEY, third=KEY, fourth=KEY)
def test_sums_of_different_parts_have_different_names(
    first: bytes | None, second: bytes | None, third: bytes | None, fourth: bytes | None
) -> None:
    one, other = joined(first, second), joined(third, fourth)

    alone = (first is None or second is None) and (third is None or fourth is None)
    is_same = (first or second) == (third or fourth) if alone else (first, second) == (third, fourth)
    assert (one == other) == is_same


def test_a_global_change_of_one_phase_leaves_the_keys_of_the_other() -> None:
    before = SteeredBlocks.join(global_prefill=b"g", global_decode=b"g", prefill=b"p", decode=b"d")
    after = SteeredBlocks.join(global_prefill=b"g", global_decode=b"h", prefill=b"p", decode=b"d")

    assert keys_of(8, 8, before) == keys_of(8, 8, after)
    assert keys_of(16, 8, before)[2:] != keys_of(16, 8, after)[2:]


def test_an_extra_key_is_a_pair_as_vllm_expects_it() -> None:
    assert joined(None, b"\x01\xff").of_block(0, 4, 8) == (("headgate", "01ff"),)
