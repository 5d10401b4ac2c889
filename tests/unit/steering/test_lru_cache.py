"""What was kept is found again as long as there is room for it; what was not found longest goes first."""

from __future__ import annotations

from headgate.steering.lru_cache import LruCache


def test_what_was_not_found_for_the_longest_time_goes_first() -> None:
    kept: LruCache[str] = LruCache(max_bytes=10)
    kept.keep("a", "A", 4)
    kept.keep("b", "B", 4)
    assert kept.find("a") == "A"

    kept.keep("c", "C", 4)

    assert [kept.find(key) for key in "abc"] == ["A", None, "C"]


def test_a_key_that_is_kept_anew_counts_once() -> None:
    kept: LruCache[str] = LruCache(max_bytes=10)
    for name in ("first", "second"):
        kept.keep("a", name, 6)
    kept.keep("b", "B", 4)

    assert (kept.find("a"), kept.find("b")) == ("second", "B")
    kept.keep("large", "L", 11)
    assert [kept.find(key) for key in ("a", "b", "large")] == [None, None, None]
    kept.keep("b", "B", 10)
    assert kept.find("b") == "B"


def test_nothing_is_found_once_all_is_cleared() -> None:
    kept: LruCache[str] = LruCache(max_bytes=10)
    kept.keep("a", "A", 10)

    kept.clear()
    kept.keep("b", "B", 10)

    assert (kept.find("a"), kept.find("b")) == (None, "B")
