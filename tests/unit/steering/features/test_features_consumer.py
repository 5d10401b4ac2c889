"""The consumer `features`: ids and activations against `SparseCoder.encode`, what it refuses, and what it keeps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headgate.capture.schema import results
from headgate.capture.schema.consumer import CaptureConsumer, ConsumerContext, RowArguments, SpecContext
from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError, RequestError
from headgate.capture.schema.results import CaptureResult, Origin, whole_rows
from headgate.consumers.datasets import open_dataset
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.filesystem.consumer import LAYOUTS, FilesystemConsumer
from headgate.consumers.reader import open_captures
from headgate.steering.client.answers import inline_rows
from headgate.steering.features import consumer
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.consumer import FeaturesConsumer, FeaturesReadout
from headgate.steering.features.labels import write_labels
from headgate.steering.features.source_coder import CoderKind, Norm
from headgate.steering.features.sparse_coder import SparseCoder, coder_of
from tests.fakes.sparse_coders import FEATURES, WIDTH, rows, source, tensor, weights

CONTEXT = ConsumerContext(instance_name="features", model=EXAMPLE_MODEL)
K, TOP = 5, 8
KINDS = [*((kind, Norm.NONE) for kind in CoderKind), *((CoderKind.TOPK, norm) for norm in Norm)]


def coder_of_kind(kind: CoderKind, norm: Norm = Norm.NONE, **changes: Any) -> SparseCoder:
    return coder_of(source(kind, norm, **changes), Path("x"), "x")


def arguments(*each: tuple[int, ...], count: int = 1 + TOP) -> RowArguments:
    found = np.full((len(each), count), -1, np.int64)
    for row, given in enumerate(each):
        found[row, : len(given)] = given
    return RowArguments(found, torch.from_numpy(found))


@pytest.fixture(params=[1, 12 << 20], ids=["in blocks", "at once"])
def block_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "BLOCK_BYTES", request.param)
    if request.param == 1:
        monkeypatch.setattr(consumer.DeviceEncoder, "_block", lambda self, _: -(-7 // self._group) * self._group)


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize(("kind", "norm"), KINDS)
def test_the_strongest_features_are_those_of_the_definition(kind: CoderKind, norm: Norm) -> None:
    coder = coder_of_kind(kind, norm, subtracts_bias=True)
    x = rows(9)
    expected = coder.encode(x, np.float64)

    found = FeaturesReadout([coder], TOP).on(torch.device("cpu"))(torch.from_numpy(x), arguments(*[(0,)] * 9)).numpy()

    for row, activations in enumerate(expected):
        order = [one for one in np.argsort(-activations)[:TOP] if activations[one] > 0]
        values = found[row, TOP:]
        assert found[row, : len(order)].tolist() == order
        np.testing.assert_allclose(values[: len(order)], activations[order], rtol=1e-5)
        assert not values[len(order) :].any()
    assert (found[:, TOP:] > 0).any()


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", CoderKind)
def test_given_features_have_the_activations_that_the_kind_selects(kind: CoderKind, mixed: bool) -> None:
    coder = coder_of_kind(kind)
    x, features = rows(6), [39, 0, 17, 3]
    expected = coder.encode(x, np.float64)
    asked = [(0, *features)] * 5 + [(0,) if mixed else (0, *features)]

    found = FeaturesReadout([coder], TOP).on(torch.device("cpu"))(torch.from_numpy(x), arguments(*asked)).numpy()

    np.testing.assert_allclose(found[:5, TOP : TOP + 4], expected[:5, features], rtol=1e-5, atol=1e-6)
    assert not found[:5, TOP + 4 :].any()
    if mixed:
        assert found[5, 0] == expected[5].argmax()


@pytest.mark.usefixtures("block_bytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CoderKind)
def test_rows_of_bfloat16_are_encoded_as_exactly(kind: CoderKind, dtype: torch.dtype) -> None:
    """Weights are split into as many parts as their file's dtype needs, and their sum is the weight."""
    changes = {"encoder": tensor(torch.from_numpy(weights()["W_enc"]).to(dtype).double().numpy()).transposed}
    coder = coder_of_kind(kind, **changes)
    x = torch.from_numpy(rows(6)).bfloat16().double()
    asked = arguments(*[(0,)] * 3, *[(0, 39, 0, 17)] * 3)

    encoder = consumer.DeviceEncoder(coder, torch.device("cpu"), are_rows_narrow=True)
    found = encoder.features(x, asked, TOP)

    num_parts = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 1}[dtype]
    assert encoder._encoder_FD.dtype == torch.bfloat16
    parts = encoder._encoder_FD.double().unflatten(1, (num_parts, -1)).sum(1)
    exact = consumer.DeviceEncoder(coder, torch.device("cpu"))
    assert torch.equal(parts, exact._encoder_FD.double())
    torch.testing.assert_close(found, exact.features(x, asked, TOP), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("block_bytes")
def test_of_equal_activations_those_are_given_that_the_selection_has() -> None:
    """The first two rows of the encoder stand there six times, so that the k-th activation has equals."""
    found = weights()
    w_enc, bias = found["W_enc"].copy(), found["b_enc"].copy()
    w_enc[:, :12], bias[:12] = np.tile(w_enc[:, :2], (1, 6)), np.tile(bias[:2], 6)
    w_enc[:, 12:] = bias[12:] = 0
    coder = coder_of_kind(CoderKind.TOPK, encoder=tensor(w_enc).transposed, bias=bias)
    x = rows(6)
    read = FeaturesReadout([coder], 12).on(torch.device("cpu"))

    strongest = read(torch.from_numpy(x), arguments(*[(0,)] * 6, count=13)).numpy()
    given = read(torch.from_numpy(x), arguments(*[(0, *range(12))] * 6, count=13)).numpy()

    for row in range(6):
        active = strongest[row, 12:] > 0
        ids = strongest[row, :12][active].astype(int)
        assert np.flatnonzero(given[row, 12:]).tolist() == sorted(ids.tolist())
        assert given[row, 12:][ids].tolist() == strongest[row, 12:][active].tolist()
    assert ((strongest[:, 12:] > 0).sum(axis=1) == K).any()


def test_rows_of_several_saes_in_one_chunk_are_each_their_own_and_rows_that_are_not_finite_are_nan() -> None:
    coders = [coder_of_kind(CoderKind.TOPK), coder_of_kind(CoderKind.RELU)]
    x = rows(4)
    x[3, 2] = np.inf

    found = FeaturesReadout(coders, TOP).on(torch.device("cpu"))(
        torch.from_numpy(x), arguments((1,), (0,), (1, 4), (0,))
    )

    expected = [coder.encode(x[:3], np.float64) for coder in coders]
    assert found[0, 0] == expected[1][0].argmax()
    assert (found[1, TOP:] > 0).sum() == K
    assert found[2, TOP].item() == pytest.approx(expected[1][2, 4], abs=1e-6)
    assert found[3, TOP:].isnan().all()


def test_given_features_of_one_sae_may_be_beyond_those_of_another_at_its_site() -> None:
    large, found = coder_of_kind(CoderKind.RELU), weights(features=8)
    changes = {"encoder": tensor(found["W_enc"]).transposed, "decoders": (tensor(found["W_dec"]),)}
    small = coder_of_kind(CoderKind.RELU, **changes, bias=found["b_enc"], decoder_biases=(found["b_dec"],))
    x = rows(2)

    outputs = FeaturesReadout([small, large], TOP).on(torch.device("cpu"))(
        torch.from_numpy(x), arguments((0, 3), (1, FEATURES - 1))
    )

    assert outputs[0, TOP].item() == pytest.approx(small.encode(x[:1], np.float64)[0, 3], abs=1e-6)
    assert outputs[1, TOP].item() == pytest.approx(large.encode(x[1:], np.float64)[0, FEATURES - 1], abs=1e-6)


@pytest.fixture
def params(tmp_path: Path) -> dict[str, Any]:
    saes = {}
    for name, kind, site in (("a", CoderKind.TOPK, "3.post_mlp"), ("b", CoderKind.RELU, "3.post_mlp"),
                             ("c", CoderKind.JUMPRELU, "1.post_mlp")):  # fmt: skip
        path = tmp_path / f"{name}.safetensors"
        write_coder(path, wide(kind), name=name, path="test")
        saes[name] = f"{path}@{site}"
    return {"saes": saes, "top": TOP}


def wide(kind: CoderKind) -> Any:
    found = {name: values.astype(np.float64) for name, values in weights(width=EXAMPLE_MODEL.hidden_size).items()}
    changes = {
        "encoder": tensor(found["W_enc"]).transposed,
        "decoders": (tensor(found["W_dec"]),),
        "decoder_biases": (found["b_dec"],),
    }
    return source(kind, **changes)


def request(params: dict[str, Any], raw: Any, name: str = "r", **shape: Any) -> ExampleRequest:
    context = SpecContext(instance_name="features", model=EXAMPLE_MODEL, params=params, client_request_id=name)
    return ExampleRequest(FeaturesConsumer.validate_client_spec(raw, context), name, **shape)


def by_definition(params: dict[str, Any], name: str, asked: ExampleRequest) -> Any:
    _, coders = consumer.parse_params(params)
    site = coders[name].read_site
    assert site is not None
    return coders[name].encode(asked.rows(site, asked.wanted()).double().numpy(), np.float64)


@pytest.mark.parametrize("positions", ["all", "all_generated", [0, 3, -1]], ids=str)
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_payload(params: dict[str, Any], name: str, positions: Any, tmp_path: Path) -> None:
    write_labels(tmp_path / "a.safetensors", {one: f"label {one}" for one in range(0, FEATURES, 2)})
    asked = request(params, {"sae": name, "positions": positions, "top": 3, "above": 0.1}, prompt=5, output=6)

    payload = Feed(FeaturesConsumer(params, CONTEXT)).whole(asked)

    assert json.loads(json.dumps(payload)) == payload
    assert list(payload) == ["sae", "positions", "ids", "values", "labels"]
    assert (payload["sae"], payload["positions"]) == (name, asked.wanted().tolist())
    for ids, values, row in zip(payload["ids"], payload["values"], by_definition(params, name, asked), strict=True):
        assert ids == [one for one in np.argsort(-row)[:3] if row[one] > 0.1]
        np.testing.assert_allclose(values, row[ids], rtol=1e-5)
    shown = {one for ids in payload["ids"] for one in ids}
    named = {str(one): f"label {one}" for one in sorted(shown) if one % 2 == 0}
    assert payload["labels"] == (named if name == "a" else {})


def test_given_features_come_in_the_order_given_and_requests_of_one_batch_get_their_own(params: dict[str, Any]) -> None:
    feed = Feed(FeaturesConsumer(params, CONTEXT))
    one = request(params, {"sae": "a", "features": [30, 2, 11]}, "one")
    two = request(params, {"sae": "b", "top": 2}, "two")
    feed.begin(one, two)
    for start in range(8):
        feed.step({one: (start, start + 1), two: (start, start + 1)})

    found, other = feed.finish(one), feed.finish(two)

    assert found["ids"] == [[30, 2, 11]] * 8
    np.testing.assert_allclose(found["values"], by_definition(params, "a", one)[:, [30, 2, 11]], rtol=1e-5, atol=1e-6)
    assert other["ids"] == [list(np.argsort(-row)[:2]) for row in by_definition(params, "b", two)]


def test_a_request_that_says_nothing_gets_twenty_or_what_there_is(params: dict[str, Any]) -> None:
    only = {"saes": {"c": params["saes"]["c"]}}

    assert request(only, {}).info.spec.options == {"sae": "c", "top": 20, "above": 0.0}
    assert request({**only, "top": 4}, {}).info.spec.options["top"] == 4


@pytest.mark.parametrize(
    ("raw", "field", "why"),
    [
        ({}, "sae", "got None; known: a, b, c"),
        ({"sae": "x"}, "sae", "known: a, b, c"),
        ({"sae": "a", "hooks": {}}, "hooks", "has sae, positions, top, features, above"),
        ({"sae": "a", "top": 9}, "top", r"from 1 to 8 \(parameter top\), got 9"),
        ({"sae": "a", "top": True}, "top", "got True"),
        ({"sae": "a", "above": -1}, "above", "at least 0"),
        ({"sae": "a", "above": float("nan")}, "above", "at least 0"),
        ({"sae": "a", "above": 10**400}, "above", "at least 0"),
        ({"sae": "a", "features": [1], "top": 3}, "top", "either this or features"),
        ({"sae": "a", "features": []}, "features", "1 to 8 ids"),
        ({"sae": "a", "features": [40]}, "features[0]", "has the features 0 to 39, got 40"),
        ({"sae": "a", "features": [3, 3]}, "features", "each feature once"),
        ([], None, "expected an object"),
    ],
)
def test_requests_are_refused_by_field(params: dict[str, Any], raw: Any, field: str | None, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        request(params, raw)

    assert caught.value.field == "capture.features" + (f".{field}" if field else "")


def test_parameters_are_refused_by_name(params: dict[str, Any], tmp_path: Path) -> None:
    saes = params["saes"]
    for wrong, why in (
        ({"saes": {}}, "saes: name at least one"),
        ({"saes": saes, "top": 0}, "top must be from 1"),
        ({"saes": saes, "max_values": 0}, "max_values"),
        ({"saes": {"n": str(tmp_path / "none.safetensors")}}, r"saes\.n: .*no such file"),
        ({"saes": saes, "more": 1}, "more"),
    ):
        with pytest.raises(ConfigError, match=why):
            FeaturesConsumer.check_params(wrong)
    with pytest.raises(ConfigError, match=r"saes\.a: its site 3\.attn_out is not captured here"):
        FeaturesConsumer.readouts({"saes": {"a": saes["a"].replace("3.post_mlp", "3.attn_out")}}, EXAMPLE_MODEL)
    write_coder(tmp_path / "narrow.safetensors", source(), name="narrow", path="test")
    with pytest.raises(ConfigError, match=rf"reads rows of {WIDTH} values; the model has 16 at 3\.post_mlp"):
        FeaturesConsumer.readouts({"saes": {"narrow": str(tmp_path / "narrow.safetensors")}}, EXAMPLE_MODEL)


def test_too_many_values_and_another_file_than_the_workers_are_errors_of_the_request(params: dict[str, Any]) -> None:
    with pytest.raises(ConsumerError, match=r"more than a result may hold here, 10 \(parameter max_values\)"):
        Feed(FeaturesConsumer({**params, "max_values": 10}, CONTEXT)).whole(request(params, {"sae": "a"}))
    feed = Feed(FeaturesConsumer(params, CONTEXT))
    feed._facts = {site: facts._replace(key="other") for site, facts in feed._facts.items()}
    with pytest.raises(ConsumerError, match=r"the file of an SAE at 3\.post_mlp has changed"):
        feed.begin(request(params, {"sae": "a"}))


@pytest.mark.parametrize("wanted", [{"top": 4, "above": 0.2}, {"features": [3, 39, 0]}], ids=str)
def test_binary_payloads_have_the_numbers_of_lists(params: dict[str, Any], tmp_path: Path, wanted: Any) -> None:
    class Broken(ExampleRequest):
        def rows(self, site: Any, positions: Any) -> torch.Tensor:
            rows = super().rows(site, positions)
            rows[positions == 2] = torch.nan
            return rows

    write_labels(tmp_path / "a.safetensors", {one: f"label {one}" for one in range(0, FEATURES, 2)})
    found = []
    for encoding in ("lists", "binary"):
        context = SpecContext(instance_name="features", model=EXAMPLE_MODEL, params=params, client_request_id="r")
        spec = FeaturesConsumer.validate_client_spec({"sae": "a", **wanted, "encoding": encoding}, context)
        asked = Broken(spec, "r")
        feed = Feed(FeaturesConsumer(params, CONTEXT))
        feed.begin(asked)
        feed.step({asked: (0, asked.final.num_rows)})
        found.append(feed.finish(asked))
    lists, binary = found

    arrays = inline_rows(CaptureResult(status="ok", payload=binary))
    assert (arrays["ids"].dtype, arrays["values"].dtype) == (np.int32, np.float32)
    assert {name: binary[name] for name in ("sae", "positions", "labels")} == {
        name: lists[name] for name in ("sae", "positions", "labels")
    }
    assert msgspec.json.decode(msgspec.json.encode(binary)) == binary
    for number, row in enumerate(lists["ids"]):
        ids, values = arrays["ids"][number], arrays["values"][number]
        if row is None:
            assert np.isnan(values).all()
            continue
        assert (ids[: len(row)].tolist(), values[: len(row)].tolist()) == (row, lists["values"][number])
        assert (ids[len(row) :].tolist(), values[len(row) :].any()) == ([-1] * (len(ids) - len(row)), False)
    assert None in lists["ids"]


def streamed_request(params: dict[str, Any], raw: Any, **shape: Any) -> ExampleRequest:
    asked = request(params, raw, **shape)
    asked.info = replace(asked.info, origin=Origin(reply=None, key="call-0", is_streamed=True))
    return asked


def feed_of(params: dict[str, Any]) -> tuple[Feed, list[tuple[int, Any]]]:
    """A consumer, and the parts that it sends: rows up to the last one, and the payload as its client reads it."""
    consumer, sent = FeaturesConsumer(params, CONTEXT), list[tuple[int, Any]]()
    consumer.send_part = lambda _, payload, num_rows: sent.append((num_rows, plain(payload)))
    return Feed(consumer), sent


def plain(payload: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(payload))


def test_a_stream_gets_each_position_once_and_together_the_answer(params: dict[str, Any], tmp_path: Path) -> None:
    write_labels(tmp_path / "a.safetensors", {one: f"label {one}" for one in range(FEATURES)})
    feed, sent = feed_of(params)
    raw = {"sae": "a", "top": 2}
    asked, quiet = streamed_request(params, raw, prompt=3, output=4), request(params, raw, prompt=3, output=4)
    other = Feed(FeaturesConsumer(params, CONTEXT))
    feed.begin(asked)
    other.begin(quiet)
    for start, stop in ((0, 4), (4, 5), (5, 6)):
        feed.step({asked: (start, stop)})
        other.step({quiet: (start, stop)})
    payload = feed.finish(asked)
    whole, expected = plain(payload), other.finish(quiet)

    assert [num_rows for num_rows, _ in sent] == [4, 5, 6]
    assert [part["positions"] for _, part in sent] == [[0, 1, 2, 3], [4], [5]]
    assert isinstance(payload["values"], msgspec.Raw)  # nothing is encoded twice
    assert whole == expected
    assert list(whole["labels"]) == list(expected["labels"]) != []
    for name in ("ids", "values"):
        assert [row for _, part in sent for row in part[name]] == whole[name]


def test_a_stream_whose_last_tokens_were_taken_back_has_the_rest(params: dict[str, Any]) -> None:
    feed, sent = feed_of(params)
    asked = streamed_request(params, {"sae": "a", "top": 2}, prompt=3, output=4)
    feed.begin(asked)
    feed.step({asked: (0, 4)})
    feed.step({asked: (4, 6)})
    asked.final = replace(asked.final, token_ids=asked.final.token_ids[:6])

    assert plain(feed.finish(asked))["positions"] == [0, 1, 2, 3, 4]
    assert sent[-1][0] == 6


def test_a_part_of_a_stream_has_so_many_values_and_the_next_ones_the_rest(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "CHUNK_VALUES", 4)  # two positions
    feed, sent = feed_of(params)
    asked = streamed_request(params, {"sae": "a", "top": 2}, prompt=4, output=3)
    feed.begin(asked)

    feed.step({asked: (0, 3)})
    feed.step({asked: (3, 6)})
    whole = plain(feed.finish(asked))

    assert [part["positions"] for _, part in sent] == [[0, 1], [2], [3, 4], [5]]
    assert [num_rows for num_rows, _ in sent] == [2, 3, 5, 6]
    assert [row for _, part in sent for row in part["ids"]] == whole["ids"]


def test_a_stream_of_binary_parts_ends_with_binary_arrays(params: dict[str, Any]) -> None:
    feed, sent = feed_of(params)
    asked = streamed_request(params, {"sae": "a", "top": 2, "encoding": "binary"}, prompt=4, output=3)
    feed.begin(asked)
    feed.step({asked: (0, 3)})
    feed.step({asked: (3, 6)})
    whole = inline_rows(CaptureResult(status="ok", payload=feed.finish(asked)))

    parts = [inline_rows(CaptureResult(status="ok", payload=part)) for _, part in sent]
    for name in ("ids", "values"):
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), whole[name])


