"""The consumer that answers with what a lens reads in each row: the strongest tokens, and given ones.

A row after layer l is transported by the lens (`headgate.capture.lens`), normed and unembedded by the model's own head,
and reduced to the strongest tokens with their log-probabilities, and to the log-probabilities and ranks of the tokens
that the request names. That happens in the worker, where the rows are: only ids and numbers leave the device.

Shapes: N rows, D hidden size, V tokens of the vocabulary, K strongest tokens, T given tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headgate.capture.lens import LOGIT, Lens, LensError, LensKind, load_current
from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import (
    ConsumerContext,
    FinishedRequest,
    HeadReadout,
    HeadReduction,
    ModelHead,
    ModelInfo,
    OutputColumns,
    Readout,
    RequestInfo,
    RowArguments,
    RowBlock,
    SpecContext,
    StreamingConsumer,
    check_fields,
    check_ids,
    parse_selector,
    read_params,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError, read_flag, shown
from headgate.capture.schema.results import StreamedParts, join_rows
from headgate.capture.schema.sites import HookPoint, Site, parse_layers
from headgate.capture.schema.spec import CaptureSpec
from headgate.capture.schema.vocabulary import Vocabulary, read_token, word_like

FIELDS = ("lens", "layers", "positions", "top", "tokens", "words_only")
LENS, TOP, TOKENS, WORDS_ONLY = "lens", "top", "tokens", "words_only"
DEFAULT_TOP = 10

_LENS, _WORDS, _TOP, _FIRST_TOKEN = range(4)
"""Places of a request's arguments: the number of its lens, whether words alone are ranked, its top, its tokens."""
_LOGITS = 1 << 26
"""Logits that are in memory at a time, about: 256 MiB of float32. The weights of the head are read once for these."""
_MAX_ASKED = 512
"""Largest value of `max_top` and of `max_tokens`: they set the room of each row, whatever a request asks."""
_MATRIX_ROWS = 1024
"""Rows of a lens' matrix that are widened to float32 at a time."""


class LensParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the lens consumer.

    Attributes:
        lenses: Files of lenses by name, as ``headgate lens import`` writes them; ``logit`` needs none.
        max_top: Strongest tokens that a request may ask for.
        max_tokens: Tokens whose log-probabilities and ranks a request may ask for.
        max_values: Largest number of tokens in the result of one sample: positions times layers times those.
    """

    lenses: dict[str, str] = {}
    max_top: int = 20
    max_tokens: int = 16
    max_values: int = 262_144


@dataclass(frozen=True)
class _Settings:
    """Parsed parameters.

    Attributes:
        params: As given.
        lenses: By name, in the order of the numbers 1, 2, ...; 0 is the logit lens.
    """

    params: LensParams
    lenses: Mapping[str, Lens]

    @property
    def names(self) -> list[str]:
        """The names of all lenses, by their numbers."""
        return [LOGIT, *self.lenses]

    @property
    def layout(self) -> _Outputs:
        """Places of the outputs."""
        return _Outputs(self.params.max_top, self.params.max_tokens)


@dataclass(frozen=True)
class _Outputs:
    """Places of the numbers that each row becomes: K ids, K log-probabilities, T log-probabilities, T ranks."""

    top: int
    tokens: int

    @property
    def size(self) -> int:
        """Numbers."""
        return 2 * (self.top + self.tokens)

    def split(self, rows: Any) -> tuple[Any, Any, Any, Any]:
        """Return the four parts of rows ``[..., size]``."""
        first, second, third = self.top, 2 * self.top, 2 * self.top + self.tokens
        return rows[..., :first], rows[..., first:second], rows[..., second:third], rows[..., third:]


def parse_params(params: Mapping[str, Any]) -> _Settings:
    """Read and check the parameters, and open the lenses.

    Raises:
        ConfigError: Naming the parameter.
    """
    parsed = read_params(LensParams, params, "lens")
    for name, least, most in (("max_top", 1, _MAX_ASKED), ("max_tokens", 0, _MAX_ASKED), ("max_values", 1, 1 << 30)):
        if not least <= getattr(parsed, name) <= most:
            raise ConfigError(f"lens: {name}: expected a number from {least} to {most}, got {getattr(parsed, name)}")
    if LOGIT in parsed.lenses:
        raise ConfigError(f"lens: lenses.{LOGIT}: this is the name of the lens without a file; choose another")
    return _Settings(parsed, {name: _read(name, path) for name, path in parsed.lenses.items()})


def _read(name: str, path: str) -> Lens:
    try:
        return load_current(path)
    except (OSError, LensError) as error:
        raise ConfigError(f"lens: lenses.{name}: {error}") from error


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"lens", "layers", "positions", "top", "tokens", "words_only"}``.

    Returns:
        The spec, with the sites after the chosen layers; its options are the fields, tokens as ids.

    Raises:
        RequestError: Naming the field.
    """
    settings = context.parsed_params(parse_params)
    raw = check_fields(raw, context, FIELDS, f'such as {{"lens": "{LOGIT}"}}')
    name = _name(raw.get(LENS, LOGIT), settings, f"{context.field}.{LENS}")
    sites = _sites(raw.get("layers", "all"), name, settings, context)
    most = settings.params.max_top
    top = _top(raw.get(TOP, min(DEFAULT_TOP, most)), most, f"{context.field}.{TOP}")
    tokens = _tokens(raw.get(TOKENS, []), settings.params.max_tokens, context)
    words_only = read_flag(raw.get(WORDS_ONLY, False), f"{context.field}.{WORDS_ONLY}")
    if words_only and not (context.vocabulary and context.vocabulary.has_texts):
        raise RequestError(f"{context.field}.{WORDS_ONLY}", "the engine was started without a tokenizer")
    if not top and not tokens:
        raise RequestError(f"{context.field}.{TOP}", "is 0, and there are no tokens: nothing is asked")
    sha256 = settings.lenses[name].sha256 if name in settings.lenses else None
    return CaptureSpec(
        sites=sites,
        positions=parse_selector(raw, context),
        options={LENS: name, "sha256": sha256, TOP: top, TOKENS: tokens, WORDS_ONLY: words_only},
        arguments=(settings.names.index(name), int(words_only), top, *tokens),
    )


