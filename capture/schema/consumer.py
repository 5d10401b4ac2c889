"""The contract of a capture consumer, and what it is handed.

A consumer is a class published under the entry-point group ``vllm.capture_consumers``. Subclass

* `BatchedConsumer` to get each finished request once, with all its rows, or
* `StreamingConsumer` to get rows as they arrive, step by step.

Threads: `validate_client_spec` runs in the front end, on the event loop, and must be quick. Everything else of one
instance runs on one thread of its own, in order, so a slow consumer holds up no other. Whatever it raises ends
the request it was working for with an error and nothing else.

A consumer that does slow work on threads of its own returns a `concurrent.futures.Future` in place of the payload:
the request's result is reported when it completes, with its exception as the error, and the consumer's thread goes
on meanwhile. `CaptureConsumer.close` completes every future that was handed out.

A consumer's class may declare readouts (`CaptureConsumer.readouts`): functions of a site's rows whose outputs travel in
place of the rows. Each worker makes them at its start and computes them on its own device, after the forward and
outside of its graphs.
"""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headgate.capture.schema.batch import FinalState, Int64Array
from headgate.capture.schema.config import Location
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError, check_keys, shown
from headgate.capture.schema.positions import MAX_POSITION, parse_positions
from headgate.capture.schema.results import Origin
from headgate.capture.schema.sites import (
    COLUMN_KEYS,
    Columns,
    HookPoint,
    Site,
    SiteShape,
    parse_columns,
    parse_configured,
    sort_sites,
    width_of,
)
from headgate.capture.schema.spec import CaptureSpec, Memo
from headgate.capture.schema.vocabulary import Vocabulary

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


class ActionSink(Protocol):
    """Takes the actions of one consumer. Any thread."""

    def submit(self, action: object) -> bool:
        """Have the engine do something to a request that runs, soon; see `headgate.steering.controllers.actions`.

        Nothing is waited for. At most `MAX_SUBMITTED` actions of a consumer are on their way; one that comes beyond
        that is dropped, and counted.

        Returns:
            Whether it was taken. The request's trace and ``/metrics`` show the outcome.

        Raises:
            ConsumerError: If this engine takes no actions, or `action` is none.
        """
        ...