@pytest.mark.parametrize("max_parts", [2, 3, 128])
def test_parts_that_are_joined_while_a_request_runs_make_the_same_answer(
    params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_parts: int
) -> None:
    monkeypatch.setattr(results, "MAX_PARTS", max_parts)
    write_labels(tmp_path / "a.safetensors", {one: f"label {one}" for one in range(FEATURES)})
    feed, sent = feed_of(params)
    asked = streamed_request(params, {"sae": "a", "top": 2}, prompt=4, output=6)
    quiet = request(params, {"sae": "a", "top": 2}, prompt=4, output=6)
    other = Feed(FeaturesConsumer(params, CONTEXT))
    feed.begin(asked)
    other.begin(quiet)
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)):
        feed.step({asked: (start, stop)})
        other.step({quiet: (start, stop)})

    assert len(sent) == 6
    assert plain(feed.finish(asked)) == plain(other.finish(quiet))


@pytest.mark.parametrize("encoding", ["lists", "binary"])
def test_a_chunk_that_takes_several_parts_has_the_positions_of_all(
    params: dict[str, Any], tmp_path: Path, encoding: str
) -> None:
    write_labels(tmp_path / "a.safetensors", {one: f"label {one}" for one in range(FEATURES)})
    consumer, sent = FeaturesConsumer(params, CONTEXT), list[Any]()
    consumer.send_part = lambda _, payload, num_rows: sent.append(payload)
    feed = Feed(consumer)
    asked = streamed_request(params, {"sae": "a", "top": 2, "encoding": encoding}, prompt=4, output=3)
    feed.begin(asked)
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        feed.step({asked: (start, stop)})
    joined, whole = plain(consumer.join_parts(sent)), plain(feed.finish(asked))

    assert len(sent) == 3
    assert {name: joined[name] for name in whole if name != "labels"} == {
        name: value for name, value in whole.items() if name != "labels"
    }
    assert sorted(joined["labels"].items()) == sorted(whole["labels"].items()) != []


