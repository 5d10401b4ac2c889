"""What is asked of a server or an engine: shapes, modes, and the vectors and bodies that go with them."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from tests.benchmarks.models import ModelSize
from tests.benchmarks.operations import HOLD, WATCH, encoded_gate, encoded_operations, encoded_vector
from tests.benchmarks.saes import FEATURES_OF, READ_TOP, SIZES, TOP_K, encoded_features

HOOKS = ("pre_attn", "post_attn", "post_mlp")
STRENGTH = 0.02
"""Standard deviation of a vector's elements."""
MODULE = "bench"
MODULE_CONFIG = 9999
JSON, MSGPACK = "application/json", "application/msgpack"

Form = Literal["list", "packed", "msgpack"]
Layers = Literal["one", "four", "all"]


class Shape(NamedTuple):
    """A workload.

    Attributes:
        in_flight: Requests that run at once: whenever one ends, the next is sent.
        requests: How many there are in all.
        prompt: Tokens of each prompt, all random: no prefix is shared.
        period: If above 0, a prompt repeats so many tokens, as text does whose continuation n-grams guess.
        tokens: Tokens that each generates; on average, if more requests are sent than run at once: they come and go
            one by one then. With equal lengths all of them would end, and the next ones begin, in the same step.
        share: If above 0, the loop is open: requests arrive by a Poisson process at this share of stock's capacity,
            however many run.
        rate: Requests per second that arrive in an open loop.
    """

    in_flight: int
    requests: int
    prompt: int
    tokens: int
    share: float = 0.0
    rate: float = 0.0
    period: int = 0

    @property
    def most_tokens(self) -> int:
        """What the longest request generates."""
        is_one_batch = self.requests <= self.in_flight and not self.share
        return self.tokens if is_one_batch else self.tokens + self.tokens // 2

    def at_capacity(self, requests_per_s: float, seconds: float) -> Shape:
        """An open loop for a server whose stock can serve `requests_per_s`, with arrivals for `seconds`."""
        rate = self.share * requests_per_s
        return self._replace(rate=rate, requests=max(1, round(rate * seconds)))

    def arrivals(self, seed: int) -> list[float]:
        """Seconds from the begin of an open loop to the arrival of each request; empty for a closed loop."""
        if not self.rate:
            return []
        rng = random.Random(f"arrivals {seed}")
        return list(accumulate(rng.expovariate(self.rate) for _ in range(self.requests)))

    def tokens_of(self, index: int) -> int:
        """What request number `index` generates: the same in every mode and round."""
        return random.Random(index).randint(2 * self.tokens - self.most_tokens, self.most_tokens)


SHAPES = {
    "chat": Shape(in_flight=16, requests=96, prompt=256, tokens=128),
    "repeats": Shape(in_flight=16, requests=96, prompt=256, tokens=128, period=32),
    "prefill": Shape(in_flight=16, requests=16, prompt=4096, tokens=1),
    "decode": Shape(in_flight=64, requests=64, prompt=128, tokens=1024),
    "decode-512": Shape(in_flight=64, requests=64, prompt=128, tokens=512),
    "crowd": Shape(in_flight=256, requests=512, prompt=256, tokens=128),
    **{f"open-{part}": Shape(256, 512, prompt=256, tokens=128, share=part / 100) for part in (50, 70, 90)},
    "small crowd": Shape(in_flight=256, requests=1024, prompt=32, tokens=32),
    "short": Shape(in_flight=16, requests=48, prompt=256, tokens=128),
    "tiny": Shape(in_flight=2, requests=4, prompt=24, tokens=4),
}
"""``chat`` is the landscape's, but for the lengths; ``repeats`` is that with prompts that repeat themselves, for n-gram
drafts; ``short`` is it in short turns, as ``decode-512`` is ``decode``;
``small crowd`` is for CPU milliseconds a request on a machine without a GPU (a tiny model, `--kv-gib 0`);
``tiny`` tries the benchmark."""