MAX_SUBMITTED = 1024
MAX_BYTES = 16 << 20
"""The largest encoded size of one action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionTarget:
    """Where the actions of an engine's consumers go.

    Attributes:
        address: Of the inbox of its engine core; None if it takes none.
        refusal: Why it takes none; raised when one is submitted.
    """

    address: str | None = None
    refusal: str = "no engine is behind this consumer"


NOWHERE = ActionTarget()


class NoActions:
    """An `ActionSink` that refuses.

    Args:
        refusal: The reason.
    """

    def __init__(self, refusal: str = NOWHERE.refusal) -> None:
        self._refusal = refusal

    def submit(self, action: object) -> bool:
        """See `ActionSink`."""
        raise ConsumerError(f"steering.submit: {self._refusal}")


class Submitted(NamedTuple):
    """An action that came to an engine core.

    Attributes:
        consumer: Instance name of the consumer.
        action: As `encode_action` made it.
        num_dropped: Actions of that consumer that were dropped before it.
    """

    consumer: str
    action: bytes
    num_dropped: int


MakeSink = Callable[[str], ActionSink]
"""Makes the sink of a consumer, by its instance name."""


def encode_action(action: object) -> bytes:
    """Return an action as msgpack: the name of its class, and its fields.

    Arrays and tensors become lists of numbers.

    Raises:
        ConsumerError: If it is no action, or has something in it that cannot be sent, or is too large.
    """
    if not dataclasses.is_dataclass(action) or isinstance(action, type):
        raise ConsumerError(
            f"steering.submit: expected an action of headgate.steering.controllers, got {type(action).__name__}"
        )
    fields = {field.name: getattr(action, field.name) for field in dataclasses.fields(action)}
    try:
        encoded = msgspec.msgpack.encode([type(action).__name__, fields], enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConsumerError(f"steering.submit: {type(action).__name__} cannot be sent: {error}") from error
    if len(encoded) > MAX_BYTES:
        raise ConsumerError(
            f"steering.submit: {type(action).__name__} takes {len(encoded)} bytes, at most {MAX_BYTES} may; register "
            "its vectors as a module, and name that"
        )
    return encoded


def _plain(value: Any) -> Any:
    if hasattr(value, "detach"):  # a tensor, on whatever device
        value = value.detach()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is neither plain nor an array")


MAX_OUTPUTS = 1 << 16
"""Outputs of a readout, at most."""
OUTPUT_BYTES = 4
"""Each output travels as a float32."""
MAX_OUTPUT_ID = 1 << 24
"""Integers below this travel exactly as float32: ids of tokens or features may be outputs. See `check_ids`."""
MAX_SELECTIONS = 1 << 10
"""Entries of a list of hook points, at most."""
NO_COLUMNS: Mapping[Site, Columns] = {}
"""Stands for whole rows."""
MAX_ARGUMENTS = 1 << 10
"""Arguments of a readout, at most."""


def check_ids(count: int, what: str) -> None:
    """Refuse a readout whose outputs are to be ids that a float32 does not hold exactly.

    Args:
        count: How many ids there are; they begin at 0.
        what: Names them, for the error.

    Raises:
        ConfigError: If there are more than `MAX_OUTPUT_ID`.
    """
    if count > MAX_OUTPUT_ID:
        raise ConfigError(f"{what}: {count} ids; a readout can return ids below {MAX_OUTPUT_ID}, as float32")


class RowArguments(NamedTuple):
    """Arguments of each row that a readout gets, as its request gave them: ``A`` for each row.

    Attributes:
        host: int64 ``[n, A]``, to choose on the host what to launch.
        device: The same on the device of the rows.
    """

    host: Int64Array
    device: Tensor


class Readout(ABC):
    """A function of single rows: ``[hidden] -> [num_outputs]``.

    Its requests may give arguments, such as ids of tokens: set `num_arguments`, let the consumer's
    `CaptureConsumer.validate_client_spec` put them into `CaptureSpec.arguments`, and take them beside the rows. Outputs
    that are ids are exact as float32 if `check_ids` accepts them; how many of its outputs a request wants, such as the
    k of its top k, the consumer cuts when it gets them.
    """

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """Numbers that each row becomes, 1 to `MAX_OUTPUTS`."""

    @property
    def num_arguments(self) -> int:
        """Arguments that each row comes with, at most `MAX_ARGUMENTS`; 0: the function takes rows alone."""
        return 0

    @property
    @abstractmethod
    def key(self) -> str:
        """Names the function with its weights: equal for equal ones alone, such as a checksum.

        A consumer finds the key of the function that the worker really computes in `RequestInfo.readouts`.
        """

    @abstractmethod
    def on(self, device: torch.device) -> Callable[..., Tensor]:
        """Bring the weights to a device and return the function there.

        The function takes rows, float64 ``[n, hidden]`` on that device, which it must not keep or change, and returns
        floats ``[n, num_outputs]`` there; they travel as float32. With `num_arguments` it takes `RowArguments` as well:
        int64 ``[n, num_arguments]``, -1 where the row's request gave fewer.

        It is called on the engine's step thread, with the stream of the forward current: torch operations that only
        launch work, no copy to the host, nothing that waits for the device. Each row's outputs depend on that row and
        its arguments alone. `n` is at most some thousand, and what the function allocates is freed before the next
        call.
        """


class ModelHead(Protocol):
    """The model's own way from the residual stream to logits, on the device of a worker.

    ``head.logits(head.norm(rows))`` of the last layer's rows are the logits that the model samples from.

    Attributes:
        vocab_size: Number of logits.
        dtype: Of the model.
    """

    vocab_size: int
    dtype: torch.dtype

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens as texts; the first use may take seconds."""
        ...

    def norm(self, rows: Tensor) -> Tensor:
        """Apply the final norm to rows of the stream, ``[n, hidden]`` of any dtype; in the model's dtype."""
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """Return all logits, float32 ``[n, vocab_size]``, with the model's scale and soft cap: choose `n` for that."""
        ...


class HeadReduction(ABC):
    """Computes outputs with the model's own head, for all the readouts of a consumer that share it.

    It gets the rows of all their sites at once, so the weights of the head are read once for all of them.
    """

    @abstractmethod
    def with_head(self, device: torch.device, head: ModelHead) -> Callable[..., Tensor]:
        """Return the function that `Readout.on` describes, of rows that were transported. It is made once."""