def test_given_features_are_a_list_of_each_row(params: dict[str, Any]) -> None:
    feed, _ = feed_of(params)
    asked = request(params, {"sae": "a", "features": [3, 1]}, prompt=3, output=1)
    feed.begin(asked)
    feed.step({asked: (0, 3)})
    first, second, _ = feed.finish(asked)["ids"]
    first.append(7)

    assert second == asked.info.spec.options["features"] == [3, 1]


def test_a_stream_of_more_values_than_a_result_may_hold_is_an_error_and_gets_no_more_parts(
    params: dict[str, Any],
) -> None:
    feed, sent = feed_of({**params, "max_values": 8})
    asked = streamed_request(params, {"sae": "a", "top": 2}, prompt=4, output=3)
    feed.begin(asked)
    feed.step({asked: (0, 3)})
    feed.step({asked: (3, 6)})

    assert [part["positions"] for _, part in sent] == [[0, 1, 2]]
    with pytest.raises(ConsumerError, match="more than a result may hold"):
        feed.finish(asked)


def test_a_request_that_is_not_streamed_sends_no_parts(params: dict[str, Any]) -> None:
    feed, sent = feed_of(params)

    assert isinstance(feed.whole(request(params, {"sae": "a", "top": 2}))["values"], list)
    assert sent == []


