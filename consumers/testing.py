"""The contract of a consumer as a pytest class: subclass it, and its tests are yours.

::

    class TestMyConsumer(ConsumerContract):
        consumer_class = MyConsumer

        def check_payload(self, payload, expected):
            assert payload["mean"] == pytest.approx(expected.rows[SITE].float().mean().item())

`Feed` drives a consumer as headgate does, step by step and without threads, and serves for further tests of its own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor

from headgate.capture.schema.batch import Int64Array
from headgate.capture.schema.consumer import CaptureConsumer, CapturedRequest, ConsumerContext, ModelInfo, SpecContext
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.results import SupportsSummary
from headgate.capture.schema.sites import Site
from headgate.capture.schema.spec import CaptureSpec
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed

__all__ = ["EXAMPLE_MODEL", "ConsumerContract", "ExampleRequest", "Feed"]


class ConsumerContract(ABC):
    """Tests of what headgate relies on and of what users are promised; subclass it as ``Test...``.

    Class attributes:
        consumer_class: The consumer.
        model: The model it is given.
    """

    consumer_class: ClassVar[type[CaptureConsumer]]
    model: ClassVar[ModelInfo] = EXAMPLE_MODEL

    @abstractmethod
    def check_payload(self, payload: Any, expected: CapturedRequest) -> None:
        """Assert that `payload`, and whatever was written or stored, is right for a request with those rows."""

    def params(self, folder: Path) -> Mapping[str, Any]:
        """The consumer's parameters; `folder` is empty, and another one for each test."""
        return {}

    def client_spec(self) -> Any:
        """The spec of a request in these tests: every position and, if it can choose sites, two or more."""
        return {"hooks": {"post_mlp": [1, -1], "final_norm": "all"}, "positions": "all"}

    def bad_specs(self) -> Mapping[str, Any]:
        """Further specs that must be refused: the name of the field that is wrong -> spec."""
        return {}

    @pytest.fixture
    def context(self) -> ConsumerContext:
        """The context that the consumer is opened in."""
        return ConsumerContext(instance_name="mine", model=self.model, versions={"headgate": "test"})

    @pytest.fixture
    def spec_context(self, tmp_path: Path) -> SpecContext:
        """The context in which a spec is checked."""
        return SpecContext(
            instance_name="mine", model=self.model, params=self.params(tmp_path), client_request_id="client-request-1"
        )

    @pytest.fixture
    def feed(self, tmp_path: Path, context: ConsumerContext) -> Iterator[Feed]:
        """An open consumer; closed after the test."""
        feed = Feed(self.consumer_class(self.params(tmp_path), context))
        yield feed
        feed.consumer.close(TIMEOUT_S)

    def request(self, context: SpecContext, request_id: str = "request-1", **shape: Any) -> ExampleRequest:
        """A request of this consumer; `shape` as for `ExampleRequest`."""
        return ExampleRequest(self.spec(context, request_id), request_id, model=self.model, **shape)

    def spec(self, context: SpecContext, request_id: str) -> CaptureSpec:
        """The spec of a request of that id."""
        context = replace(context, client_request_id=f"client-{request_id}")
        if self.consumer_class.reads_client_spec:
            return self.consumer_class.validate_client_spec(self.client_spec(), context)
        spec = self.consumer_class.global_capture_spec(context)
        assert spec is not None, "a consumer that no request can name must have a global spec"
        return spec

    def test_a_whole_request_is_captured(self, feed: Feed, spec_context: SpecContext) -> None:
        request = self.request(spec_context)

        payload = feed.whole(request)

        self.check_payload(payload, request.expected())

    @pytest.mark.parametrize("chunk", [1, 3, 7])
    @pytest.mark.parametrize("sites_per_block", [None, 1, 2])
    def test_rows_in_pieces_make_the_same_request(
        self, feed: Feed, spec_context: SpecContext, chunk: int, sites_per_block: int | None
    ) -> None:
        request = self.request(spec_context, prompt=8, output=6)

        feed.begin(request)
        for start in range(0, request.final.num_rows, chunk):
            stop = min(start + chunk, request.final.num_rows)
            feed.step({request: (start, stop)}, sites_per_block=sites_per_block)
        payload = feed.finish(request)

        self.check_payload(payload, request.expected())

    def test_rows_past_the_end_are_left_out(self, feed: Feed, spec_context: SpecContext) -> None:
        request = self.request(spec_context)

        feed.begin(request)
        feed.step({request: (0, request.final.num_rows - 1)})
        feed.step({request: (request.final.num_rows - 1, request.final.num_rows + 3)})
        payload = feed.finish(request)

        self.check_payload(payload, request.expected())

    def test_requests_of_one_batch_are_kept_apart(self, feed: Feed, spec_context: SpecContext) -> None:
        early, middle, late = (
            self.request(spec_context, name, prompt=prompt) for name, prompt in (("a", 3), ("b", 6), ("c", 1))
        )

        feed.begin(early, middle)
        feed.step({middle: (0, 4), early: (0, 3)})
        feed.begin(late)
        feed.step({early: (3, early.final.num_rows), late: (0, 1), middle: (4, 6)})
        payloads = {early: feed.finish(early)}
        feed.step({middle: (6, middle.final.num_rows), late: (1, late.final.num_rows)})
        payloads |= {late: feed.finish(late), middle: feed.finish(middle)}

        for request, payload in payloads.items():
            self.check_payload(payload, request.expected())

    def test_an_aborted_request_may_have_no_rows(self, feed: Feed, spec_context: SpecContext) -> None:
        request = self.request(spec_context, prompt=5, output=0, status="abort")
        whole = request.expected()
        nothing = replace(
            whole,
            rows={site: rows[:0] for site, rows in whole.rows.items()},
            positions=whole.positions[:0],
            token_ids=whole.token_ids[:0],
        )

        feed.begin(request)
        payload = feed.finish(request)

        self.check_payload(payload, nothing)

    def test_a_request_that_is_abandoned_leaves_the_others_alone(self, feed: Feed, spec_context: SpecContext) -> None:
        abandoned, never_begun, other = (self.request(spec_context, name) for name in ("a", "b", "c"))

        feed.begin(abandoned, other)
        feed.step({abandoned: (0, 2), other: (0, 2)})
        feed.abandon(abandoned)
        feed.abandon(never_begun)
        feed.step({other: (2, other.final.num_rows)})
        payload = feed.finish(other)

        self.check_payload(payload, other.expected())

    def test_a_request_that_goes_wrong_does_not_spoil_the_next(self, feed: Feed, spec_context: SpecContext) -> None:
        """Rows of NaN, as a broken model gives them: whether that is an error is the consumer's to say."""
        broken, healthy = _NanRequest(self, spec_context), self.request(spec_context, "healthy")

        try:
            feed.whole(broken)
        except Exception:  # noqa: BLE001  (any error will do)
            feed.abandon(broken)
        payload = feed.whole(healthy)

        self.check_payload(payload, healthy.expected())

    def test_the_payload_can_travel(self, feed: Feed, spec_context: SpecContext) -> None:
        payload = feed.whole(self.request(spec_context))

        if isinstance(payload, SupportsSummary):
            assert self.consumer_class.location == "driver", "from a worker only JSON values travel"
            payload = payload.summary()

        if self.consumer_class.location == "worker" or isinstance(payload, dict):
            assert msgspec.json.decode(msgspec.json.encode(payload)) == payload

    def test_closing_completes_what_was_finished(
        self, tmp_path: Path, context: ConsumerContext, spec_context: SpecContext
    ) -> None:
        feed = Feed(self.consumer_class(self.params(tmp_path), context))
        requests = [self.request(spec_context, f"request-{index}") for index in range(3)]
        feed.begin(*requests)
        feed.step({request: (0, request.final.num_rows) for request in requests})
        answers = [feed.finish_later(request) for request in requests]

        feed.consumer.close(TIMEOUT_S)

        for request, answer in zip(requests, answers, strict=True):
            payload = answer.result(timeout=0) if isinstance(answer, Future) else answer
            self.check_payload(payload, request.expected())

    def test_closing_twice_is_quick_and_harmless(
        self, tmp_path: Path, context: ConsumerContext, spec_context: SpecContext
    ) -> None:
        feed = Feed(self.consumer_class(self.params(tmp_path), context))
        unfinished = self.request(spec_context)
        feed.begin(unfinished)
        feed.step({unfinished: (0, 2)})
        started = time.monotonic()

        feed.consumer.close(TIMEOUT_S)
        feed.consumer.close(TIMEOUT_S)

        assert time.monotonic() - started < TIMEOUT_S

    def test_specs_survive_the_wire(self, spec_context: SpecContext) -> None:
        spec = self.spec(spec_context, "request-1")

        travelled = CaptureSpec.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(spec.to_wire())))

        assert travelled == spec

    def test_bad_specs_are_refused_by_the_name_of_their_field(self, spec_context: SpecContext) -> None:
        if not self.consumer_class.reads_client_spec:
            pytest.skip("no request can name this consumer")
        for field, spec in {**_bad_specs(self.client_spec()), **self.bad_specs()}.items():
            with pytest.raises(RequestError) as caught:
                self.consumer_class.validate_client_spec(spec, spec_context)

            assert caught.value.field == f"{spec_context.field}{field and '.'}{field}", spec

    def test_readouts_are_functions_of_single_rows(self, tmp_path: Path) -> None:
        params = self.params(tmp_path)
        again = self.consumer_class.readouts(params, self.model)
        rows = torch.randn(5, self.model.hidden_size, dtype=torch.float64)
        for site, readout in self.consumer_class.readouts(params, self.model).items():
            assert site in self.model.sites
            assert readout.key == again[site].key
            function = readout.on(rows.device)
            found = function(rows.clone())
            assert found.shape == (len(rows), readout.num_outputs)
            for number in range(len(rows)):
                torch.testing.assert_close(function(rows[number : number + 1].clone())[0], found[number])

    def test_unknown_parameters_are_refused(self, tmp_path: Path) -> None:
        params = self.params(tmp_path)

        self.consumer_class.check_params(params)
        with pytest.raises(ConfigError, match="no_such_parameter"):
            self.consumer_class.check_params({**params, "no_such_parameter": 1})


def _bad_specs(good: Any) -> dict[str, Any]:
    """Specs made wrong in one field each: its name -> the spec. `good` is one that is right."""
    bad: dict[str, Any] = {"": "nonsense"}
    if isinstance(good, Mapping):
        bad["no_such_field"] = {**good, "no_such_field": 1}
        if "positions" in good:
            bad["positions"] = {**good, "positions": "some"}
        if "hooks" in good:
            bad["hooks"] = {key: value for key, value in good.items() if key != "hooks"}
            bad["hooks.no_such_hook"] = {**good, "hooks": {"no_such_hook": [1]}}
            bad["hooks.post_mlp"] = {**good, "hooks": {"post_mlp": [99]}}
            bad["hooks.mlp_out"] = {**good, "hooks": {"mlp_out": [1]}}
    return bad


class _NanRequest(ExampleRequest):
    """A request whose every value is NaN."""

    def __init__(self, contract: ConsumerContract, context: SpecContext) -> None:
        super().__init__(contract.spec(context, "broken"), "broken", model=contract.model)

    def rows(self, site: Site, positions: Int64Array) -> Tensor:
        return torch.full_like(super().rows(site, positions), torch.nan)