@dataclass(frozen=True)
class Mode:
    """How requests use a server.

    Attributes:
        needs: What the server must be configured for, of `servers.FEATURES`; nothing for any server.
        on: Name of the server, if it has to be a certain one.
        configs: Distinct sets of vectors, or of operations, that requests bring, in turns; 0: none.
        hooks: Hook points of vectors, at every layer.
        ops: Operations of each set, at every op site; 0: sets are of vectors.
        is_at_one_site: Whether vectors are those of one op site.
        is_gated: Whether a gate of each request turns them on.
        is_loop: Whether the gate's strength is a control loop.
        features: Features of each set, at one site; 0: sets are of something else.
        sae: Name of the SAE whose features they are.
        reads: Name of the SAE whose strongest features are read of each generated token; empty for none.
        reconstructs: Name of the SAE whose reconstructions all rows become; empty for none.
        form: How they are sent.
        is_named: Every request names the registered module instead.
        selects: Names of rules or controllers that every request selects.
        layers: Layers whose ``post_mlp`` every request captures; None: it captures nothing.
        positions: Of which positions.
        layout: Of the files.
        consumer: What captures: ``filesystem``, or one of `servers.OTHERS`; ``attention`` answers with patterns of all
            heads, ``lens`` with strongest tokens.
        top: Of patterns: how many keys of each query; None for whole rows. Of a lens: how many tokens.
    """

    needs: frozenset[str] = frozenset()
    on: str = ""
    configs: int = 0
    hooks: tuple[str, ...] = HOOKS
    ops: int = 0
    is_at_one_site: bool = False
    is_gated: bool = False
    is_loop: bool = False
    features: int = 0
    sae: str = FEATURES_OF
    reads: str = ""
    reconstructs: str = ""
    form: Form = "packed"
    is_named: bool = False
    selects: tuple[str, ...] = ()
    layers: Layers | None = None
    positions: str = "all"
    layout: str = "request"
    consumer: str = "filesystem"
    top: int | None = None

    @property
    def is_capturing(self) -> bool:
        """Whether its requests capture."""
        return self.layers is not None

    @property
    def is_for_engines(self) -> bool:
        """Whether it says something of an engine without a server: forms of bodies do not."""
        return self.form == "packed" and self.consumer == "filesystem"

    @property
    def is_usual(self) -> bool:
        """Whether it is something that most users do, not a part of it or another way, and needs no server for it."""
        return self.consumer == "filesystem" and self.needs <= {"steering", "capture"}

    def fields(self, size: ModelSize, tag: str) -> dict[str, Any]:
        """The fields of a request beside the usual ones, its files under `tag`; vectors are left to `Asked.body`."""
        found: dict[str, Any] = {"steering_name": MODULE} if self.is_named else {}
        if self.selects:
            found["steering_rules"] = list(self.selects)
        if self.reconstructs:
            found["sae_reconstruction"] = [self.reconstructs]
        if self.reads:
            found["capture"] = {"features": {"sae": self.reads, "positions": "all_generated", "top": READ_TOP}}
        if self.layers is not None and self.consumer in ("attention", "lens"):
            rows = {"queries" if self.consumer == "attention" else "positions": self.positions}
            found["capture"] = {self.consumer: {"layers": chosen(self.layers, size), "top": self.top, **rows}}
        elif self.layers is not None:
            spec = {"hooks": {"post_mlp": chosen(self.layers, size)}, "positions": self.positions}
            found["capture"] = {self.consumer: {**spec, "layout": self.layout, "tag": tag}}
        return found