FILES = ConsumerContext(instance_name="files", model=EXAMPLE_MODEL)


def stored_request(files: dict[str, Any], raw: Any, name: str = "r") -> ExampleRequest:
    context = SpecContext(instance_name="files", model=EXAMPLE_MODEL, params=files, client_request_id=name)
    return ExampleRequest(FilesystemConsumer.validate_client_spec(raw, context), name)


def fed(consumer: CaptureConsumer, *requests: ExampleRequest) -> list[Any]:
    """Results of requests whose rows come in blocks that they share."""
    feed = Feed(consumer)
    feed.begin(*requests)
    for start in range(0, 8, 3):
        feed.step({one: (start, min(start + 3, 8)) for one in requests})
    return [feed.finish(one) for one in requests]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_what_answers_have(params: dict[str, Any], tmp_path: Path, layout: str) -> None:
    files = {"root": str(tmp_path / "files"), "layout": layout, "reads": {"consumer": "features", "params": params}}
    wanted = [
        {"sae": "a", "top": 3},
        {"sae": "b", "features": [30, 2, 11]},
        {"sae": "c", "top": 5, "positions": [0, 4]},
    ]
    answers = fed(FeaturesConsumer(params, CONTEXT), *(request(params, raw, str(n)) for n, raw in enumerate(wanted)))
    consumer = FilesystemConsumer(files, FILES)
    stored = [stored_request(files, {**raw, "tag": f"t{n}"}, str(n)) for n, raw in enumerate(wanted)]
    assert [payload["layout"] for payload in fed(consumer, *stored)] == [layout] * 3
    consumer.close(60)

    captures = {capture.tag: capture for capture in open_captures(tmp_path / "files")}
    for number, (raw, answer) in enumerate(zip(wanted, answers, strict=True)):
        capture = captures[f"t{number}"]
        [site] = capture.sites
        found = capture.outputs(site)
        assert capture.positions.tolist() == answer["positions"]
        assert found["values"].dtype == np.float32
        for row, (ids, values) in enumerate(zip(answer["ids"], answer["values"], strict=True)):
            assert found["values"][row, : len(values)].tolist() == values
            assert not found["values"][row, len(values) :].any()
            if "features" not in raw:
                assert found["ids"].dtype == np.int64
                assert found["ids"][row, : len(ids)].tolist() == ids
        assert set(found) == ({"values"} if "features" in raw else {"ids", "values"})
        with pytest.raises(CaptureFileError, match=r"has what 'features' read of rows, not the rows"):
            whole_rows(capture, site)
        data = open_dataset(tmp_path / "files", tags=f"t{number}")
        readout = data.readout(site.name)
        assert readout is not None
        assert readout.options["sae"] == raw["sae"]
        [batch] = data.batches(site.name)
        assert all(np.array_equal(rows, found[name]) for name, rows in readout.named(batch.numpy()).items())
    with pytest.raises(CaptureFileError, match=r"rows of different kinds.*outputs of the readout"):
        open_dataset(tmp_path / "files", sites="3.post_mlp").readout("3.post_mlp")