class HeadReadout(Readout):
    """A readout that uses the model's own head: what is special to its site, ahead of a reduction that it shares."""

    @property
    @abstractmethod
    def reduction(self) -> HeadReduction:
        """Computes the outputs: one object for all sites whose rows are to be reduced together."""

    @abstractmethod
    def transport(self, device: torch.device) -> Callable[..., Tensor]:
        """Bring the weights of this site to a device and return the function ahead of the reduction.

        It takes what `Readout.on` describes, and returns rows ``[n, hidden]``: new ones, or all that it got.
        """

    def on(self, device: torch.device) -> Callable[..., Tensor]:
        """Not for this kind of readout."""
        raise TypeError(f"{type(self).__name__} needs the model's head: call transport, and its reduction's with_head")


class ReadoutFacts(NamedTuple):
    """The readout whose outputs a request's rows of a site are.

    Attributes:
        num_outputs: Numbers in each row, float32.
        key: See `Readout.key`; of the function that the worker computes.
        num_arguments: See `Readout.num_arguments`.
    """

    num_outputs: int
    key: str
    num_arguments: int = 0

    @property
    def shape(self) -> SiteShape:
        """The shape of the outputs of a row."""
        return SiteShape(self.num_outputs, "float32")


class OutputColumns(NamedTuple):
    """Some of the outputs of a readout.

    Attributes:
        start: The first.
        stop: The one after the last.
        dtype: What they are: ``float32``, or ``int64`` of ids, ranks and counts.
    """

    start: int
    stop: int
    dtype: Literal["float32", "int64"] = "float32"


class StoredOutputs(NamedTuple):
    """The result of one request that a consumer computed, in the form of the outputs of readouts.

    Attributes:
        positions: int64 ``[n]``, ascending.
        rows: float32 ``[n, width]`` by site, on the CPU; all sites have the same width.
        columns: Which of the columns have what, by name.
        shapes: Shapes of what has one: the columns of a name are its elements in order.
    """

    positions: Int64Array
    rows: Mapping[Site, Tensor]
    columns: dict[str, OutputColumns]
    shapes: dict[str, tuple[int, ...]]


class ReadoutSite(NamedTuple):
    """A site as one consumer gets it: read out by a function.

    Attributes:
        bit: The consumer's.
        site: Whose rows are read.
        facts: Of the function.
    """

    bit: int
    site: Site
    facts: ReadoutFacts


