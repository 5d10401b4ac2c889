"""The facts of a layer's attention, as plain data: how it weighs keys. Workers read them from the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFacts:
    """One layer's attention, of all tensor-parallel ranks together: causal, over keys of one prompt and its answer.

    Head h reads the keys of KV head ``h * num_kv_heads // num_heads``.

    Attributes:
        num_heads: Heads of a row of queries.
        num_kv_heads: Heads of a row of keys.
        head_size: Numbers of each of them.
        scale: What the product of query and key is multiplied by.
        window: A query sees so many keys, its own position's included; None for all.
        soft_cap: Scores are ``soft_cap * tanh(score / soft_cap)``; None if they are not capped.
        sinks: A score of each head that takes part in the softmax beside those of the keys; None if there is none.
        slopes: Of each head: the score is lower by so much for each position that the key lies before the query
            (ALiBi); None if it is not.
        whole_tokens: Ids of tokens that see later ones of their kind, as those of an image do.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: tuple[float, ...] | None = None
    slopes: tuple[float, ...] | None = None
    whole_tokens: tuple[int, ...] = ()
