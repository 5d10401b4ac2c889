"""The lens consumer: what it reads, by definition, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from headgate.capture.lens import LensKind, save
from headgate.capture.schema import results
from headgate.capture.schema.consumer import ConsumerContext, FinishedRequest, RowBlock, SpecContext
from headgate.capture.schema.errors import ConfigError, ConsumerError, RequestError
from headgate.capture.schema.results import Origin
from headgate.capture.schema.sites import HookPoint, Site
from headgate.capture.staging.readouts import bind
from headgate.consumers import lens as lens_module
from headgate.consumers.datasets import open_dataset
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.filesystem.consumer import FilesystemConsumer
from headgate.consumers.lens import LensConsumer
from headgate.consumers.reader import open_capture
from tests.fakes.heads import FakeHead, Letters

HIDDEN, VOCABULARY = EXAMPLE_MODEL.hidden_size, 60
HEAD = FakeHead(HIDDEN, VOCABULARY)
CONTEXT = ConsumerContext(instance_name="lens", model=EXAMPLE_MODEL, vocabulary=Letters(VOCABULARY))
RNG = np.random.default_rng(2)
JACOBIAN = {layer: RNG.normal(size=(HIDDEN, HIDDEN)).astype(np.float32) for layer in (0, 2)}
TUNED = {layer: RNG.normal(size=(HIDDEN, HIDDEN)).astype(np.float32) for layer in (1, 2)}
BIASES = {layer: RNG.normal(size=HIDDEN).astype(np.float32) for layer in TUNED}


@pytest.fixture
def params(tmp_path: Path) -> dict[str, Any]:
    save(tmp_path / "j.safetensors", LensKind.JACOBIAN, JACOBIAN)
    save(tmp_path / "t.safetensors", LensKind.TUNED, TUNED, BIASES)
    return {"lenses": {"j": tmp_path / "j.safetensors", "t": tmp_path / "t.safetensors"}, "max_tokens": 3}


def request(
    params: dict[str, Any], raw: Any, name: str = "r", vocabulary: Any = CONTEXT.vocabulary, **shape: Any
) -> ExampleRequest:
    context = SpecContext(
        instance_name="lens", model=EXAMPLE_MODEL, params=params, client_request_id=name, vocabulary=vocabulary
    )
    return ExampleRequest(LensConsumer.validate_client_spec(raw, context), name, **shape)


def test_what_is_offered_is_known_without_the_files(params: dict[str, Any]) -> None:
    for path in params["lenses"].values():
        path.unlink()

    assert LensConsumer.offers(params) == {"lens": ["logit", "j", "t"]}
    assert LensConsumer.offers({}) == {"lens": ["logit"]}


def by_definition(asked: ExampleRequest, layer: int, lens: str) -> Tensor:
    """Log-probabilities ``[positions, vocabulary]``."""
    rows = asked.rows(Site(layer, HookPoint.POST_MLP), asked.wanted()).double()
    if lens == "j":
        rows = rows @ torch.from_numpy(JACOBIAN[layer]).double().T
    if lens == "t":
        rows = rows + rows @ torch.from_numpy(TUNED[layer]).double().T + torch.from_numpy(BIASES[layer]).double()
    return HEAD.logits(HEAD.norm(rows.float())).double().log_softmax(-1)


def check(read: Any, expected: Tensor, top: int, tokens: list[int], ranked: Tensor | None = None) -> None:
    ranking = expected if ranked is None else expected.masked_fill(~ranked, -torch.inf)
    best = ranking.topk(top)
    assert read["ids"] == best.indices.tolist()
    np.testing.assert_allclose(read["logprobs"], best.values, atol=1e-5)
    np.testing.assert_allclose(read["token_logprobs"], expected[:, tokens].tolist(), atol=1e-5)
    assert read["token_ranks"] == [
        [int((row > whole[token]).sum()) for token in tokens] for row, whole in zip(ranking, expected, strict=True)
    ]


@pytest.mark.parametrize(("lens", "layers"), [("logit", [0, 1, 2, 3]), ("j", [0, 2]), ("t", [1, 2])])
@pytest.mark.parametrize("size", [1 << 25, 150], ids=["one block", "blocks of two rows"])
def test_tokens_are_those_of_the_definition(
    params: dict[str, Any], lens: str, layers: list[int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lens_module, "_LOGITS", size)
    asked = request(params, {"lens": lens, "top": 5, "tokens": ["b", 40], "positions": [0, 3, -1]})

    payload = Feed(LensConsumer(params, CONTEXT), HEAD).whole(asked)

    assert json.loads(json.dumps(payload)) == payload
    assert (payload["lens"], payload["positions"]) == (lens, asked.wanted().tolist())
    assert list(payload["layers"]) == [str(layer) for layer in layers]
    for layer in layers:
        check(payload["layers"][str(layer)], by_definition(asked, layer, lens), 5, [1, 40])
        texts = payload["layers"][str(layer)]["tokens"]
        assert texts[0] == [Letters(VOCABULARY).shown(one) for one in payload["layers"][str(layer)]["ids"][0]]


def test_requests_of_one_batch_get_their_own_lens_tokens_and_ranking(params: dict[str, Any]) -> None:
    feed = Feed(LensConsumer(params, CONTEXT), HEAD)
    wanted: dict[str, dict[str, Any]] = {
        "one": {"lens": "j", "layers": [2], "top": 2, "tokens": []},
        "two": {"lens": "t", "layers": [2], "top": 4, "tokens": [7, 8, 9]},
        "three": {"layers": [2], "top": 0, "tokens": [59]},
        "four": {"layers": [2], "top": 3, "tokens": [5], "words_only": True},
    }
    requests = {name: request(params, raw, name) for name, raw in wanted.items()}

    feed.begin(*requests.values())
    for start in range(0, 8, 3):
        feed.step({one: (start, min(start + 3, 8)) for one in requests.values()})
    payloads = {name: feed.finish(one) for name, one in requests.items()}

    is_word = torch.tensor([len(Letters(VOCABULARY).shown(token)) > 1 for token in range(VOCABULARY)])
    for name, raw in wanted.items():
        expected = by_definition(requests[name], 2, raw.get("lens", "logit"))
        ranked = is_word if raw.get("words_only") else None
        check(payloads[name]["layers"]["2"], expected, raw["top"], raw["tokens"], ranked)


def plain(payload: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(payload))


def streamed(params: dict[str, Any], raw: Any, name: str = "r", **shape: Any) -> ExampleRequest:
    asked = request(params, raw, name, **shape)
    asked.info = replace(asked.info, origin=Origin("ipc://hub", "call.1", is_streamed=True))
    return asked


def feed_of(params: dict[str, Any]) -> tuple[Feed, list[tuple[str, int, Any]]]:
    """A consumer, and the parts that it sends: request, rows up to the last one, payload as the client reads it."""
    consumer, sent = LensConsumer(params, CONTEXT), list[tuple[str, int, Any]]()
    consumer.send_part = lambda info, payload, rows: sent.append((info.request_id, rows, plain(payload)))
    return Feed(consumer, HEAD), sent


def test_a_stream_gets_each_position_once_and_together_the_answer(params: dict[str, Any]) -> None:
    feed, sent = feed_of(params)
    raw = {"layers": [0, 2], "top": 3, "tokens": [4]}
    asked, other, quiet = streamed(params, raw, "a"), streamed(params, raw, "b"), request(params, raw, "c")
    asked.final = replace(asked.final, token_ids=asked.final.token_ids[:7])
    feed.begin(asked, other, quiet)
    feed.step({asked: (0, 4), other: (0, 5), quiet: (0, 5)})
    feed.step({asked: (4, 5)})
    feed.step({asked: (5, 6)})
    payload = feed.finish(asked)
    feed.abandon(other)
    whole = plain(payload)

    assert [each[:2] for each in sent] == [("a", 4), ("b", 5), ("a", 5), ("a", 6)]
    parts = [part for name, _, part in sent if name == "a"]
    assert [part["positions"] for part in parts] == [[0, 1, 2, 3], [4], [5]]
    assert isinstance(payload["layers"]["0"]["logprobs"], msgspec.Raw)  # nothing is encoded twice
    assert whole["positions"] == [0, 1, 2, 3, 4, 5]
    for layer in ("0", "2"):
        for name, rows in whole["layers"][layer].items():
            assert [row for part in parts for row in part["layers"][layer][name]] == rows


@pytest.mark.parametrize("is_late", [False, True])
def test_the_answer_of_a_stream_is_that_of_others_however_blocks_come(params: dict[str, Any], is_late: bool) -> None:
    """Layers in blocks of their own are one part if they come together; the answer has what no part has."""
    raw = {"layers": [0, 2], "top": 3, "tokens": [4]}
    (feed, sent), other = feed_of(params), Feed(LensConsumer(params, CONTEXT), HEAD)
    asked, quiet, consumer = streamed(params, raw), request(params, raw), feed.consumer
    assert isinstance(consumer, LensConsumer)
    feed.begin(asked)
    other.begin(quiet)
    for start in (0, 4):
        other.step({quiet: (start, start + 4)}, sites_per_block=1)
        blocks: list[RowBlock] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feed, "write", blocks.extend)
            feed.step({asked: (start, start + 4)}, sites_per_block=1)
        for together in [[block] for block in blocks] if is_late else [blocks]:
            consumer.write(together)
    payload = consumer.finish(FinishedRequest(request=asked.info, final=asked.final, dropped_rows=0))

    assert plain(payload) == other.finish(quiet)
    if is_late:
        assert sent == []  # no chunk has one layer without the other
    else:
        assert [(rows, part["positions"]) for _, rows, part in sent] == [(4, [0, 1, 2, 3]), (8, [4, 5, 6, 7])]


def test_a_stream_whose_last_tokens_were_taken_back_has_the_rest(params: dict[str, Any]) -> None:
    feed, sent = feed_of(params)
    asked = streamed(params, {"layers": [0, 2], "top": 3}, prompt=4, output=3)
    feed.begin(asked)
    feed.step({asked: (0, 4)})
    feed.step({asked: (4, 6)})
    asked.final = replace(asked.final, token_ids=asked.final.token_ids[:6])

    assert plain(feed.finish(asked))["positions"] == [0, 1, 2, 3, 4]
    assert sent[-1][1] == 6


def test_a_part_of_a_stream_has_so_many_values_and_the_next_ones_the_rest(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "CHUNK_VALUES", 16)  # two positions
    feed, sent = feed_of(params)
    asked = streamed(params, {"layers": [0, 2], "top": 3, "tokens": [4]}, prompt=4, output=3)
    feed.begin(asked)
    feed.step({asked: (0, 3)})
    feed.step({asked: (3, 6)})
    whole = plain(feed.finish(asked))

    assert [(rows, part["positions"]) for _, rows, part in sent] == [(2, [0, 1]), (3, [2]), (5, [3, 4]), (6, [5])]
    for layer in ("0", "2"):
        assert [row for _, _, part in sent for row in part["layers"][layer]["ids"]] == whole["layers"][layer]["ids"]


def test_texts_are_looked_up_while_a_request_runs_and_not_at_its_end(params: dict[str, Any]) -> None:
    class Counting(Letters):
        def shown(self, token: int) -> str:
            looked_up.append(token)
            return super().shown(token)

    looked_up: list[int] = []
    feed = Feed(LensConsumer(params, replace(CONTEXT, vocabulary=Counting(VOCABULARY))), HEAD)
    asked = request(params, {"layers": [0, 2], "top": 3}, prompt=4, output=3)
    feed.begin(asked)
    feed.step({asked: (0, 6)})
    before = {*looked_up}

    ids = [one for layer in feed.finish(asked)["layers"].values() for row in layer["ids"] for one in row]
    assert before == {*ids}


@pytest.mark.parametrize("max_parts", [2, 3, 128])
def test_parts_that_are_joined_while_a_request_runs_make_the_same_answer(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch, max_parts: int
) -> None:
    monkeypatch.setattr(results, "MAX_PARTS", max_parts)
    raw = {"layers": [0, 2], "top": 3, "tokens": [4]}
    (feed, sent), other = feed_of(params), Feed(LensConsumer(params, CONTEXT), HEAD)
    asked, quiet = streamed(params, raw, prompt=4, output=6), request(params, raw, prompt=4, output=6)
    feed.begin(asked)
    other.begin(quiet)
    for start, stop in ((0, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)):
        feed.step({asked: (start, stop)})
        other.step({quiet: (start, stop)})

    assert len(sent) == 6
    assert plain(feed.finish(asked)) == plain(other.finish(quiet))


def test_a_chunk_that_takes_several_parts_has_the_positions_of_all(params: dict[str, Any]) -> None:
    consumer, sent = LensConsumer(params, CONTEXT), list[Any]()
    consumer.send_part = lambda _, payload, rows: sent.append(payload)
    feed = Feed(consumer, HEAD)
    asked = streamed(params, {"layers": [0, 2], "top": 3, "tokens": [4]}, prompt=4, output=3)
    feed.begin(asked)
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        feed.step({asked: (start, stop)})

    assert len(sent) == 3
    assert plain(consumer.join_parts(sent)) == plain(feed.finish(asked))


def test_a_stream_of_more_tokens_than_a_result_may_hold_is_an_error_and_gets_no_more_parts(
    params: dict[str, Any],
) -> None:
    feed, sent = feed_of({**params, "max_values": 24})
    asked = streamed(params, {"layers": [0, 2], "top": 3}, prompt=4, output=3)
    feed.begin(asked)
    feed.step({asked: (0, 3)})
    feed.step({asked: (3, 6)})

    assert [part["positions"] for _, _, part in sent] == [[0, 1, 2]]
    with pytest.raises(ConsumerError, match="more tokens than a result may hold"):
        feed.finish(asked)


def test_rows_that_are_not_finite_have_no_numbers(params: dict[str, Any]) -> None:
    class Broken(ExampleRequest):
        def rows(self, site: Any, positions: Any) -> Tensor:
            rows = super().rows(site, positions)
            rows[positions == 2] = torch.nan
            return rows

    spec = request(params, {"layers": [1], "positions": [1, 2], "tokens": [4]}).info.spec
    read = Feed(LensConsumer(params, CONTEXT), HEAD).whole(Broken(spec, "broken"))["layers"]["1"]

    assert (read["ids"][1], read["tokens"][1], read["logprobs"][1]) == ([], [], [])
    assert (read["token_logprobs"][1], read["token_ranks"][1]) == ([None], [None])
    assert [len(read[name][0]) for name in ("ids", "tokens", "logprobs", "token_ranks")] == [10, 10, 10, 1]
    assert isinstance(read["token_ranks"][0][0], int)


def test_fewer_words_than_are_wanted_are_a_shorter_list_and_ranks_stay_known(params: dict[str, Any]) -> None:
    small = 28  # of two letters there are `ab` and `bb`
    words = [token for token in range(small) if len(Letters(small).shown(token)) > 1]
    consumer = LensConsumer(params, replace(CONTEXT, vocabulary=Letters(small)))
    raw = {"layers": [1], "top": 5, "tokens": [3], "words_only": True}
    head = FakeHead(HIDDEN, small)

    asked = request(params, raw, vocabulary=Letters(small))
    read = Feed(consumer, head).whole(asked)["layers"]["1"]

    logits = head.logits(head.norm(asked.rows(Site(1, HookPoint.POST_MLP), asked.wanted()).float()))
    for place, row in enumerate(logits.double()):
        best = sorted(words, key=lambda token: -float(row[token]))
        assert read["ids"][place] == best
        assert read["tokens"][place] == [Letters(small).shown(token) for token in best]
        np.testing.assert_allclose(read["logprobs"][place], row.log_softmax(0)[best], atol=1e-5)
        assert read["token_ranks"][place] == [sum(float(row[token] > row[3]) for token in words)]
    assert len(words) < 5


def test_more_tokens_than_the_vocabulary_has_are_a_shorter_list(params: dict[str, Any]) -> None:
    consumer = LensConsumer(params, replace(CONTEXT, vocabulary=Letters(6)))

    read = Feed(consumer, FakeHead(HIDDEN, 6)).whole(request(params, {"layers": [1]}, vocabulary=Letters(6)))

    assert all(sorted(row) == list(range(6)) for row in read["layers"]["1"]["ids"])
    assert all(len(row) == 6 for row in read["layers"]["1"]["logprobs"])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (3, r"capture\.lens: expected an object"),
        ({"head": 1}, r"capture\.lens\.head: unknown key; the consumer .* has lens, layers"),
        ({"lens": "x"}, r"capture\.lens\.lens: no such lens 'x'; configured: logit, j, t"),
        (
            {"lens": "j", "layers": [0, 1]},
            r"capture\.lens\.layers: the lens 'j' reads no layers \[1\] here, but \[0, 2\]",
        ),
        ({"layers": [0, 9]}, r"capture\.lens\.layers: .*9"),
        ({"layers": "some"}, r"capture\.lens\.layers: expected \"all\", a layer"),
        ({"layers": [4]}, r"capture\.lens\.layers.*4"),
        ({"top": 21}, r"capture\.lens\.top: expected a number from 0 to 20 \(parameter max_top\), got 21"),
        ({"top": True}, r"capture\.lens\.top"),
        ({"top": 0}, r"capture\.lens\.top: is 0, and there are no tokens"),
        ({"tokens": [1, 2, 3, 4]}, r"capture\.lens\.tokens: expected a list of up to 3 tokens"),
        ({"tokens": [60]}, r"capture\.lens\.tokens\[0\]: expected a token, as a text or an id below 60; got 60"),
        ({"tokens": [1, "bcd"]}, r"capture\.lens\.tokens\[1\]: 'bcd' is 3 tokens, \[1, 2, 3\]; give one"),
        ({"words_only": 1}, r"capture\.lens\.words_only: expected true or false"),
        ({"positions": "some"}, r"capture\.lens\.positions"),
    ],
    ids=str,
)
def test_requests_that_cannot_be_read_are_refused_by_field(params: dict[str, Any], raw: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request(params, raw)


def test_without_top_a_request_gets_what_is_allowed(params: dict[str, Any]) -> None:
    assert request(params, {}).info.spec.options["top"] == 10
    assert request({**params, "max_top": 4}, {}).info.spec.options["top"] == 4


@pytest.mark.parametrize(("raw", "field"), [({"tokens": ["b"]}, r"tokens\[0\]"), ({"words_only": True}, "words_only")])
def test_without_a_tokenizer_texts_are_refused_and_ids_serve(params: dict[str, Any], raw: Any, field: str) -> None:
    silent = Letters(VOCABULARY, has_texts=False)
    with pytest.raises(RequestError, match=rf"capture\.lens\.{field}: the engine was started without a tokenizer"):
        request(params, raw, vocabulary=silent)

    consumer = LensConsumer(params, replace(CONTEXT, vocabulary=silent))
    asked = request(params, {"tokens": [1], "layers": [0], "positions": [0]}, vocabulary=silent)
    read = Feed(consumer, FakeHead(HIDDEN, VOCABULARY, has_texts=False)).whole(asked)

    check(read["layers"]["0"], by_definition(asked, 0, "logit"), 10, [1])
    assert read["layers"]["0"]["tokens"] == [[None] * 10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lenses": {"logit": "x"}}, "lenses.logit: this is the name of the lens without a file"),
        ({"lenses": {"x": "/nowhere.safetensors"}}, r"lenses\.x: .*nowhere"),
        ({"max_top": 0}, "max_top: expected a number from 1 to 512, got 0"),
        ({"max_top": 513}, "max_top: expected a number from 1 to 512, got 513"),
        ({"max_values": 0}, "max_values: expected a number from 1 to 1073741824, got 0"),
        ({"nothing": 1}, "unknown field `nothing`"),
    ],
    ids=str,
)
def test_parameters_that_are_wrong_are_refused(params: dict[str, Any], change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LensConsumer.check_params({**params, **change})


def test_a_lens_of_another_model_is_refused_by_name(params: dict[str, Any]) -> None:
    narrow = replace(EXAMPLE_MODEL, hidden_size=8)
    with pytest.raises(ConfigError, match=r"lenses\.j: reads rows of 16 values; the model has 8"):
        LensConsumer.readouts(params, narrow)
    short = replace(EXAMPLE_MODEL, num_layers=2)
    with pytest.raises(ConfigError, match=r"lenses\.j: has the layers \[2\]; the model has 2"):
        LensConsumer.readouts(params, short)
    silent = replace(EXAMPLE_MODEL, sites=(Site(0, HookPoint.PRE_ATTN),))
    with pytest.raises(ConfigError, match=r"post_mlp, which is not captured here; add it to capture\.sites"):
        LensConsumer.readouts(params, silent)


def test_a_result_is_bounded_and_the_next_request_is_not_concerned(params: dict[str, Any]) -> None:
    feed = Feed(LensConsumer({**params, "max_values": 80}, CONTEXT), HEAD)
    long, short = (request(params, {"layers": [1]}, name, output=n) for name, n in (("long", 6), ("short", 4)))

    with pytest.raises(ConsumerError, match=r"80 \(parameter max_values\)"):
        feed.whole(long)

    assert len(feed.whole(short)["positions"]) == 8


def test_a_file_that_changed_after_the_start_answers_with_an_error(params: dict[str, Any]) -> None:
    feed = Feed(LensConsumer(params, CONTEXT), HEAD)
    save(params["lenses"]["j"], LensKind.JACOBIAN, {layer: -matrix for layer, matrix in JACOBIAN.items()})

    with pytest.raises(ConsumerError, match=r"'j': its file has changed .* restart the engine"):
        feed.whole(request(params, {"lens": "j"}))


def test_a_readout_without_a_head_is_refused_by_the_name_of_its_consumer(params: dict[str, Any]) -> None:
    readout = LensConsumer.readouts(params, EXAMPLE_MODEL)[Site(1, HookPoint.POST_MLP)]
    with pytest.raises(ConfigError, match=r"consumer 'lens': 1\.post_mlp: there is no model's head here"):
        bind(readout, 0, width=HIDDEN, device=torch.device("cpu"), name="consumer 'lens': 1.post_mlp")


@pytest.mark.parametrize("raw", [{"lens": "j", "layers": [0, 2], "top": 4, "tokens": ["b", 40]}, {"top": 2}], ids=str)
def test_files_hold_what_answers_have(params: dict[str, Any], tmp_path: Path, raw: dict[str, Any]) -> None:
    files = {"root": str(tmp_path / "files"), "reads": {"consumer": "lens", "params": params}}
    context = SpecContext(
        instance_name="files", model=EXAMPLE_MODEL, params=files, client_request_id="r", vocabulary=CONTEXT.vocabulary
    )
    payload = Feed(LensConsumer(params, CONTEXT), HEAD).whole(request(params, raw, "r"))
    consumer = FilesystemConsumer(files, CONTEXT)
    stored = Feed(consumer, HEAD).whole(ExampleRequest(FilesystemConsumer.validate_client_spec(raw, context), "r"))
    consumer.close(60)

    capture = open_capture(*stored["paths"])
    assert capture.positions.tolist() == payload["positions"]
    assert [str(site.layer) for site in capture] == list(payload["layers"])
    for site in capture:
        found = {name: rows.tolist() for name, rows in capture.outputs(site).items()}
        read = payload["layers"][str(site.layer)]
        assert found == {name: read[name] for name in ("ids", "logprobs", "token_logprobs", "token_ranks")}


def test_requests_that_asked_for_other_layers_beside_a_site_are_in_one_data_set(
    params: dict[str, Any], tmp_path: Path
) -> None:
    files = {"root": str(tmp_path / "files"), "reads": {"consumer": "lens", "params": params}}
    consumer = FilesystemConsumer(files, CONTEXT)
    for name, layers in (("a", [0, 2]), ("b", [2])):
        context = SpecContext(
            instance_name="files", model=EXAMPLE_MODEL, params=files, client_request_id=name, vocabulary=None
        )
        spec = FilesystemConsumer.validate_client_spec({"lens": "j", "layers": layers, "top": 4}, context)
        Feed(consumer, HEAD).whole(ExampleRequest(spec, name))
    consumer.close(60)

    data = open_dataset(tmp_path / "files", sites="2.post_mlp")

    assert sum(len(batch) for batch in data.batches("2.post_mlp")) == 16
    readout = data.readout("2.post_mlp")
    assert readout is not None
    assert readout.options["top"] == 4