def by_consumer(readouts: Iterable[ReadoutSite]) -> dict[int, dict[Site, ReadoutFacts]]:
    """The readouts of each consumer that has any, by its bit, then by site."""
    found: dict[int, dict[Site, ReadoutFacts]] = {}
    for each in readouts:
        found.setdefault(each.bit, {})[each.site] = each.facts
    return found


Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The model being served, as far as capture is concerned.

    Attributes:
        name: As the operator gave it.
        num_layers: Decoder layers of the whole model, also under pipeline parallelism.
        hidden_size: Width of the residual stream.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: of the model, and of rows of the stream.
        sites: Sites that can be captured, as configured.
        context_length: Tokens of prompt and output that a request may have.
        shapes: The shape of each site of the model whose rows are not those of the stream; see `shape`.
        attention: What attention does, of each layer of this worker whose queries and keys can be captured; a text
            where `AttentionFacts` cannot say it. Empty elsewhere than in workers and their capture processes.
        has_drafts: Whether drafts of speculative decoding are verified; False in workers and capture processes.
        first_head_layer: The first layer of the last pipeline stage: a `HeadReadout` reads this layer and later ones.
    """

    name: str
    num_layers: int
    hidden_size: int
    dtype: str
    sites: tuple[Site, ...]
    context_length: int = MAX_POSITION + 1
    shapes: Mapping[Site, SiteShape] = field(default_factory=dict, repr=False, hash=False)
    attention: Mapping[int, AttentionFacts | str] = field(default_factory=dict, repr=False, hash=False)
    has_drafts: bool = False
    first_head_layer: int = 0

    @property
    def stream(self) -> SiteShape:
        """The shape of a row of the residual stream."""
        return SiteShape(self.hidden_size, self.dtype)

    def shape(self, site: Site, columns: Columns = ()) -> SiteShape:
        """Return the shape of a site's rows, or of some of their columns."""
        shape = self.shapes.get(site) or self.stream
        return shape._replace(width=width_of(columns, shape.width)) if columns else shape

    @property
    def stored_shapes(self) -> dict[Site, SiteShape]:
        """The shapes of sites whose rows have another width or dtype than those of the stream."""
        whole = {site: SiteShape(shape.width, shape.dtype) for site, shape in self.shapes.items()}
        return {site: shape for site, shape in whole.items() if shape != self.stream}

    def check_captured(self, site: Site, what: str) -> None:
        """Refuse a site that is not captured here.

        Raises:
            ConfigError: With `what` it is for.
        """
        if site not in self.sites:
            configured = ", ".join(one.name for one in self.sites[:5])
            raise ConfigError(
                f"{what}: its site {site.name} is not captured here, but {configured}, ...; add it to capture.sites"
            )

    def position_bytes(
        self,
        sites: Sequence[Site],
        readouts: Mapping[Site, ReadoutFacts] | None = None,
        columns: Mapping[Site, Columns] = NO_COLUMNS,
    ) -> int:
        """Return the bytes of one position at some sites: of a row at each, its columns, or its readout's outputs."""
        if not readouts and not self.shapes and not columns:
            return self.stream.row_bytes * len(sites)
        found = readouts or {}
        return sum(
            (found[site].shape if site in found else self.shape(site, columns.get(site, ()))).row_bytes
            for site in sites
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerContext:
    """Where an instance of a consumer lives.

    Attributes:
        instance_name: What requests call it.
        model: The model being served.
        pp_rank: Pipeline stage of this worker; it sees the sites of its own layers only. 0 in the driver.
        pp_size: Number of stages.
        versions: Of headgate, vllm and torch.
        steering: ``steering.submit(action)`` steers running requests, where the engine takes actions of consumers.
        vocabulary: The model's tokens; None in a worker, where no tokenizer is.
    """

    instance_name: str
    model: ModelInfo
    pp_rank: int = 0
    pp_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    steering: ActionSink = field(default_factory=NoActions, repr=False, compare=False)
    vocabulary: Vocabulary | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInfo:
    """One request as a consumer knows it.

    Attributes:
        request_id: Internal id, unique among running requests; with ``n > 1`` each sample has its own.
        client_request_id: The id that the client or vLLM's front end gave; shared by the samples of ``n > 1``.
        sample_index: Which of the ``n`` samples.
        num_samples: ``n``: how many requests share `client_request_id`.
        prompt_token_ids: int64 ``[num_prompt_tokens]``.
        spec: What the request wants of this consumer; the sites are those of this worker.
        readouts: Of those sites, the ones whose rows are outputs of a readout of the consumer's class.
        origin: Where its results go; of no use to consumers.
    """

    request_id: str
    client_request_id: str
    sample_index: int = 0
    num_samples: int = 1
    prompt_token_ids: Int64Array = field(repr=False)
    spec: CaptureSpec
    readouts: Mapping[Site, ReadoutFacts] = field(default_factory=dict, repr=False)
    origin: Origin | None = field(default=None, repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; positions below it are prefill, the others decode."""
        return len(self.prompt_token_ids)

    @property
    def is_streamed(self) -> bool:
        """Whether chunks of its answer take parts of its result; see `StreamingConsumer.send_part`."""
        return self.origin is not None and self.origin.is_streamed

    def shape(self, site: Site, model: ModelInfo) -> SiteShape:
        """Return the shape of its rows of a site: of the columns that it wants, or of outputs of a readout."""
        if site in self.readouts:
            return self.readouts[site].shape
        return model.shape(site, self.spec.columns.get(site, ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSpan:
    """Rows ``start : stop`` of a `RowBlock` belong to `request`."""

    request: RequestInfo
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Rows of one step: the same sites for every row. Read-only, and yours to keep.

    A request's rows arrive in ascending order of position, each position once. Its sites may be spread over
    several blocks of one `write`; every site then has the same positions, but for `CaptureSpec.hook_positions`.

    Attributes:
        sites: ``S`` sites.
        rows: ``[S, N, width]`` in the sites' dtype (`ModelInfo.shape`), on the CPU, or float32 ``[S, N, num_outputs]``
            of readouts. All sites of a block have rows of one shape, `RequestInfo.shape` of each of its requests.
        positions: int64 ``[N]``, absolute.
        spans: Whose rows these are, in order; together they cover ``0 : N``.
    """

    sites: tuple[Site, ...]
    rows: Tensor
    positions: Int64Array
    spans: tuple[RowSpan, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row at one site."""
        return self.rows.shape[2] * self.rows.element_size()


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRequest:
    """A request that got its last row.

    Attributes:
        request: The request.
        final: Its tokens and how it ended. Rows at positions ``>= final.num_rows`` were computed in vain (a step
            that was already under way when the request stopped) and must be discarded.
        dropped_rows: Rows that never reached the consumer because of overload.
    """

    request: RequestInfo
    final: FinalState
    dropped_rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedRequest(FinishedRequest):
    """A finished request with everything captured of it.

    Attributes:
        sites: In the order of the forward pass.
        rows: One tensor per site, ``[num_rows, width]`` in the site's dtype, on the CPU; as in `RowBlock`.
        positions: int64 ``[num_rows]``, ascending; the same for every site, but those of `hook_positions`.
        token_ids: int64 ``[num_rows]``: the token whose forward gave the row.
        hook_positions: The same as `positions`, of the sites of hook points for which the spec has others.
    """

    sites: tuple[Site, ...]
    rows: Mapping[Site, Tensor] = field(repr=False)
    positions: Int64Array = field(repr=False)
    token_ids: Int64Array = field(repr=False)
    hook_positions: Mapping[HookPoint, Int64Array] = field(default_factory=dict, repr=False)

    def positions_at(self, site: Site) -> Int64Array:
        """Return the positions of the rows of a site."""
        return self.hook_positions.get(site.hook, self.positions)

    @property
    def is_prefill(self) -> npt.NDArray[np.bool_]:
        """bool ``[num_rows]``: True where the row's token was part of the prompt."""
        return self.positions < self.final.num_prompt_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecContext:
    """The context in which `CaptureConsumer.validate_client_spec` checks a request.

    Attributes:
        instance_name: What the request calls the consumer.
        model: The model being served.
        params: The consumer's configured parameters.
        client_request_id: The request's id.
        field: Path of the spec in the client's document, for errors: ``capture.<instance>``.
        memo: What was parsed for the same call before.
        owner: Name of the key that the client has shown; None without keys, and where no client is.
        num_front_ends: API processes of the server: each has its own consumers of the location ``driver``.
        lasting: What was parsed of `params` and of other calls before, as long as this process serves.
        vocabulary: The model's tokens.
        takes_columns: `CaptureConsumer.takes_columns` of its class.
    """

    instance_name: str
    model: ModelInfo
    params: Mapping[str, Any]
    client_request_id: str
    memo: Memo = field(default_factory=Memo, repr=False, compare=False)
    owner: str | None = None
    num_front_ends: int = 1
    lasting: Memo = field(default_factory=Memo, repr=False, compare=False)
    vocabulary: Vocabulary | None = field(default=None, repr=False, compare=False)
    takes_columns: bool = False

    @property
    def field(self) -> str:
        """Where the spec stands in the request."""
        return f"capture.{self.instance_name}"

    def parsed_params(self, parse: Callable[[Mapping[str, Any]], Parsed]) -> Parsed:
        """Return ``parse(params)``, which is called for the first request only: every request asks, plain ones too.

        Args:
            parse: A function of a module: what it returned is known by its name there.
        """
        name = f"{parse.__module__}.{parse.__qualname__}"
        return self.lasting.parsed(self.params, name, lambda *_: parse(self.params))

    def parsed_once(self, raw: object, name: str, parse: Callable[[object, str], Parsed]) -> Parsed:
        """Return ``parse(raw, path)`` of the part `name` of a spec; what calls write alike is parsed once."""
        alike = partial(self.lasting.parsed_alike, parse=parse)
        return self.memo.parsed(raw, f"{self.field}.{name}", alike)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLengths:
    """How long a prompt and its answers may be.

    Attributes:
        num_prompt: Tokens of the prompt.
        max_tokens: Tokens that may be generated.
        num_samples: The request's ``n``.
    """

    num_prompt: int
    max_tokens: int
    num_samples: int

    @property
    def num_rows(self) -> int:
        """Positions that have a row, at most."""
        return self.num_prompt + self.max_tokens - 1


class CaptureConsumer(ABC):  # noqa: B024  (what is abstract differs between the two kinds below)
    """The base of every consumer; subclass `BatchedConsumer` or `StreamingConsumer`.

    Class attributes:
        location: ``"worker"``: in a capture process beside the engine's worker, once per pipeline stage; only the
            payload (JSON values) leaves it. ``"engine"``: the same on threads of the worker. ``"driver"``: in the
            process that owns the request, where live Python objects can be used; rows are sent there. The operator
            can move a worker's consumer there.
        reads_client_spec: False if requests cannot name it; it then works through `global_capture_spec` only.
        reads_positions: Whether its part of a request has the field ``positions``.
        takes_messages: It stores the boundaries of a chat's messages: if a request sets ``capture_messages``, the
            option ``messages`` of its spec lists ``{"role", "start", "stop"}`` of each, in positions of the prompt.
        takes_columns: Requests may select heads or columns of rows (`CaptureSpec.columns`): it reads the width of rows
            from `RequestInfo.shape`, and not from the model.
        takes_tag: Its specs have an option ``tag`` that decides where it writes; clients' keys can restrict it.
        is_awaited: Requests that name it wait for their results as if they had set ``capture_wait``, unless they set
            that to false.
        global_spec_param: The parameter without which `global_capture_spec` returns nothing; the method is not called
            if it is not set. None: the method is called for every request, if it is overridden.
        linger_s: Seconds that rows may wait for rows of the next steps, so that they arrive in fewer and larger blocks,
            which costs the engine less. The smallest value of a running request's consumers counts. The operator's
            ``capture.linger_s`` takes precedence.
        sends_parts: It gives chunks of streams their part of a running request's result; see
            `StreamingConsumer.send_part`.
        keeps_rows: It keeps the blocks themselves, or views of them, until a request ends. Where all consumers of a
            process do, many rows of one request come in a block of their own: they need no second copy then, and the
            block keeps no rows of others in memory.
    """

    location: ClassVar[Location] = "worker"
    reads_client_spec: ClassVar[bool] = True
    reads_positions: ClassVar[bool] = True
    takes_messages: ClassVar[bool] = False
    takes_columns: ClassVar[bool] = False
    takes_tag: ClassVar[bool] = False
    is_awaited: ClassVar[bool] = False
    global_spec_param: ClassVar[str | None] = None
    linger_s: ClassVar[float] = 0.05
    sends_parts: ClassVar[bool] = False
    keeps_rows: ClassVar[bool] = False

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        """Open the consumer. Check `params` in `check_params`, which also runs where no instance is made."""
        self.params = params
        self.context = context

    @classmethod
    def join_parts(cls, parts: Sequence[Any]) -> Any:
        """Return the payload of a chunk that takes several parts, by position; here the list of them.

        In the API server, on the event loop.
        """
        return list(parts)

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if the configured parameters are wrong. By default there are none.

        Runs in the front end and in the worker before anything is opened.
        """
        if params:
            raise ConfigError(f"{cls.__name__} takes no parameters, got {sorted(params)}")

    @classmethod
    def offers(cls, params: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        """Name what requests may choose from, by the field of a request that names it. By default nothing.

        ``GET /v1/capture/consumers`` reports it to clients, which get no parameters.

        Args:
            params: Checked ones.
        """
        return {}

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        """Check and resolve what a request wrote under ``capture[instance]``.

        By default: ``{"hooks": {hook: layers}, "positions": selector}``, `positions` being ``"all"`` if absent.

        Raises:
            RequestError: Naming the field; the client gets HTTP 400.
        """
        return parse_client_spec(raw, context, options=())

    @classmethod  # noqa: B027  (optional)
    def check_lengths(cls, spec: CaptureSpec, context: SpecContext, lengths: RequestLengths) -> None:
        """Check a request that names this consumer again, now that its prompt is known.

        Args:
            spec: As `validate_client_spec` returned it, resolved.
            context: Without the request's id.
            lengths: Of the request; this is not called while ``max_tokens`` is unknown.

        Raises:
            RequestError: Naming the field, if its result could be too large.
        """

    @classmethod
    def named_outputs(cls, spec: CaptureSpec, context: SpecContext) -> dict[str, OutputColumns]:
        """Name the outputs of its readouts that a request wants, for consumers that store them as they are.

        By default none, and nothing is stored.

        Args:
            spec: As `validate_client_spec` returned it.
            context: As it got it.

        Raises:
            RequestError: Naming a field that would change outputs after they were read.
        """
        return {}

    @classmethod
    def stored_outputs(cls, payload: Any) -> StoredOutputs:
        """Return what its payload has, for consumers that store it: those of classes without readouts that define it.

        Raises:
            NotImplementedError: By default: its outputs are those of its readouts; see `named_outputs`.
        """
        raise NotImplementedError

    @classmethod
    def own_names(cls, spec: CaptureSpec, context: SpecContext, num_samples: int) -> Sequence[str]:
        """Names that a request which names this consumer must have for itself, such as the paths of its files.

        Another request of the same front end that wants one of them is refused as long as this one runs.

        Args:
            spec: As `validate_client_spec` returned it.
            context: The same.
            num_samples: Samples of the request.

        Raises:
            RequestError: Naming the field, if one of them is taken for good: the request would run in vain.
        """
        return ()

    @classmethod
    def awaits(cls, spec: CaptureSpec) -> bool:
        """Whether a request with this spec waits for its result unless it says otherwise: `is_awaited` by default."""
        return cls.is_awaited

    @classmethod
    def global_capture_spec(cls, context: SpecContext) -> CaptureSpec | None:
        """Return the spec that applies to every request; None for nothing.

        By default that of a request with the parameters ``hooks`` and ``positions``, if `global_spec_param` is
        ``hooks``.
        """
        if cls.global_spec_param != "hooks" or (hooks := context.params.get("hooks")) is None:
            return None
        raw = {"hooks": hooks, "positions": context.params.get("positions", "all")}
        return cls.validate_client_spec(raw, replace(context, owner=None))  # the rows are the operator's

    @classmethod
    def readouts(cls, params: Mapping[str, Any], model: ModelInfo) -> Mapping[Site, Readout]:
        """Return functions for the worker's device, whose outputs replace the rows; `params` were checked.

        Raises:
            ConfigError: If one cannot be made: its file is not there, or does not fit the model.
        """
        return {}

    def close(self, timeout_s: float) -> None:  # noqa: B027  (optional)
        """Write out what is buffered and release everything, within `timeout_s` seconds."""


class BatchedConsumer(CaptureConsumer):
    """A consumer that gets each finished request once, whole."""

    linger_s = 0.25  # no row is looked at before the end

    @abstractmethod
    def on_capture(self, captured: CapturedRequest) -> Any:
        """Take one finished request; what is returned, or a future's result, becomes ``CaptureResult.payload``."""


SendPart = Callable[[RequestInfo, Any, int], None]
"""See `StreamingConsumer.send_part`."""


def send_nowhere(request: RequestInfo, payload: Any, num_rows: int) -> None:
    """Drop a part of a result: no stream takes it."""


class StreamingConsumer(CaptureConsumer):
    """A consumer that gets rows as they arrive. Calls for one request: `begin`, any `write`, `finish` or `abandon`.

    Attributes:
        send_part: ``send_part(request, payload, num_rows)`` gives a chunk of a stream a part of the result of a running
            request, of positions below `num_rows`, in JSON values. Any thread; it does not wait. Of use for requests
            with `RequestInfo.is_streamed`, and where the class has `sends_parts`. The payload at the end has everything
            again, since a part can get lost.
    """

    send_part: SendPart = staticmethod(send_nowhere)

    def begin(self, request: RequestInfo) -> None:
        """A request that captures for this consumer has begun."""

    @abstractmethod
    def write(self, blocks: Sequence[RowBlock]) -> None:
        """Take the rows of one step, of any number of requests."""

    @abstractmethod
    def finish(self, finished: FinishedRequest) -> Any:
        """The request ended and all its rows were written.

        Returns:
            ``CaptureResult.payload``, or a `concurrent.futures.Future` of it.
        """

    def abandon(self, request: RequestInfo) -> None:
        """The request failed after `begin` and will never be finished: release what is kept for it.

        Its result is an error already. This is called after a `begin` or `write` that raised, after a call that took
        too long, and if the end of the request is unknown.
        """


def read_params(kind: type[Parsed], params: Mapping[str, Any], consumer: str, **least: float) -> Parsed:
    """Read a consumer's parameters; where they may be paths, the class has texts.

    Args:
        kind: A class of msgspec.
        params: As configured.
        consumer: Its name, for errors.
        least: The smallest values of some numbers, by their names; None is no number.

    Raises:
        ConfigError: Naming the parameter.
    """
    try:
        parsed = msgspec.convert(_with_texts(params), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{consumer}: {error}") from error
    for name, smallest in least.items():
        if (value := getattr(parsed, name)) is not None and not value >= smallest:
            raise ConfigError(f"{consumer}: {name} must be at least {smallest}, got {value}")
    return parsed


def _with_texts(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _as_text(value) for name, value in params.items()}


def _as_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _with_texts(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def check_fields(raw: object, context: SpecContext, known: Sequence[str], example: str) -> Mapping[str, Any]:
    """Return what a request wrote for a consumer, if it is an object without unknown fields.

    Raises:
        RequestError: If it is not; the message has the `example`, or the `known` fields.
    """
    if not isinstance(raw, Mapping):
        raise RequestError(context.field, f"expected an object {example}, got {shown(raw)}")
    check_keys(raw, known, context.field, f"the consumer {context.instance_name!r}")
    return raw


def parse_selector(raw: Mapping[str, Any], context: SpecContext) -> Any:
    """Read the field ``positions`` of a spec; all positions if it has none."""
    parse = partial(parse_positions, context_length=context.model.context_length, takes_several=True)
    return context.parsed_once(raw.get("positions", "all"), "positions", parse)


def parse_client_spec(raw: object, context: SpecContext, *, options: Sequence[str]) -> CaptureSpec:
    """Read ``{"hooks": ..., "positions": ..., **options}``; consumers build their own validation on it.

    Args:
        raw: What the client wrote.
        context: Names the field and knows which sites can be captured.
        options: Further keys that the consumer accepts; passed through unchecked in ``CaptureSpec.options``.

    Raises:
        RequestError: On a wrong type, an unknown key or hook point, or a site that is not configured.
    """
    raw = check_fields(raw, context, ("hooks", "positions", *options), "with 'hooks'")
    if "hooks" not in raw:
        raise RequestError(f"{context.field}.hooks", "required: {hook point: layers}")
    sites, columns = context.parsed_once(raw["hooks"], "hooks", partial(_parse_hooks, model=context.model))
    if columns and not context.takes_columns:
        raise RequestError(
            f"{context.field}.hooks",
            f"the consumer {context.instance_name!r} reads whole rows: leave out heads, experts and columns",
        )
    return CaptureSpec(
        sites=sites,
        columns=columns,
        positions=parse_selector(raw, context),
        options={key: raw[key] for key in options if key in raw},
    )


def _parse_hooks(hooks: object, field: str, *, model: ModelInfo) -> tuple[tuple[Site, ...], dict[Site, Columns]]:
    """Resolve ``{hook: layers}``, or a list of ``{"hook", "layers"}``; each may select columns."""
    parse = partial(parse_configured, num_layers=model.num_layers, sites=model.sites)
    is_list = isinstance(hooks, list | tuple)
    if not is_list and not (isinstance(hooks, Mapping) and any(_selects(layers) for layers in hooks.values())):
        return parse(hooks, field), {}
    found: dict[Site, Columns] = {}
    for name, layers, given, where in _named_selections(hooks, field):
        for site in parse({name: layers}, where):
            columns = parse_columns(given, site, model.shape(site), where if is_list else f"{where}.{name}")
            if found.setdefault(site, columns) != columns:
                raise RequestError(where, f"{site.name} is selected twice, with other columns")
    return sort_sites(found), {site: columns for site, columns in found.items() if columns}


def _selects(layers: object) -> bool:
    return isinstance(layers, Mapping) and any(key in layers for key in COLUMN_KEYS)


def _named_selections(hooks: Any, field: str) -> Iterator[tuple[str, object, Mapping[str, Any], str]]:
    """Yield hook points with their layers, what may select columns, and the path."""
    if isinstance(hooks, Mapping):
        for name, layers in hooks.items():
            given = layers if _selects(layers) else {}
            yield name, _layers_of(layers) if given else layers, given, field
        return
    if not 0 < len(hooks) <= MAX_SELECTIONS:
        raise RequestError(field, f"expected 1 to {MAX_SELECTIONS} selections, got {len(hooks)}")
    for index, given in enumerate(hooks):
        where = f"{field}[{index}]"
        if not isinstance(given, Mapping) or not isinstance(given.get("hook"), str):
            raise RequestError(where, f'expected {{"hook", "layers", "heads"}}, got {shown(given)}')
        check_keys(given, ("hook", "layers", *COLUMN_KEYS), where, "a selection")
        yield given["hook"], given.get("layers"), given, where


def _layers_of(given: Mapping[str, Any]) -> object:
    """Return the layers of a selection of columns."""
    rest = {key: value for key, value in given.items() if key not in COLUMN_KEYS}
    return rest["layers"] if set(rest) == {"layers"} else rest or "all"


def select_sites(hooks: object, context: SpecContext) -> tuple[Site, ...]:
    """Resolve ``{hook: layers}``; ``"all"`` means every layer that is configured for that hook point.

    Raises:
        RequestError: Also if a site is not configured, naming the configured ones.
    """
    model = context.model
    parse = partial(parse_configured, num_layers=model.num_layers, sites=model.sites)
    return context.parsed_once(hooks, "hooks", parse)