@pytest.mark.parametrize(
    ("raw", "field", "why"),
    [
        ({"sae": "a", "above": 0.5}, "above", "files hold all that was read"),
        ({"sae": "a", "encoding": "binary"}, "encoding", "files hold all that was read"),
        ({"sae": "x"}, "sae", "known: a, b, c"),
        ({"sae": "a", "hooks": {}}, "hooks", "has sae, positions, top, features, above"),
        ({"sae": "a", "tag": "a/b"}, "tag", "a/b"),
        ({"sae": "a", "if_probe": {}}, "if_probe", "unknown key; the consumer .files. has sae"),
    ],
)
def test_requests_for_files_are_refused_by_field(
    params: dict[str, Any], tmp_path: Path, raw: Any, field: str, why: str
) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        stored_request({"root": str(tmp_path), "reads": {"consumer": "features", "params": params}}, raw)

    assert caught.value.field == f"capture.files.{field}"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"reads": {"consumer": "inline", "params": {}}}, "reads.consumer: 'inline' has no outputs that can be stored"),
        ({"reads": {"consumer": "features", "params": {"saes": {}}}}, "features: saes: name at least one"),
        ({"hooks": {"post_mlp": "all"}}, "reads: an instance with it stores no rows"),
        ({"reads": {"consumer": "features"}}, "params"),
    ],
)
def test_parameters_of_files_are_refused_by_name(params: dict[str, Any], tmp_path: Path, change: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        FilesystemConsumer.check_params(
            {"root": str(tmp_path), "reads": {"consumer": "features", "params": params}, **change}
        )


def test_another_file_than_the_workers_stores_nothing(params: dict[str, Any], tmp_path: Path) -> None:
    files = {"root": str(tmp_path / "files"), "reads": {"consumer": "features", "params": params}}
    consumer = FilesystemConsumer(files, FILES)
    feed = Feed(consumer)
    feed._facts = {site: facts._replace(key="other") for site, facts in feed._facts.items()}
    with pytest.raises(ConsumerError, match="a file of the readout has changed"):
        feed.begin(stored_request(files, {"sae": "a"}))
    consumer.close(60)