def _name(given: object, settings: _Settings, field: str) -> str:
    if not isinstance(given, str) or given not in settings.names:
        raise RequestError(field, f"no such lens {shown(given)}; configured: {', '.join(settings.names)}")
    return given


def _sites(layers: object, name: str, settings: _Settings, context: SpecContext) -> tuple[Site, ...]:
    readable = [site.layer for site in _readable(context.model)]
    if name in settings.lenses:
        readable = [layer for layer in readable if layer in settings.lenses[name].layers]
    chosen: tuple[int, ...] = tuple(readable)
    if layers != "all":
        chosen = context.parsed_once(
            layers, "layers", lambda raw, path: parse_layers(raw, context.model.num_layers, path)
        )
    missing = [layer for layer in chosen if layer not in readable]
    if missing or not chosen:
        first = context.model.first_head_layer
        stage = f", and the last pipeline stage, which has the model's head, begins at layer {first}" if first else ""
        raise RequestError(
            f"{context.field}.layers",
            f"the lens {name!r} reads no layers {missing} here, but {readable}: those that it has and whose "
            f"post_mlp is captured (setting: capture.sites){stage}",
        )
    return tuple(Site(layer, HookPoint.POST_MLP) for layer in chosen)


def _top(given: object, most: int, field: str) -> int:
    if type(given) is not int or not 0 <= given <= most:
        raise RequestError(field, f"expected a number from 0 to {most} (parameter max_top), got {shown(given)}")
    return given


def _tokens(given: object, most: int, context: SpecContext) -> list[int]:
    field = f"{context.field}.{TOKENS}"
    if not isinstance(given, list) or len(given) > most:
        raise RequestError(field, f"expected a list of up to {most} tokens (parameter max_tokens), got {shown(given)}")
    if not given:
        return []
    if context.vocabulary is None:
        raise RequestError(field, "the tokens of the model are not known here")
    vocabulary = context.vocabulary
    return [read_token(token, vocabulary, f"{field}[{number}]") for number, token in enumerate(given)]