def chosen(layers: Layers, size: ModelSize) -> Any:
    """The layers that are captured, as `hooks` takes them."""
    return {"all": "all", "one": [size.num_layers // 2], "four": size.four_layers}[layers]


_STEERING, _CAPTURE, _OPS = frozenset({"steering"}), frozenset({"capture"}), frozenset({"steering", "ops", "gates"})
_FEATURES, _NO_GATES = frozenset({"steering", "features"}), frozenset({"steering", "ops", "no gates"})
_CONTROLLERS = frozenset({"steering", "ops", "controllers"})
_ATTENTION, _LENS = _CAPTURE | {"attention"}, _CAPTURE | {"lens"}
_DEFAULTS = frozenset({"steering", "ops", "gates", "capture", "defaults"})
MODES: Mapping[str, Mode] = {
    "stock": Mode(on="stock"),
    "installed": Mode(on="installed"),
    "steering idle": Mode(_STEERING),
    "named": Mode(_STEERING, is_named=True),
    "shared list": Mode(_STEERING, configs=1, form="list"),
    "shared packed": Mode(_STEERING, configs=1),
    "shared msgpack": Mode(_STEERING, configs=1, form="msgpack"),
    "4 configs": Mode(_STEERING, configs=4),
    "16 configs": Mode(_STEERING, configs=16),
    "64 configs": Mode(_STEERING, configs=64),
    "256 configs": Mode(_STEERING, configs=256),
    "16 msgpack": Mode(_STEERING, configs=16, form="msgpack"),
    "256 msgpack": Mode(_STEERING, configs=256, form="msgpack"),
    "ops idle": Mode(_OPS),
    "gathered idle": Mode(_OPS | {"gathered"}),
    "4 ops": Mode(_OPS, configs=256, ops=4),
    "ops idle, no gates": Mode(_NO_GATES),
    "1 vector": Mode(_OPS, configs=256, is_at_one_site=True),
    "1 vector, no gates": Mode(_NO_GATES, configs=256, is_at_one_site=True),
    "controllers idle": Mode(_CONTROLLERS),
    "controllers watch": Mode(_CONTROLLERS, selects=(WATCH,)),
    "controllers hold": Mode(_CONTROLLERS, selects=(HOLD,)),
    "1 gate": Mode(_OPS, configs=256, is_gated=True),
    "1 loop": Mode(_OPS, configs=256, is_gated=True, is_loop=True),
    "defaults idle": Mode(_DEFAULTS),
    "vector shared": Mode(_OPS, configs=1, is_at_one_site=True),
    "ablation shared": Mode(_OPS, configs=1, ops=1),
    "64 configs, 34 sites": Mode(_DEFAULTS, configs=64, hooks=("post_mlp",)),
    "features idle": Mode(_FEATURES),
    "16 features": Mode(_FEATURES, configs=256, features=16),
    **{f"encode {name} idle": Mode(frozenset({"steering", f"encode {name}"})) for name in SIZES},
    **{
        name: Mode(frozenset({"steering", name}), reconstructs=name.split()[1])
        for name in map("encode {}".format, SIZES)
    },
    **{
        f"{name} edits": Mode(frozenset({"steering", f"encode {name}"}), configs=256, features=4, sae=name)
        for name in TOP_K
    },
    **{f"read {name} idle": Mode(frozenset({f"read {name}"})) for name in SIZES},
    **{f"read {name}": Mode(frozenset({f"read {name}"}), reads=name) for name in SIZES},
    "capture idle": Mode(_CAPTURE),
    "last_prompt": Mode(_CAPTURE, layers="one", positions="last_prompt"),
    "1 layer": Mode(_CAPTURE, layers="one"),
    "1 layer forgotten": Mode(_CAPTURE, layers="one", consumer="forget"),
    "1 layer cut": Mode(_CAPTURE, layers="one", consumer="cut"),
    "1 layer far": Mode(_CAPTURE, layers="one", consumer="far"),
    "4 layers": Mode(_CAPTURE, layers="four"),
    "all layers": Mode(_CAPTURE, layers="all"),
    "all layers, wide": Mode(_CAPTURE | {"wide"}, layers="all"),
    "all layers far": Mode(_CAPTURE, layers="all", consumer="far"),
    "all shards": Mode(_CAPTURE, layers="all", layout="shards"),
    "attention idle": Mode(_ATTENTION),
    "attention": Mode(_ATTENTION, layers="one", positions="all_generated", consumer="attention", top=32),
    "attention rows": Mode(_ATTENTION, layers="one", positions="all_generated", consumer="attention"),
    "lens": Mode(_LENS, layers="one", positions="all_generated", consumer="lens", top=10),
    "lens, 4 layers": Mode(_LENS, layers="four", positions="all_generated", consumer="lens", top=10),
    "both idle": Mode(_STEERING | _CAPTURE),
    "both": Mode(_STEERING | _CAPTURE, configs=16, layers="one"),
}
BASE = "stock"


@lru_cache(maxsize=300)
def vectors(config: int, size: ModelSize) -> dict[str, bytes]:
    """Vectors of one configuration for all layers, by hook point: little-endian bfloat16 ``[layers, hidden]``."""
    import torch

    rng, made = np.random.default_rng(config), {}
    for hook in HOOKS:
        rows = rng.normal(0, STRENGTH, (size.num_layers, size.hidden)).astype(np.float32)
        made[hook] = torch.from_numpy(rows).bfloat16().view(torch.uint16).numpy().tobytes()
    return made


def packed(config: int, size: ModelSize, *, as_text: bool = False) -> dict[str, Any]:
    """The vectors of `vectors` in the packed form."""
    about = {"dtype": "bfloat16", "shape": [*size[:2]], "layer_indices": list(range(size.num_layers))}
    return {
        hook: {**about, "data": base64.b64encode(data).decode() if as_text else data}
        for hook, data in vectors(config, size).items()
    }


def listed(config: int, size: ModelSize) -> dict[str, dict[str, list[float]]]:
    """The vectors of `vectors` as lists of numbers."""
    import torch

    made = {}
    for hook, data in vectors(config, size).items():
        rows = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(size.num_layers, size.hidden)
        made[hook] = {str(layer): row.tolist() for layer, row in enumerate(rows.float())}
    return made


@lru_cache(maxsize=300)
def encoded(config: int, size: ModelSize, form: Form, hooks: tuple[str, ...] = HOOKS) -> msgspec.Raw:
    """The vectors at `hooks` as a part of a body."""
    made = listed(config, size) if form == "list" else packed(config, size, as_text=form == "packed")
    given = {hook: made[hook] for hook in hooks}
    return msgspec.Raw((msgspec.msgpack if form == "msgpack" else msgspec.json).encode(given))


@dataclass(frozen=True)
class Asked:
    """All that a generator of load needs to make its bodies.

    Attributes:
        mode: How the requests use the server.
        shape: The workload.
        size: The model's.
        model: Its name on the server.
        seed: Of the prompts, and of which configurations are used first.
        extra: Other fields of every request.
    """

    mode: Mode
    shape: Shape
    size: ModelSize
    model: str
    seed: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, index: int) -> tuple[str, bytes]:
        """The media type and the bytes of request number `index`."""
        rng = random.Random(f"{self.seed}/{self.shape}/{index}")  # no prompt begins like one of another workload
        length, period = self.shape.prompt, self.shape.period or self.shape.prompt
        repeated = rng.choices(range(1000, self.size.vocabulary), k=period) * -(-length // period)
        made = {
            "model": self.model,
            "prompt": repeated[:length],
            "max_tokens": self.shape.tokens_of(index),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.mode.fields(self.size, f"run{self.seed}-{self.shape.requests}x{self.shape.prompt}"),
            **self.extra,
        }
        if self.mode.configs:
            config = (self.seed * self.shape.requests + index) % self.mode.configs
            if self.mode.ops:
                made["steering_ops"] = encoded_operations(config, self.size, self.mode.ops)
            elif self.mode.is_gated:
                made["steering_gates"] = encoded_gate(config, self.size, is_loop=self.mode.is_loop)
            elif self.mode.is_at_one_site:
                made["steering_vectors"] = encoded_vector(config, self.size)
            elif self.mode.features:
                made["steering_features"] = encoded_features(config, self.mode.features, self.mode.sae)
            else:
                made["steering_vectors"] = encoded(config, self.size, self.mode.form, self.mode.hooks)
        if self.mode.configs and self.mode.form == "msgpack":
            return MSGPACK, msgspec.msgpack.encode(made)
        return JSON, msgspec.json.encode(made)


def server_of(mode: Mode, servers: Mapping[str, frozenset[str]]) -> str | None:
    """The server that runs `mode`: the one that is configured for the least beyond what it needs; None if none can.

    Args:
        mode: The mode.
        servers: What each server is configured for.
    """
    if mode.on:
        return mode.on if mode.on in servers else None
    able = [name for name, has in servers.items() if mode.needs and mode.needs <= has]
    return min(able, key=lambda name: len(servers[name]), default=None)


def receiver(body: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """Return an ASGI receive callable of a client that sends `body` at once and stays connected."""
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def pick(names: Sequence[str], known: Mapping[str, Any], what: str) -> list[str]:
    """`names`, or all that is known.

    Raises:
        ValueError: If one is not known; the message names those that are.
    """
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"{what}: {', '.join(wrong)}: unknown; known: {', '.join(known)}")
    return list(names) or list(known)
