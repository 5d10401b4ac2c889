"""The rows that a harvest wants of each prompt: at what sites, for what tokens, how many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headgate.capture.schema.errors import ConfigError, shown
from headgate.capture.schema.sites import Site, site_map, sort_sites

Tokens = Literal["prompt", "generated", "all"]
KINDS: tuple[Tokens, ...] = get_args(Tokens)


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt as it is sent to the engine.

    Attributes:
        index: Its place among the prompts, from 0.
        token_ids: Its tokens, not more than the context.
        start: The first position whose row is wanted.
        stop: The end of those positions; None if it is where the answer ends.
        most_rows: Rows that can come at each site; exactly so many where `stop` is given.
        was_cut: Whether the prompt was longer than the context.
    """

    index: int
    token_ids: Sequence[int] = field(repr=False)
    start: int
    stop: int | None
    most_rows: int
    was_cut: bool

    @property
    def name(self) -> str:
        """Its request id in the files."""
        return f"prompt-{self.index}"

    @property
    def positions(self) -> dict[str, int]:
        """The selector of its rows, as a request writes it."""
        return {"start": self.start} if self.stop is None else {"start": self.start, "stop": self.stop}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Rows of every prompt.

    Attributes:
        sites: In the order of the forward pass.
        tokens: Rows of the prompt, of the tokens that were generated, or both.
        drop_first: Positions at the beginning whose rows are left out, such as those of BOS and of attention sinks.
        max_tokens: Tokens that are generated; the last one has no row.
        temperature: Of the sampling; 0 takes the likeliest token. Each prompt's index is its seed.
        messages: Whether files say where the messages of chats lie.

    Raises:
        ConfigError: If a value is out of range, or no token can have a row.
    """

    sites: tuple[Site, ...]
    tokens: Tokens = "prompt"
    drop_first: int = 0
    max_tokens: int = 1
    temperature: float = 0.0
    messages: bool = False

    def __post_init__(self) -> None:
        if not self.sites:
            raise ConfigError("sites: name at least one, such as 12.post_mlp")
        if self.tokens not in KINDS:
            raise ConfigError(f"tokens: expected one of {', '.join(KINDS)}, got {shown(self.tokens)}")
        for name, value, least in (("drop_first", self.drop_first, 0), ("max_tokens", self.max_tokens, 1)):
            if value < least:
                raise ConfigError(f"{name}: must be at least {least}, got {value}")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature: must be 0 or more, got {self.temperature}")
        if self.tokens != "prompt" and self.max_tokens < 2:
            raise ConfigError(
                f"max_tokens: {self.max_tokens} with tokens={self.tokens!r}: an answer of N tokens has N - 1 rows; "
                "give at least 2"
            )
        if self.tokens == "prompt" and self.max_tokens > 1:
            raise ConfigError(
                f"max_tokens: {self.max_tokens} with tokens='prompt' would generate tokens whose rows are not wanted; "
                "give tokens='all' or 'generated', or leave it at 1"
            )

    @property
    def is_exact(self) -> bool:
        """Whether the number of a prompt's rows follows from its tokens."""
        return self.tokens == "prompt"

    @property
    def hooks(self) -> dict[str, list[int]]:
        """The sites as a request writes them."""
        return site_map(self.sites)

    def context(self, asked: int | None, max_length: int) -> int:
        """Tokens that a prompt may have.

        Args:
            asked: As the user wants it; as many as fit if None.
            max_length: Tokens that the engine takes, of prompt and answer.

        Raises:
            ConfigError: If it does not fit.
        """
        most = max_length - self.max_tokens
        if most < 1 or (asked is not None and not 1 <= asked <= most):
            given = "" if asked is None else f" and context {asked}"
            raise ConfigError(
                f"context: max_tokens {self.max_tokens}{given} do not fit: the engine takes {max_length} tokens of "
                "prompt and answer (--max-model-len)"
            )
        return asked or most

    def plan(self, index: int, token_ids: Sequence[int], context: int) -> Task | None:
        """The task of a prompt, cut to its first `context` tokens; None if it can have no rows."""
        count = min(len(token_ids), context)
        start = max(self.drop_first, count if self.tokens == "generated" else 0)
        end = count + self.max_tokens - 1
        if not count or start >= end:
            return None
        stop = end if self.is_exact else None
        return Task(index, token_ids[:context], start, stop, end - start, was_cut=len(token_ids) > context)


def parse_site_names(names: str | Iterable[str]) -> tuple[Site, ...]:
    """Read sites, several separated by commas or each on its own, each once.

    Raises:
        ConfigError: If one is not a site.
    """
    texts = [names] if isinstance(names, str) else list(names)
    words = [word.strip() for text in texts for word in text.split(",")]
    try:
        return sort_sites({Site.parse(word) for word in words if word})
    except ValueError as error:
        raise ConfigError(f"sites: {error}") from error


def settings_of(wanted: Wanted, context: int | None, batch: int) -> dict[str, Any]:
    """The settings that decide which rows come, in JSON values.

    The batch is among them where answers have rows: how many come is known after a batch alone, so it is where a
    harvest can end.
    """
    return {
        "sites": [site.name for site in wanted.sites],
        "tokens": wanted.tokens,
        "drop_first": wanted.drop_first,
        "max_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "messages": wanted.messages,
        "context": context,
        "batch": None if wanted.is_exact else batch,
    }