def _readable(model: ModelInfo) -> list[Site]:
    """Return the sites whose rows are where the model's head is."""
    first = model.first_head_layer
    return [site for site in model.sites if site.hook is HookPoint.POST_MLP and site.layer >= first]


class LensReduction(HeadReduction):
    """From transported rows to the outputs of `_Outputs`: for all layers at once.

    Args:
        layout: Places of the outputs.
    """

    def __init__(self, layout: _Outputs) -> None:
        self.layout = layout

    def with_head(self, device: torch.device, head: ModelHead) -> Callable[..., Tensor]:
        """See `HeadReduction.with_head`."""
        check_ids(head.vocab_size, "lens: the vocabulary")
        words, sums_of = _words(head, device), _block_sums(device)
        most = max(1, _LOGITS // head.vocab_size)

        def reduce(rows_ND: Tensor, arguments: RowArguments) -> Tensor:
            found = torch.full((len(rows_ND), self.layout.size), -torch.inf, dtype=torch.float32, device=device)
            normed = head.norm(rows_ND)
            size = -(-len(rows_ND) // -(-len(rows_ND) // most))  # no small piece at the end: each reads the whole head
            for start in range(0, len(rows_ND), size):
                stop = min(start + size, len(rows_ND))
                own = RowArguments(arguments.host[start:stop], arguments.device[start:stop])
                _reduce(head.logits(normed[start:stop]), own, words, self.layout, found[start:stop], sums_of)
            return found

        return reduce


def _words(head: ModelHead, device: torch.device) -> Tensor | None:
    """The mask of word-like tokens, bool ``[V]``; None without a tokenizer."""
    if not head.vocabulary.has_texts:
        return None
    mask = torch.zeros(head.vocab_size, dtype=torch.bool)
    known = torch.from_numpy(word_like(head.vocabulary))[: head.vocab_size]
    mask[: len(known)] = known
    return mask.to(device)


class LensReadout(HeadReadout):
    """Reads the rows after one layer by lenses.

    Outputs of a row are those of `_Outputs`, and its arguments the number of its lens, whether words alone are ranked,
    how many tokens are wanted, and the tokens. Where a request wants fewer tokens, the others' outputs are undefined.
    All are NaN where the row is not finite.

    Args:
        layer: The layer.
        lenses: By number, from 1 on; None for those without a matrix of this layer.
        reduction: What all layers share.
    """

    def __init__(self, layer: int, lenses: Sequence[Lens | None], reduction: LensReduction) -> None:
        self._layer = layer
        self._lenses = tuple(lenses)
        self._reduction = reduction

    @property
    def num_outputs(self) -> int:
        """See `_Outputs`."""
        return self._reduction.layout.size

    @property
    def num_arguments(self) -> int:
        """The first three, and the tokens."""
        return _FIRST_TOKEN + self._reduction.layout.tokens

    @property
    def key(self) -> str:
        """The checksums of the lenses, with spaces between; ``-`` of those without this layer."""
        return " ".join(["identity", *("-" if lens is None else lens.sha256 for lens in self._lenses)])

    @property
    def reduction(self) -> LensReduction:
        """See `HeadReadout.reduction`."""
        return self._reduction

    def transport(self, device: torch.device) -> Callable[..., Tensor]:
        """See `HeadReadout.transport`."""
        maps = [None if lens is None else _Map.of(lens, self._layer, device) for lens in self._lenses]
        return partial(_transported, maps=maps)


@dataclass(frozen=True)
class _Map:
    """The map of a lens after one layer, on a device.

    Attributes:
        matrix_DD: In the dtype of its file.
        bias_D: Float32.
        is_added: Whether its result is added to the row.
    """

    matrix_DD: Tensor
    bias_D: Tensor | None
    is_added: bool

    @classmethod
    def of(cls, lens: Lens, layer: int, device: torch.device) -> _Map:
        bias = lens.bias(layer)
        return cls(
            torch.from_numpy(lens.matrix(layer)).to(device),
            None if bias is None else torch.from_numpy(bias).to(device),
            lens.kind is LensKind.TUNED,
        )

    def __call__(self, rows_ND: Tensor) -> Tensor:
        """Map float32 rows; the matrix is widened a part at a time."""
        starts = range(0, len(self.matrix_DD), _MATRIX_ROWS)
        found = torch.cat([rows_ND @ self.matrix_DD[at : at + _MATRIX_ROWS].float().T for at in starts], dim=1)
        if self.bias_D is not None:
            found += self.bias_D
        return found + rows_ND if self.is_added else found


def _transported(rows_ND: Tensor, arguments: RowArguments, maps: Sequence[_Map | None]) -> Tensor:
    """Apply to each row the map of its lens; rows of the logit lens stay exact."""
    wanted = sorted({int(number) for number in arguments.host[:, _LENS] if number > 0})
    if not wanted:
        return rows_ND
    narrow, found = rows_ND.float(), rows_ND
    for number in wanted:
        if (one := maps[number - 1]) is not None:
            chosen = arguments.device[:, _LENS, None] == number
            found = torch.where(chosen, one(narrow).to(found.dtype), found)
    return found


BlockSums = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Makes the largest logits of blocks of `LOGITS_OF_BLOCK` of logits ``[N, V]``, and the sums of their exponentials."""
LOGITS_OF_BLOCK = 128


def _block_sums(device: torch.device) -> BlockSums | None:
    """Find the kernel that reads logits once, on GPUs, where a pass over them takes long; None elsewhere."""
    if device.type != "cuda":
        return None
    from headgate.consumers.kernels.block_sums import BLOCK, block_sums  # needs Triton

    assert BLOCK == LOGITS_OF_BLOCK  # noqa: S101
    return block_sums


def strongest(logits_NV: Tensor, maxima_NB: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return what ``logits_NV.topk(count)`` returns, from the largest logits of blocks and the strongest blocks alone.

    No other block can have one of the strongest logits: the chosen ones have at least as many as large.
    """
    num_logits = logits_NV.shape[1]
    if 4 * count * LOGITS_OF_BLOCK > num_logits:
        return logits_NV.topk(count, dim=1)
    blocks = maxima_NB.topk(count, dim=1, sorted=False).indices
    ids = (blocks[:, :, None] * LOGITS_OF_BLOCK + torch.arange(LOGITS_OF_BLOCK, device=blocks.device)).flatten(1)
    if num_logits % LOGITS_OF_BLOCK:  # the last block is shorter
        is_out, ids = ids >= num_logits, ids.clamp(max=num_logits - 1)
        values, at = logits_NV.gather(1, ids).masked_fill_(is_out, -torch.inf).topk(count, dim=1)
    else:
        values, at = logits_NV.gather(1, ids).topk(count, dim=1)
    return values, ids.gather(1, at)


def _reduce(
    logits_NV: Tensor,
    arguments: RowArguments,
    words: Tensor | None,
    layout: _Outputs,
    out: Tensor,
    sums_of: BlockSums | None,
) -> None:
    """Write the outputs of some rows into `out`, which is -inf: NaN for rows that are not finite, and log-probabilities
    of -inf after the tokens that can be ranked, which may be fewer than are wanted.

    Nothing is launched for what no row wants: each launch takes the step thread some microseconds.
    """
    ids_NK, logprobs_NK, given_NT, ranks_NT = layout.split(out)
    maxima_NB = None
    if sums_of is None:
        total_N1 = torch.logsumexp(logits_NV, dim=1, keepdim=True)
    else:
        maxima_NB, sums_NB = sums_of(logits_NV)
        largest_N1 = maxima_NB.amax(dim=1, keepdim=True)
        total_N1 = largest_N1 + (sums_NB * (maxima_NB - largest_N1).exp()).sum(dim=1, keepdim=True).log()
    tokens = int((arguments.host[:, _FIRST_TOKEN:] >= 0).sum(axis=1).max(initial=0))
    values = None
    if tokens:
        named = arguments.device[:, _FIRST_TOKEN : _FIRST_TOKEN + tokens].clamp(0, logits_NV.shape[1] - 1)
        values = logits_NV.gather(1, named)
    if words is not None and (arguments.host[:, _WORDS] > 0).any():
        logits_NV.masked_fill_((arguments.device[:, _WORDS, None] > 0) & ~words, -torch.inf)
        maxima_NB = None if sums_of is None else sums_of(logits_NV)[0]
    if values is not None:
        for number in range(tokens):
            torch.sum(logits_NV > values[:, number, None], dim=1, out=ranks_NT[:, number])
        torch.sub(values, total_N1, out=given_NT[:, :tokens])
    top = min(max(int(arguments.host[:, _TOP].max()), 0), ids_NK.shape[1], logits_NV.shape[1])
    if top:
        values, ids = logits_NV.topk(top, dim=1) if maxima_NB is None else strongest(logits_NV, maxima_NB, top)
        ids_NK[:, :top] = ids
        torch.sub(values, total_N1, out=logprobs_NK[:, :top])
    out += total_N1 - total_N1  # NaN where the row is not finite, else 0


class LensConsumer(StreamingConsumer):
    """Answers with what a lens reads at each position; `LensParams` lists the parameters.

    A request asks with ``{"lens": NAME, "layers": [...], "positions": SELECTOR, "top": K, "tokens": [...],
    "words_only": false}``; all are optional. The payload is ``{"lens", "positions", "layers": {"12": {"ids", "tokens",
    "logprobs", "token_logprobs", "token_ranks"}}}``: lists with one row for each position. Rows of ``ids``, their texts
    ``tokens`` and ``logprobs`` are in falling order; rows of ``token_logprobs`` and ``token_ranks`` in the order of the
    request's tokens. Ranks begin at 0. Log-probabilities are over the whole vocabulary, also with ``words_only``, which
    limits the ranking to tokens of letters alone. The first three rows are shorter where fewer tokens can be ranked,
    and empty where the row is not finite; a number of a given token is None there.

    Raises:
        ConfigError: If a lens cannot be read, or is of another model.
    """

    location = "driver"
    is_awaited = True
    sends_parts = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        self._settings = parse_params(params)
        self._running: dict[str, _Reading] = {}

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def join_parts(cls, parts: Sequence[Any]) -> Any:
        return join_rows(parts)

    @classmethod
    def offers(cls, params: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        return {LENS: [LOGIT, *params.get("lenses", ())]}  # no file is read for each call

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def readouts(cls, params: Mapping[str, Any], model: ModelInfo) -> dict[Site, Readout]:
        settings = parse_params(params)
        for name, lens in settings.lenses.items():
            try:
                lens.check(model.hidden_size, model.num_layers)
            except LensError as error:
                raise ConfigError(f"lens: lenses.{name}: {error}") from error
        sites = _readable(model)
        if not sites:
            first = f" of layer {model.first_head_layer} or later" if model.first_head_layer else ""
            raise ConfigError(f"lens: reads post_mlp{first}, which is not captured here; add it to capture.sites")
        reduction = LensReduction(settings.layout)
        return {
            site: LensReadout(
                site.layer,
                [lens if site.layer in lens.layers else None for lens in settings.lenses.values()],
                reduction,
            )
            for site in sites
        }

    @classmethod
    def named_outputs(cls, spec: CaptureSpec, context: SpecContext) -> dict[str, OutputColumns]:
        """``ids`` and ``logprobs`` of the strongest tokens, ``token_logprobs`` and ``token_ranks`` of the given ones.

        Where fewer tokens can be ranked, the ``logprobs`` are -inf.
        """
        layout = context.parsed_params(parse_params).layout
        top, count = spec.options[TOP], len(spec.options[TOKENS])
        starts = (0, layout.top, 2 * layout.top, 2 * layout.top + layout.tokens)
        return {
            "ids": OutputColumns(starts[0], starts[0] + top, "int64"),
            "logprobs": OutputColumns(starts[1], starts[1] + top),
            "token_logprobs": OutputColumns(starts[2], starts[2] + count),
            "token_ranks": OutputColumns(starts[3], starts[3] + count, "int64"),
        }

    def begin(self, request: RequestInfo) -> None:
        name, number = request.spec.options[LENS], request.spec.arguments[_LENS]
        for site, facts in request.readouts.items():
            computed = facts.key.split()[number]
            if number and computed != request.spec.options["sha256"]:
                raise ConsumerError(
                    f"lens {name!r}: its file has changed at {site.name} since the engine started; restart the engine"
                )
        self._running[request.request_id] = _Reading(self._settings, request.spec, self.context.vocabulary)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        streamed: dict[str, RequestInfo] = {}
        self._look_up(blocks)
        for block in blocks:
            for span in block.spans:
                request, part = span.request, slice(span.start, span.stop)
                self._running[request.request_id].add(block.sites, block.positions[part], block.rows[:, part].numpy())
                if request.is_streamed:
                    streamed[request.request_id] = request
        for request_id, request in streamed.items():  # a request's layers may come in several blocks
            for num_rows, payload in self._running[request_id].take_new():
                self.send_part(request, payload, num_rows)

    def _look_up(self, blocks: Sequence[RowBlock]) -> None:
        """Let the vocabulary know the texts of tokens while the request runs, not while its client waits for the end.

        A tokenizer takes longer for a text than all else that a row costs. Streamed rows are encoded at once anyway.
        """
        vocabulary = self.context.vocabulary
        if vocabulary is None or not vocabulary.has_texts:
            return
        for block in blocks:
            ids = self._settings.layout.split(block.rows.numpy())[0]
            for span in block.spans:
                if not span.request.is_streamed:
                    own = ids[:, span.start : span.stop, : span.request.spec.options[TOP]]
                    for token in np.unique(own[np.isfinite(own)]).tolist():
                        vocabulary.shown(int(token))

    def finish(self, finished: FinishedRequest) -> dict[str, Any]:
        reading = self._running.pop(finished.request.request_id)
        if reading.is_full:
            raise ConsumerError(
                f"these are more tokens than a result may hold here, {self._settings.params.max_values} (parameter "
                "max_values): positions times layers times tokens; ask for fewer"
            )
        return reading.payload(finished.final.num_rows)

    def abandon(self, request: RequestInfo) -> None:
        self._running.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        self._running.clear()


_Part = tuple[tuple[Site, ...], Int64Array, npt.NDArray[np.float32]]
"""Sites, positions and outputs ``[sites, positions, P]``."""


class _Reading:
    """The outputs of one request so far.

    Attributes:
        is_full: It was more than a result may hold, and is thrown away.

    Args:
        settings: Of the consumer.
        spec: The request's.
        vocabulary: Has the texts of tokens; None if they are not known.
    """

    def __init__(self, settings: _Settings, spec: CaptureSpec, vocabulary: Vocabulary | None) -> None:
        self.is_full = False
        self._settings = settings
        self._spec = spec
        self._text_of = None if vocabulary is None or not vocabulary.has_texts else vocabulary.shown
        self._num_tokens: int = spec.options[TOP] + len(spec.options[TOKENS])
        self._left = settings.params.max_values
        self._parts: list[_Part] = []
        self._num_taken = 0
        self._sent = StreamedParts()

    def add(self, sites: Sequence[Site], positions: Int64Array, rows: npt.NDArray[np.float32]) -> None:
        """Take outputs ``[S, n, P]`` at some positions."""
        self._left -= rows.shape[0] * rows.shape[1] * self._num_tokens
        self.is_full = self.is_full or self._left < 0
        if self.is_full:
            self._parts.clear()
            self._sent.drop()
            return
        self._parts.append((tuple(sites), positions.copy(), rows.copy()))

    def take_new(self) -> Iterator[tuple[int, Any]]:
        """Return what `StreamedParts.encode` does for rows added since the last call, at positions of every layer."""
        parts = self._parts[self._num_taken :]
        self._num_taken = len(self._parts)
        sites, positions, rows = self._joined(parts)
        if len(sites) < len(self._spec.sites):
            positions = positions[:0]
        if len(positions) * len(self._spec.sites) != sum(len(part[0]) * len(part[1]) for part in parts):
            self._sent.drop()
        num_values = len(self._spec.sites) * self._num_tokens
        return self._sent.encode(
            positions, num_values, lambda part: self._payload(sites, positions[part], rows[:, part])
        )

    def payload(self, num_rows: int) -> dict[str, Any]:
        """The payload of the positions below `num_rows` that every layer has; JSON if it went out with a stream."""
        whole: dict[str, Any] | None = self._sent.whole(num_rows)
        if whole is not None:
            return whole
        sites, positions, rows = self._joined(self._parts)
        is_kept = positions < num_rows
        return self._payload(sites, positions[is_kept], rows[:, is_kept])

    def _joined(self, parts: Sequence[_Part]) -> _Part:
        """Return the outputs of all parts at the positions that every site of theirs has."""
        if not parts:
            return (), np.empty(0, np.int64), np.empty((0, 0, self._settings.layout.size), np.float32)
        if all(part[0] == parts[0][0] for part in parts):  # almost always: no row was lost
            sites, positions, rows = parts[0]
            if len(parts) > 1:
                positions = np.concatenate([part[1] for part in parts])
                rows = np.concatenate([part[2] for part in parts], axis=1)
            return sites, positions, rows
        of_site = {site: self._rows_of(site, parts) for part in parts for site in part[0]}
        common = reduce(partial(np.intersect1d, assume_unique=True), (found[0] for found in of_site.values()))
        chosen = [found[np.searchsorted(positions, common)] for positions, found in of_site.values()]
        return tuple(of_site), common, np.stack(chosen)

    def _rows_of(self, site: Site, parts: Sequence[_Part]) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        own = [(positions, rows[sites.index(site)]) for sites, positions, rows in parts if site in sites]
        return np.concatenate([positions for positions, _ in own]), np.concatenate([rows for _, rows in own])

    def _payload(self, sites: Sequence[Site], positions: Int64Array, rows: npt.NDArray[np.float32]) -> dict[str, Any]:
        """The payload of some rows ``[sites, positions, P]``: of all layers at once."""
        ids, logprobs, given, ranks = self._settings.layout.split(rows)
        top, count = self._spec.options[TOP], len(self._spec.options[TOKENS])
        ids, logprobs = ids[..., :top], logprobs[..., :top]
        ids = np.where(np.isfinite(ids), ids, 0).astype(np.int64)  # a fifth of the time of `nan_to_num`
        tokens = np.full(ids.shape, None).tolist() if self._text_of is None else _texts(ids, self._text_of)
        is_ranked = logprobs > -np.inf
        found = {
            "ids": _cut(ids.tolist(), is_ranked),
            "tokens": _cut(tokens, is_ranked),
            "logprobs": _cut(logprobs.tolist(), is_ranked),
            "token_logprobs": _listed(given[..., :count]),
            "token_ranks": _listed(ranks[..., :count], int),
        }
        order = sorted(range(len(sites)), key=lambda number: sites[number].layer)
        layers = {str(sites[at].layer): {name: of_all[at] for name, of_all in found.items()} for at in order}
        return {LENS: self._spec.options[LENS], "positions": positions.tolist(), "layers": layers}


def _texts(ids: Int64Array, text_of: Callable[[int], str]) -> list[list[list[str]]]:
    """Return the texts of ids, which are looked up once each: a lens reads the same few tokens again and again."""
    different, places = np.unique(ids, return_inverse=True)
    texts = np.array([text_of(one) for one in different.tolist()], dtype=object)
    found: list[list[list[str]]] = texts[places].reshape(ids.shape).tolist()
    return found


def _cut(layers: list[list[list[Any]]], is_ranked: npt.NDArray[np.bool_]) -> list[list[list[Any]]]:
    """Return the first entries of each row of each layer: as many as are ranked."""
    if is_ranked.all():
        return layers
    counts = is_ranked.sum(axis=2).tolist()
    return [
        [row[:count] for row, count in zip(rows, of_rows, strict=True)]
        for rows, of_rows in zip(layers, counts, strict=True)
    ]


def _listed(values: Any, kind: type[int | float] = float) -> list[list[list[int | float | None]]]:
    """Return the rows of values of each layer as lists; None for one that is not finite: JSON has no NaN."""
    is_finite = np.isfinite(values)
    listed = np.where(is_finite, values, 0).astype(kind)
    if not is_finite.all():
        listed = listed.astype(object)
        listed[~is_finite] = None
    found: list[list[list[int | float | None]]] = listed.tolist()
    return found
