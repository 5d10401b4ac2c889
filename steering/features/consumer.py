"""The consumer that answers each request with the features of an SAE that its rows activate.

The worker encodes the rows on its device (`FeaturesReadout`); ids and activations of features travel, and no row does.
Shapes: n rows, F features, D width of the rows, M features that a row can return, A ids that a request can give.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from pybase64 import b64decode, b64encode
from safetensors.numpy import load, save

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import (
    MAX_ARGUMENTS,
    MAX_OUTPUTS,
    ConsumerContext,
    FinishedRequest,
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
    select_sites,
)
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError, finite, shown
from headgate.capture.schema.results import StreamedParts, join_rows
from headgate.capture.schema.sites import Site, site_map
from headgate.capture.schema.spec import CaptureSpec
from headgate.steering.features.importing import SaeSource, open_coder, sae_site
from headgate.steering.features.labels import Labels, labels_of
from headgate.steering.features.source_coder import CoderKind, Norm
from headgate.steering.features.sparse_coder import LAYER_NORM_EPSILON, SparseCoder
from headgate.steering.features.tensors import FeatureFileError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK_BYTES = 12 << 20
"""Size of the activations that a readout computes at a time, as float32; three arrays of that size live at once."""

FIELDS = ("sae", "positions", "top", "features", "above", "encoding")
ENCODING, LISTS, BINARY = "encoding", "lists", "binary"
DEFAULT_TOP = 20


class FeaturesParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the consumer.

    Attributes:
        saes: Files of SAEs by name, each ``PATH`` or ``PATH@SITE``, for requests to choose from. Transcoders are
            encoded where they read. Each takes ``4 * features * width`` bytes of the worker's device memory; on a GPU,
            of a model in bfloat16, 6 if its file is in float32, and 2 if it is in bfloat16 (`DeviceEncoder`).
        top: Largest number of features that a request can get of each row.
        max_values: Largest number of activations in the result of one sample: positions times features.
    """

    saes: dict[str, str]
    top: int = 32
    max_values: int = 262_144


@lru_cache(maxsize=256)
def _open(name: str, source: str) -> SparseCoder:
    """The SAE of a source, as it was when this process first asked for it."""
    path, site = SaeSource.parse(source)
    coder = open_coder(path, name=name, site=site)
    sae_site(coder)
    return coder


def parse_params(params: Mapping[str, Any]) -> tuple[FeaturesParams, dict[str, SparseCoder]]:
    """Read and check the parameters; and the SAEs by name, each with a read site.

    Raises:
        ConfigError: Naming the parameter.
    """
    parsed = read_params(FeaturesParams, params, "features", max_values=1)
    if not parsed.saes:
        raise ConfigError('features: saes: name at least one, {"gs20": "gs20.safetensors"}')
    most = min(MAX_OUTPUTS // 2, MAX_ARGUMENTS - 1)
    if not 1 <= parsed.top <= most:
        raise ConfigError(f"features: top must be from 1 to {most}, got {parsed.top}")
    coders = {}
    for name, source in parsed.saes.items():
        try:
            coders[name] = _open(name, source)
            labels_of(coders[name].path)
        except (OSError, FeatureFileError) as error:
            raise ConfigError(f"features: saes.{name}: {error}") from error
        check_ids(coders[name].num_features, f"features: saes.{name}")
    return parsed, coders


def _by_site(coders: Mapping[str, SparseCoder]) -> dict[Site, list[str]]:
    """Names of the SAEs of each site, in the order of the configuration."""
    found: defaultdict[Site, list[str]] = defaultdict(list)
    for name, coder in coders.items():
        found[sae_site(coder)].append(name)
    return dict(found)


def parse_request(raw: object, context: SpecContext) -> CaptureSpec:
    """Check ``{"sae": NAME, "positions": SELECTOR, "top": N, "above": T, "encoding": "lists" or "binary"}``.

    There can be ``"features"`` in place of ``top`` and ``above``.

    Returns:
        The spec, whose options are ``sae``, ``top`` and ``above``, or ``sae`` and ``features``, and ``encoding`` unless
        it is lists. Arguments of the readout are the SAE's place among those of its site, and the given features.

    Raises:
        RequestError: Naming the field; also if the server cannot capture the site of the SAE.
    """
    params, coders = context.parsed_params(parse_params)
    raw = check_fields(raw, context, FIELDS, 'such as {"sae": NAME}')
    name = _name(raw, coders, f"{context.field}.sae")
    coder = coders[name]
    encoding = raw.get(ENCODING, LISTS)
    if encoding not in (LISTS, BINARY):
        raise RequestError(f"{context.field}.{ENCODING}", f"expected {LISTS!r} or {BINARY!r}, got {shown(encoding)}")
    options: dict[str, Any] = {"sae": name} if encoding == LISTS else {"sae": name, ENCODING: encoding}
    features: tuple[int, ...] = ()
    if raw.get("features") is not None:
        features = _features(raw, coder, params.top, context.field)
        options["features"] = list(features)
    else:
        options["top"] = _top(raw.get("top"), params.top, f"{context.field}.top")
        options["above"] = _above(raw.get("above"), f"{context.field}.above")
    site = sae_site(coder)
    return CaptureSpec(
        sites=select_sites(site_map([site]), context),
        positions=parse_selector(raw, context),
        options=options,
        arguments=(_by_site(coders)[site].index(name), *features),
    )


def _name(raw: Mapping[str, Any], coders: Mapping[str, SparseCoder], field: str) -> str:
    name = raw.get("sae", next(iter(coders)) if len(coders) == 1 else None)
    if not isinstance(name, str) or name not in coders:
        known = ", ".join(sorted(coders))
        raise RequestError(field, f"expected the name of an SAE of this consumer, got {shown(name)}; known: {known}")
    return name


def _features(raw: Mapping[str, Any], coder: SparseCoder, most: int, field: str) -> tuple[int, ...]:
    if (other := next((key for key in ("top", "above") if raw.get(key) is not None), None)) is not None:
        raise RequestError(f"{field}.{other}", "expected either this or features: given features are returned as given")
    given = raw["features"]
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise RequestError(
            f"{field}.features", f"expected a list of 1 to {most} ids (parameter top), got {shown(given)}"
        )
    for place, one in enumerate(given):
        if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < coder.num_features:
            raise RequestError(
                f"{field}.features[{place}]",
                f"SAE {coder.name!r} has the features 0 to {coder.num_features - 1}, got {shown(one)}",
            )
    if len(set(given)) < len(given):
        raise RequestError(f"{field}.features", f"expected each feature once, got {shown(given)}")
    return tuple(given)


def _top(given: object, most: int, field: str) -> int:
    if given is None:
        return min(DEFAULT_TOP, most)
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= most:
        raise RequestError(field, f"expected a whole number from 1 to {most} (parameter top), got {shown(given)}")
    return given


def _above(given: object, field: str) -> float:
    if given is None:
        return 0.0
    if (found := finite(given)) is None or found < 0:
        raise RequestError(field, f"expected a number of at least 0, got {shown(given)}")
    return found


class FeaturesReadout(Readout):
    """Features of rows, by one of several SAEs that read at one site.

    Arguments of a row are the place of its SAE, then ids of features. With ids, the outputs of a row begin with M
    zeros and go on with the activations of these features, in their order. Without, they are the ids of the M strongest
    features of the row, strongest first, and then their activations: 0 where fewer are active. Activations are NaN
    where the row is not finite. A feature that the SAE's kind does not select has the activation 0.

    Args:
        coders: At least one, of one site and width.
        top: M, and A.
        dtype: Of the site's rows.
    """

    def __init__(self, coders: Sequence[SparseCoder], top: int, dtype: str = "float32") -> None:
        self._coders = tuple(coders)
        self._top = top
        self._dtype = dtype

    @property
    def num_outputs(self) -> int:
        """``2 * M``."""
        return 2 * self._top

    @property
    def num_arguments(self) -> int:
        """``1 + A``."""
        return 1 + self._top

    @property
    def key(self) -> str:
        """The checksums of the SAEs' sources, in their order, with spaces between."""
        return key_of(self._coders)

    def on(self, device: torch.device) -> Callable[..., Tensor]:
        """See `Readout.on`."""
        import torch

        is_narrow = device.type == "cuda" and self._dtype == "bfloat16"
        encoders = [DeviceEncoder(coder, device, are_rows_narrow=is_narrow) for coder in self._coders]
        top = self._top

        def features(rows: Tensor, arguments: RowArguments) -> Tensor:
            places = np.maximum(arguments.host[:, 0], 0)
            found = rows.new_zeros(len(rows), 2 * top, dtype=torch.float32)
            for place in np.unique(places):
                outputs = encoders[place].features(rows, arguments, top)
                is_mine = (arguments.device[:, :1].clamp(min=0) == int(place)) | (len(encoders) == 1)
                found = torch.where(is_mine, outputs, found)
            is_finite = rows.isfinite().all(dim=1, keepdim=True)
            found[:, top:] = torch.where(is_finite, found[:, top:], torch.nan)
            return found

        return features


def key_of(coders: Sequence[SparseCoder]) -> str:
    """Return the key of a `FeaturesReadout`."""
    return " ".join(coder.source_sha256 for coder in coders)


class _Strongest(NamedTuple):
    """Activations ``[n, m]`` and ids ``[n, m]`` of features, the largest activations first."""

    values: Tensor
    ids: Tensor

    def merged(self, other: _Strongest, count: int) -> _Strongest:
        """Return the strongest of both, at most `count`."""
        import torch

        values = torch.cat((self.values, other.values), dim=1)
        values, at = values.topk(min(count, values.shape[1]), dim=1)
        return _Strongest(values, torch.cat((self.ids, other.ids), dim=1).gather(1, at))


class DeviceEncoder:
    """The encoder of an SAE on a device, in float32: `SparseCoder.encode` by blocks of features.

    Rows of bfloat16 are multiplied as such, with accumulation in float32, several times as fast as rows of float32: a
    weight in float32 is the sum of three in bfloat16 (of two or one, if the file is in float16 or bfloat16), which are
    columns of one matrix.

    Args:
        coder: The SAE.
        device: Where rows are.
        are_rows_narrow: Whether rows are of bfloat16. SAEs that norm their rows multiply them in float32 all the same.

    Raises:
        FeatureFileError: If its files cannot be read.
    """

    def __init__(self, coder: SparseCoder, device: torch.device, *, are_rows_narrow: bool = False) -> None:
        import torch

        self._coder = coder
        is_split = are_rows_narrow and coder.norm is Norm.NONE
        self._num_parts, dtype = (_NUM_PARTS, torch.bfloat16) if is_split else (1, torch.float32)
        width = self._num_parts * coder.width
        self._encoder_FD = torch.empty(coder.num_features, width, device=device, dtype=dtype)
        self._numbers_4F = torch.empty(4, coder.num_features, device=device)
        for block in coder.weights.blocks():
            encoder, *numbers = coder.weights.encoding(block, np.float32)
            weights = torch.from_numpy(encoder).to(device)
            self._encoder_FD[block] = _split(weights) if is_split else weights
            self._numbers_4F[:, block] = torch.from_numpy(np.stack(numbers)).to(device)
        while self._num_parts > 1 and not self._encoder_FD[:, width - coder.width : width].any():
            self._num_parts, width = self._num_parts - 1, width - coder.width
        self._encoder_FD = self._encoder_FD[:, :width].contiguous()
        self._group = coder.num_features // coder.k if coder.kind is CoderKind.GROUPMAX and coder.k else 1

    def features(self, rows: Tensor, arguments: RowArguments, top: int) -> Tensor:
        """Return what `FeaturesReadout` returns, as if all rows asked for this SAE, and all were finite.

        Args:
            rows: Float64 ``[n, D]``.
            arguments: The rows'.
            top: M.
        """
        import torch

        given, x = arguments.device[:, 1:], self._normed(rows)
        has_features = arguments.host[:, 1] >= 0
        outputs = rows.new_zeros(len(rows), 2 * top, dtype=torch.float32)
        if has_features.all() and not self._coder.kind.selects:
            outputs[:, top:] = self._of_few(x, arguments)
            return outputs
        values, strongest = self._of_all(x, given if has_features.any() else None, top)
        count = min(top, strongest.ids.shape[1])
        outputs[:, :count], outputs[:, top : top + count] = strongest.ids[:, :count], strongest.values[:, :count]
        if values is None:
            return outputs
        if self._coder.kind is CoderKind.TOPK:
            # By their ids: an activation may be as large as the k-th one and not be selected.
            selected = strongest.ids.sort(dim=1).values
            at = torch.searchsorted(selected, given.contiguous()).clamp_(max=selected.shape[1] - 1)
            values = torch.where(selected.gather(1, at) == given, values, 0)
        is_given = given[:, :1] >= 0
        outputs[:, :top] = torch.where(is_given, 0, outputs[:, :top])
        outputs[:, top:] = torch.where(is_given, values, outputs[:, top:])
        return outputs

    def _of_few(self, x: Tensor, arguments: RowArguments) -> Tensor:
        """Activations ``[n, A]`` of given features, from their own rows alone; not for kinds that select."""
        import torch

        # Rows of other SAEs of the site are here too, whose features may be beyond this one's.
        known = np.clip(arguments.host[:, 1:], 0, self._coder.num_features - 1)
        wanted, places = np.unique(known, return_inverse=True)
        index, at = (_uploaded(each, x.device) for each in (wanted, places.reshape(len(x), -1)))
        numbers = self._numbers_4F.index_select(1, index)
        activations = self._activations(x, self._encoder_FD.index_select(0, index), numbers)
        return torch.where(arguments.device[:, 1:] >= 0, activations.gather(1, at), 0)

    def _of_all(self, x: Tensor, given: Tensor | None, top: int) -> tuple[Tensor | None, _Strongest]:
        """Activations ``[n, A]`` of given features before top-k selects; and the strongest features.

        There are at least k of the latter for top-k, and else at most `top`.
        """
        import torch

        num_features, k = self._coder.num_features, self._coder.k
        count = min(num_features, k if self._coder.kind is CoderKind.TOPK and k else top)
        values = None if given is None else x.new_zeros(given.shape, dtype=torch.float32)
        none = x.new_zeros(len(x), 0, dtype=torch.float32)
        strongest = _Strongest(none, none.long())
        for start in range(0, num_features, size := self._block(len(x))):
            stop = min(start + size, num_features)
            a = self._activations(x, self._encoder_FD[start:stop], self._numbers_4F[:, start:stop])
            if values is not None and given is not None:
                is_here = (given >= start) & (given < stop)
                here = a.gather(1, (given - start).clamp(0, stop - start - 1))
                values = torch.where(is_here, here, values)
            found, at = a.topk(min(count, stop - start), dim=1)
            strongest = strongest.merged(_Strongest(found, at + start), count)
        return values, strongest

    def _block(self, num_rows: int) -> int:
        """Features of a block: whole groups."""
        size = max(256, BLOCK_BYTES // (4 * max(num_rows, 1)))
        return -(-size // self._group) * self._group

    def _normed(self, rows: Tensor) -> Tensor:
        """Rows as the encoder reads them: of its dtype, as often side by side as it has parts."""
        norm = self._coder.norm
        if norm is Norm.LAYER_NORM:
            rows = rows - rows.mean(dim=1, keepdim=True)
            rows = rows / (rows.std(dim=1, keepdim=True) + LAYER_NORM_EPSILON)
        if norm is Norm.CONSTANT_NORM_RESCALE:
            gain = rows.square().mean(dim=1, keepdim=True).sqrt()
            rows = (rows / gain).nan_to_num(nan=0.0)
        return rows.to(self._encoder_FD.dtype).repeat(1, self._num_parts)

    def _activations(self, x: Tensor, encoder: Tensor, numbers: Tensor) -> Tensor:
        """Activations ``[n, f]`` of some features; of `CoderKind.TOPK` those before the selection."""
        bias, threshold, scale, shift = numbers
        p = _product(x, encoder)
        is_off = None if self._coder.kind.selects else p + bias <= threshold
        a = p.mul_(scale).add_(shift).clamp_(min=0)
        if is_off is not None:
            return a.masked_fill_(is_off, 0)
        if self._coder.kind is CoderKind.GROUPMAX:
            groups = a.view(len(a), -1, self._group)
            largest, at = groups.max(dim=2, keepdim=True)
            groups.zero_().scatter_(2, at, largest)
        return a


_NUM_PARTS = 3
"""Numbers of bfloat16 whose sum is a number of float32: of 8 bits each, it has 24."""


def _split(weights: Tensor) -> Tensor:
    """Return bfloat16 ``[n, 3 * D]``: three parts whose sum is exactly the float32 weights ``[n, D]``."""
    import torch

    parts, left = [], weights
    for _ in range(_NUM_PARTS):
        parts.append(left.bfloat16())
        left = left - parts[-1].float()
    return torch.cat(parts, dim=1)


def _product(x: Tensor, encoder: Tensor) -> Tensor:
    """Return the product of rows and features, accumulated in float32."""
    import torch

    if x.dtype is torch.float32:
        return x @ encoder.T
    if x.is_cuda:
        found: Tensor = torch.mm(x, encoder.T, out_dtype=torch.float32)
        return found
    return x.float() @ encoder.float().T


def _uploaded(values: Int64Array, device: torch.device) -> Tensor:
    """Bring indices to the device without waiting for it."""
    import torch

    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class FeaturesConsumer(StreamingConsumer):
    """Answers with features of each row; `FeaturesParams` lists the parameters.

    The payload is ``{"sae": NAME, "positions": [...], "ids": [[...]], "values": [[...]], "labels": {ID: TEXT}}``. The
    lists of each position are its strongest active features, strongest first: at most ``top`` of them, with activations
    larger than ``above``; or the ``features`` of the request, in their order, active or not. They are None where the
    row is not finite. Labels are those of ``headgate sae labels``, of the features in the payload.

    With ``"encoding": "binary"``, ``ids`` and ``values`` are ``{"format": "safetensors", "num_bytes", "data": base64}``
    instead: int32 and float32 ``[positions, top]``, -1 and 0 where fewer features are active, NaN where a row is not
    finite. Of an answer that is not streamed, it takes a server a tenth of the time that lists take.

    A request asks with ``{"sae": NAME, "positions": SELECTOR, "top": N, "above": T}`` or ``{"sae": NAME, "features":
    [ID, ...]}``, and waits for its result. In a stream, the payloads of chunks have the positions that are new. The
    worker encodes rows in float32, and selects as the SAE's kind does.

    Raises:
        ConfigError: If an SAE cannot be read, has no site, is of another width than the rows of its site, or this site
            cannot be captured.
    """

    location = "driver"
    is_awaited = True
    sends_parts = True

    def __init__(self, params: Mapping[str, Any], context: ConsumerContext) -> None:
        super().__init__(params, context)
        settings, self._coders = parse_params(params)
        self._top, self._max_values = settings.top, settings.max_values
        self._keys = {
            site: key_of([self._coders[name] for name in names])
            for site, names in _checked_sites(self._coders, context.model).items()
        }
        self._running: dict[str, _RequestFeatures] = {}

    @classmethod
    def check_params(cls, params: Mapping[str, Any]) -> None:
        parse_params(params)

    @classmethod
    def join_parts(cls, parts: Sequence[Any]) -> Any:
        return _join(parts)

    @classmethod
    def offers(cls, params: Mapping[str, Any]) -> Mapping[str, Sequence[str]]:
        return {"sae": list(params["saes"])}

    @classmethod
    def validate_client_spec(cls, raw: object, context: SpecContext) -> CaptureSpec:
        return parse_request(raw, context)

    @classmethod
    def readouts(cls, params: Mapping[str, Any], model: ModelInfo) -> dict[Site, Readout]:
        settings, coders = parse_params(params)
        names_at = _checked_sites(coders, model)
        return {
            site: FeaturesReadout([coders[name] for name in names], settings.top, model.shape(site).dtype)
            for site, names in names_at.items()
        }

    @classmethod
    def named_outputs(cls, spec: CaptureSpec, context: SpecContext) -> dict[str, OutputColumns]:
        """``ids`` and ``values`` of the strongest features, or ``values`` of the given ones, in their order.

        Where fewer features are active, values are 0, and the ids beside them have no meaning.
        """
        for name, default in (("above", 0.0), (ENCODING, LISTS)):
            if spec.options.get(name, default) != default:
                raise RequestError(f"{context.field}.{name}", "files hold all that was read; choose when you read them")
        top, given = context.parsed_params(parse_params)[0].top, spec.options.get("features")
        count = spec.options["top"] if given is None else len(given)
        values = {"values": OutputColumns(top, top + count)}
        return values if given is not None else {"ids": OutputColumns(0, count, "int64"), **values}

    def begin(self, request: RequestInfo) -> None:
        for site in request.spec.sites:
            facts = request.readouts.get(site)
            if facts is None or facts.key != self._keys[site]:
                raise ConsumerError(
                    f"the file of an SAE at {site.name} has changed since the engine started; restart it to use it"
                )
        options = request.spec.options
        labels = labels_of(self._coders[options["sae"]].path)
        self._running[request.request_id] = _RequestFeatures(options, labels, self._top, self._max_values)

    def write(self, blocks: Sequence[RowBlock]) -> None:
        for block in blocks:
            for number, site in enumerate(block.sites):
                rows = block.rows[number].numpy()
                for span in block.spans:
                    request, part = span.request, slice(span.start, span.stop)
                    if site in request.spec.sites:
                        found = self._running[request.request_id]
                        found.add(block.positions[part], rows[part])
                        if request.is_streamed:
                            for num_rows, payload in found.take_new():
                                self.send_part(request, payload, num_rows)

    def finish(self, finished: FinishedRequest) -> dict[str, Any]:
        found = self._running.pop(finished.request.request_id)
        if found.is_full:
            raise ConsumerError(
                f"these activations are more than a result may hold here, {self._max_values} (parameter max_values); "
                "ask for fewer positions or features"
            )
        return found.payload(finished.final.num_rows)

    def abandon(self, request: RequestInfo) -> None:
        self._running.pop(request.request_id, None)

    def close(self, timeout_s: float) -> None:
        self._running.clear()


class _RequestFeatures:
    """Positions and outputs of one request so far.

    Attributes:
        is_full: They were more than `max_values` activations, and are thrown away.

    Args:
        options: Of the request's spec.
        labels: Of the SAE's features.
        top: M.
        max_values: Upper limit.
    """

    def __init__(self, options: Mapping[str, Any], labels: Labels, top: int, max_values: int) -> None:
        self.is_full = False
        self._sae: str = options["sae"]
        self._labels = labels
        self._is_binary = options.get(ENCODING) == BINARY
        self._sent = StreamedParts(_join)
        if self._is_binary:
            self._sent.drop()  # what clients get is made of arrays
        self._given: list[int] | None = options.get("features")
        self._above: float = options.get("above", 0.0)
        self._count: int = options.get("top", 0) if self._given is None else len(self._given)
        self._top = top
        self._left = max_values
        self._parts: list[tuple[Int64Array, npt.NDArray[np.float32]]] = []

    def add(self, positions: Int64Array, outputs: npt.NDArray[np.float32]) -> None:
        """Add the outputs ``[n, 2 * M]`` of some rows."""
        self._left -= len(positions) * self._count
        if self._left < 0:
            self.is_full = True
            self._parts.clear()
            self._sent.drop()
        if not self.is_full:
            ids, values = outputs[:, : self._count], outputs[:, self._top : self._top + self._count]
            # Copies: slices would keep the rows of every request of the block.
            self._parts.append((positions.copy(), np.stack((ids, values))))

    def take_new(self) -> Iterator[tuple[int, Any]]:
        """Return what `StreamedParts.encode` does for the rows that were added last."""
        if self.is_full:
            return iter(())
        positions, outputs = self._parts[-1]
        return self._sent.encode(positions, self._count, lambda part: self._payload(positions[part], outputs[:, part]))

    def payload(self, num_rows: int) -> dict[str, Any]:
        """The payload of the rows at positions below `num_rows`; lists are JSON if they went out with a stream."""
        whole: dict[str, Any] | None = self._sent.whole(num_rows)
        if whole is not None:
            return whole
        positions, outputs = self._joined()
        order = np.argsort(positions, kind="stable")
        order = order[positions[order] < num_rows]
        return self._payload(positions[order], outputs[:, order])

    def _joined(self) -> tuple[Int64Array, npt.NDArray[np.float32]]:
        positions = np.concatenate([np.empty(0, np.int64), *(part for part, _ in self._parts)])
        nothing = np.empty((2, 0, self._count), np.float32)
        return positions, np.concatenate([nothing, *(part for _, part in self._parts)], axis=1)

    def _payload(self, positions: Int64Array, outputs: npt.NDArray[np.float32]) -> dict[str, Any]:
        head = {"sae": self._sae, "positions": positions.tolist()}
        if self._is_binary:
            found, values = self._arrays(*outputs)
            data = save({"ids": np.ascontiguousarray(found), "values": np.ascontiguousarray(values)})
            head |= {"format": "safetensors", "num_bytes": len(data), "data": b64encode(data).decode("ascii")}
            named = np.unique(found[found >= 0]).tolist() if self._labels else ()
        else:
            head["ids"], head["values"] = ids, _ = self._listed(*outputs)
            named = {one for row in ids if row is not None for one in row} if self._labels else ()
        return {**head, "labels": self._labels.of(named)}

    def _arrays(
        self, ids: npt.NDArray[np.float32], values: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and activations as arrays ``[n, count]``: -1 and 0 where fewer are active, NaN where a row is no number.

        Activations are as `_listed` lists them.
        """
        if self._given is not None:
            return np.tile(np.array(self._given, np.int32), (len(values), 1)), values
        is_kept = values > self._above
        kept = np.where(is_kept, _whole(ids), -1).astype(np.int32)
        return kept, np.where(is_kept | np.isnan(values), values, np.float32(0))

    def _listed(
        self, ids: npt.NDArray[np.float32], values: npt.NDArray[np.float32]
    ) -> tuple[list[list[int] | None], list[list[float] | None]]:
        """Lists of ids and of activations, both from ``[n, count]``; None of rows that are not finite: JSON has no NaN.

        All rows become lists at once, and are cut then: activations fall along a row.
        """
        if self._given is None:
            counts, listed = (values > self._above).sum(axis=1).tolist(), _whole(ids).tolist()
        else:
            counts, listed = [self._count] * len(values), [list(self._given) for _ in values]
        is_sound: list[bool] = np.all(np.isfinite(values), axis=1).tolist()
        if all(is_sound) and min(counts, default=self._count) == self._count:
            return listed, values.tolist()
        rows = list(zip(listed, values.tolist(), counts, is_sound, strict=True))
        return (
            [row[:count] if sound else None for row, _, count, sound in rows],
            [numbers[:count] if sound else None for _, numbers, count, sound in rows],
        )


def _join(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join encoded payloads of one request, by position."""
    joined: dict[str, Any] = join_rows([{**part, "labels": None} for part in parts])
    labels = {one: text for part in parts for one, text in part["labels"].items()}
    joined["labels"] = {one: labels[one] for one in sorted(labels, key=int)}
    if "data" in joined:
        arrays = [load(b64decode(part["data"])) for part in parts]
        data = save({name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]})
        joined |= {"num_bytes": len(data), "data": b64encode(data).decode("ascii")}
    return joined


def _whole(ids: npt.NDArray[np.float32]) -> Int64Array:
    """Return ids as integers, 0 of what is none."""
    return np.where(np.isfinite(ids), ids, 0).astype(np.int64)


def _checked_sites(coders: Mapping[str, SparseCoder], model: ModelInfo) -> dict[Site, list[str]]:
    found = _by_site(coders)
    for site, names in found.items():
        for name in names:
            _check(coders[name], site, model)
    return found


def _check(coder: SparseCoder, site: Site, model: ModelInfo) -> None:
    model.check_captured(site, f"features: saes.{coder.name}")
    if coder.width != (width := model.shape(site).width):
        raise ConfigError(
            f"features: saes.{coder.name}: reads rows of {coder.width} values; the model has {width} at {site.name}"
        )
