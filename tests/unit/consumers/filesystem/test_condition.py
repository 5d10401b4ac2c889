"""Requests that are recorded only if a probe fires: what is decided, what is stored, and that nothing else stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from headgate.capture.engine.access.access_key import AccessKey, digest_of
from headgate.capture.engine.requests.capture_request import check_spec
from headgate.capture.monitoring.stats import figures_of
from headgate.capture.probe import HiddenLayer, Probe, ProbeKind, save
from headgate.capture.schema.consumer import RequestLengths
from headgate.capture.schema.errors import CaptureFileError, ConfigError, ConsumerError, ForbiddenError, RequestError
from headgate.capture.schema.results import ReportContext
from headgate.capture.schema.sites import Site
from headgate.consumers.dump import app
from headgate.consumers.feed import ExampleRequest, make_block
from headgate.consumers.filesystem import FilesystemConsumer
from headgate.consumers.reader import open_captures, open_stored
from tests.fakes.capturing import HOOKS, Capturing, capturing, spec_context
from tests.fakes.clients import show

RNG = np.random.default_rng(1)
SITE = Site.parse("2.post_mlp")
MOOD = Probe(site=SITE, weight=RNG.normal(size=(1, 16)), bias=[0.5], threshold=0.25)  # type: ignore[arg-type]
COSINE = Probe(site=Site.parse("1.post_mlp"), kind="cosine", weight=RNG.normal(size=(1, 16)))  # type: ignore[arg-type]
WIDE = Probe(site=SITE, weight=RNG.normal(size=(1, 8)))  # type: ignore[arg-type]
CLASSES = Probe(site=SITE, weight=RNG.normal(size=(2, 16)), classes=("a", "b"))  # type: ignore[arg-type]
MLP = Probe(
    site=SITE,
    kind=ProbeKind.MLP,
    weight=RNG.normal(size=(1, 4)),  # type: ignore[arg-type]
    hidden=HiddenLayer(weight=RNG.normal(size=(4, 16)), bias=np.zeros(4), activation="relu"),  # type: ignore[arg-type]
)
ELSEWHERE = Probe(site=Site.parse("2.mlp_out"), weight=RNG.normal(size=(1, 16)))  # type: ignore[arg-type]


@pytest.fixture
def probes(tmp_path: Path) -> dict[str, str]:
    found = {}
    for name, probe in {"mood": MOOD, "cosine": COSINE}.items():
        found[name] = str(tmp_path / f"{name}.safetensors")
        save(found[name], probe)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "captures"


def scores_of(request: ExampleRequest, probe: Probe = MOOD) -> np.ndarray[Any, Any]:
    """Scores of the positions that the request wants, by the definition."""
    rows = request.rows(probe.site, request.wanted()).double().numpy()
    weight = probe.weight.astype(np.float64)[0]
    sums = rows @ weight
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(weight)
    return (sums / lengths if probe is COSINE else sums + probe.biases.astype(np.float64)[0]).astype(np.float32)


def middle(scores: np.ndarray[Any, Any], above: int) -> float:
    """A threshold with `above` scores above it."""
    ranked = np.sort(scores)[::-1]
    return float(ranked[above - 1] + ranked[above]) / 2


def left(root: Path) -> list[str]:
    """Files below a root, but locks."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != "lock")


def asked(files: Capturing, above: float | None = None, **further: Any) -> ExampleRequest:
    condition = {"probe": "mood", **({} if above is None else {"above": above}), **further.pop("condition", {})}
    return files.request({"if_probe": condition, **further.pop("raw", {})}, **further)


@pytest.mark.parametrize("layout", ["request", "raw", "shards"])
@pytest.mark.parametrize(("name", "probe"), [("mood", MOOD), ("cosine", COSINE)])
def test_a_request_on_which_the_probe_fires_is_stored_with_where(
    root: Path, probes: dict[str, str], layout: str, name: str, probe: Probe
) -> None:
    with capturing(root, layout=layout, threads=1, probes=probes) as files:
        scores = scores_of(asked(files, 0, prompt=20, output=30))[1:]
        above = middle(scores, 3)
        request = asked(files, above, prompt=20, output=30, condition={"probe": name, "above": above})
        above = middle(scores_of(request, probe)[1:], 3)
        request = asked(files, prompt=20, output=30, condition={"probe": name, "above": above})
        files.feed.begin(request)
        for start in range(0, 49, 7):
            files.feed.step({request: (start, start + 7)})
        payload = files.feed.finish(request)

    scores = scores_of(request, probe)
    fired = [at for at in range(1, 49) if scores[at] > above]
    best = 1 + int(scores[1:].argmax())
    assert payload["stored"] is True
    assert payload["if_probe"] == {
        **{"probe": name, "sha256": probe.sha256, "site": probe.site.name, "above": above, "pool": "token"},
        **{"num_scored": 48, "num_not_finite": 0, "num_fired": 3, "highest": float(scores[best]), "at": best},
        **{"positions": fired, "scores": [float(scores[at]) for at in fired]},
    }
    (capture,) = open_captures(root)
    assert capture.metadata["if_probe"] == payload["if_probe"]
    assert probe.site in capture.sites  # the rows that the scores were computed from
    for site in request.info.spec.sites:
        assert torch.equal(capture[site], request.rows(site, request.wanted()))
    assert open_stored(payload).num_rows == 49


@pytest.mark.parametrize("layout", ["request", "raw", "shards"])
@pytest.mark.parametrize("max_request_bytes", [None, 500], ids=["in_memory", "spilled"])
def test_nothing_stays_of_a_request_on_which_it_does_not_fire(
    root: Path, probes: dict[str, str], layout: str, max_request_bytes: int | None
) -> None:
    sizes = {"max_request_bytes": max_request_bytes, "max_tag_bytes": 45_000}
    with capturing(root, layout=layout, threads=1, probes=probes, **sizes) as files:
        above = float(scores_of(asked(files, 0, prompt=50))[1:].max())  # as high as the highest, and not above
        for _ in range(5):  # with what they take they would be too many for the tag
            request = asked(files, above, prompt=50, raw={"request_id": "same"})
            files.feed.begin(request)
            for start in range(53):
                files.feed.step({request: (start, start + 1)})
            payload = files.feed.finish(request)
            assert left(root) == []

    at = 1 + int(scores_of(request)[1:].argmax())
    facts = payload.pop("if_probe")
    assert payload == {
        **{"stored": False, "layout": layout, "paths": [], "sites": [], "num_rows": 0, "num_bytes": 0, "durable": None}
    }
    assert (facts["highest"], facts["at"], facts["num_fired"], facts["positions"]) == (above, at, 0, [])
    with pytest.raises(CaptureFileError, match=rf"nothing was recorded: .*'mood' is .*\(position {at}\), not above"):
        open_stored({**payload, "if_probe": facts})


def test_requests_decide_for_themselves_and_leave_others_alone(root: Path, probes: dict[str, str]) -> None:
    with capturing(root, threads=1, probes=probes) as files:
        samples = [asked(files, 0, raw={"request_id": "a"}, sample=(index, 2), prompt=9) for index in range(2)]
        highest = [float(scores_of(sample)[1:].max()) for sample in samples]
        loud = int(np.argmax(highest))
        samples = [
            asked(files, sum(highest) / 2, raw={"request_id": "a"}, sample=(index, 2), prompt=9) for index in range(2)
        ]
        plain = files.request({"request_id": "plain"}, client_id="plain", prompt=9)
        everybody = [*samples, plain]
        files.feed.begin(*everybody)
        for start in range(0, 12, 4):
            files.feed.step(dict.fromkeys(everybody, (start, start + 4)), sites_per_block=2)
        payloads = [files.feed.finish(one) for one in everybody]

    figures = {figure.name: figure.value for figure in figures_of(files.feed.consumer)}
    assert figures == {"if_probe_recorded": 1, "if_probe_discarded": 1}
    assert [payload.get("stored") for payload in payloads] == [index == loud for index in range(2)] + [None]
    captures = {capture.name: capture for capture in open_captures(root)}
    assert set(captures) == {f"a-{loud}", "plain"}
    assert captures["plain"].metadata["if_probe"] is None
    for site in plain.info.spec.sites:
        assert torch.equal(captures["plain"][site], plain.expected().rows[site])


def test_with_the_pool_last_prompt_the_row_of_the_last_token_of_the_prompt_decides(
    root: Path, probes: dict[str, str]
) -> None:
    with capturing(root, threads=1, probes=probes) as files:
        last = {"pool": "last_prompt"}
        score = float(scores_of(asked(files, 0, prompt=6))[5])
        above, below = (
            files.feed.whole(asked(files, score + by, prompt=6, condition=last, raw={"request_id": name}))
            for name, by in (("above", 1e-3), ("below", -1e-3))
        )

    assert (above["stored"], above["if_probe"]["highest"], above["if_probe"]["at"]) == (False, score, 5)
    assert (below["stored"], below["if_probe"]["positions"], below["if_probe"]["num_scored"]) == (True, [5], 1)
    assert open_captures(root)["below"].num_rows == 9  # the others are recorded with it


class Odd(ExampleRequest):
    """A request with rows of its own at some positions."""

    odd: dict[int, float]

    def rows(self, site: Any, positions: Any) -> torch.Tensor:
        rows = super().rows(site, positions)
        for position, value in self.odd.items():
            rows[positions == position] = value
        return rows


def odd(files: Capturing, above: float, values: dict[int, float], **shape: Any) -> Odd:
    plain = asked(files, above, **shape)
    found = Odd(plain.info.spec, plain.info.request_id, **shape)
    found.info, found.odd = plain.info, values
    return found


def test_rows_that_are_not_finite_the_first_one_and_those_computed_in_vain_do_not_fire(
    root: Path, probes: dict[str, str]
) -> None:
    huge = 1e30 * float(np.sign(MOOD.weight.sum()))
    with capturing(root, threads=1, probes=probes) as files:
        request = odd(files, 1e9, {0: huge, 2: float("nan"), 3: float("inf"), 8: huge}, prompt=5, output=4)
        files.feed.begin(request)
        files.feed.step({request: (0, 9)})  # the request ends after 8 rows
        quiet = files.feed.finish(request)
        request = odd(files, 1e9, {2: float("nan"), 3: huge}, prompt=5, output=4)
        loud = files.feed.whole(request)

    found = quiet["if_probe"]
    assert (quiet["stored"], found["num_scored"], found["num_not_finite"]) == (False, 7, 2)
    assert found["highest"] == pytest.approx(float(np.delete(scores_of(request), [0, 2, 3]).max()))
    assert (loud["stored"], loud["if_probe"]["positions"], loud["if_probe"]["num_not_finite"]) == (True, [3], 1)
    assert json.loads(json.dumps([quiet, loud], allow_nan=False)) == [quiet, loud]


def test_only_rows_that_would_be_recorded_decide_where_some_were_lost(root: Path, probes: dict[str, str]) -> None:
    with capturing(root, threads=1, probes=probes) as files:
        request = odd(files, 1e9, {2: 1e30 * float(np.sign(MOOD.weight.sum()))}, prompt=5, output=4)
        files.feed.begin(request)
        files.feed.write([make_block((SITE,), [(request, np.array([2]))])])  # lost at the other sites
        files.feed.step({request: (3, 8)})
        payload = files.feed.finish(request, dropped_rows=3)

    assert (payload["stored"], payload["if_probe"]["num_scored"]) == (False, 5)
    assert left(root) == []


@pytest.mark.parametrize("keep_aborted", [True, False])
def test_aborted_requests_are_recorded_as_without_a_condition_if_it_fired(
    root: Path, probes: dict[str, str], keep_aborted: bool
) -> None:
    with capturing(root, threads=1, probes=probes, keep_aborted=keep_aborted) as files:
        request = asked(files, -1e9, status="abort")
        if keep_aborted:
            assert files.feed.whole(request)["stored"] is True
        else:
            with pytest.raises(ConsumerError, match="keep_aborted=false"):
                files.feed.whole(request)
        assert files.feed.whole(asked(files, 1e9, status="stop", raw={"request_id": "b"}))["stored"] is False

    assert len(left(root)) == keep_aborted


def test_of_many_positions_the_first_are_listed(root: Path, probes: dict[str, str]) -> None:
    with capturing(root, threads=1, probes=probes) as files:
        payload = files.feed.whole(asked(files, -1e9, prompt=400))

    assert payload["if_probe"]["num_fired"] == 402
    assert payload["if_probe"]["positions"] == list(range(1, 65))


def refused(probes: dict[str, str], raw: Any, **further: Any) -> str:
    params = {"root": "captures", "probes": probes}
    with pytest.raises(RequestError) as caught:
        FilesystemConsumer.validate_client_spec({"hooks": HOOKS, "if_probe": raw, **further}, spec_context(params))
    return f"{caught.value.field}: {caught.value}"


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        ("mood", "", "expected"),
        ({"above": 1}, "", "expected"),
        ({"probe": "anger"}, ".probe", "configured: cosine, mood"),
        ({"probe": ["mood"]}, ".probe", "no such probe"),
        ({"probe": "mood", "below": 1}, ".below", "unknown key"),
        ({"probe": "cosine"}, ".above", "no threshold of its own"),
        ({"probe": "mood", "above": "high"}, ".above", "finite number"),
        ({"probe": "mood", "above": True}, ".above", "finite number"),
        ({"probe": "mood", "above": float("nan")}, ".above", "finite number"),
        ({"probe": "mood", "above": float("-inf")}, ".above", "finite number"),
        ({"probe": "mood", "above": 10**400}, ".above", "finite number"),
        ({"probe": "mood", "above": None}, ".above", "finite number, got None"),
        ({"probe": "mood", "pool": "mean"}, ".pool", "token or last_prompt"),
    ],
)
def test_wrong_conditions_are_refused_by_field(probes: dict[str, str], raw: Any, field: str, message: str) -> None:
    told = refused(probes, raw)

    assert told.startswith(f"capture.files.if_probe{field}: ")
    assert message in told


def test_a_condition_needs_whole_rows_and_the_row_that_decides(probes: dict[str, str]) -> None:
    columns = refused(probes, {"probe": "mood"}, hooks={"post_mlp": {"layers": [2], "columns": [0, 8]}})
    context = spec_context({"root": "captures", "probes": probes})
    raw = {"hooks": HOOKS, "if_probe": {"probe": "mood", "pool": "last_prompt"}}
    for positions in ("all_generated", "last_prompt"):
        spec = FilesystemConsumer.validate_client_spec({**raw, "positions": positions}, context)
        spec = spec.with_positions(lambda selector: selector.resolve(5, "positions"))
        lengths = RequestLengths(num_prompt=5, max_tokens=4, num_samples=1)
        if positions == "last_prompt":
            FilesystemConsumer.check_lengths(spec, context, lengths)
        else:
            with pytest.raises(RequestError, match="last_prompt") as caught:
                FilesystemConsumer.check_lengths(spec, context, lengths)

    assert columns.startswith("capture.files.hooks: ")
    assert caught.value.field == "capture.files.if_probe.pool"


@pytest.mark.parametrize(
    ("positions", "pool"), [([0], "token"), ({"stop": 1}, "token"), ("all_generated", "last_prompt")]
)
def test_a_request_whose_rows_cannot_decide_is_refused(probes: dict[str, str], positions: Any, pool: str) -> None:
    context = spec_context({"root": "captures", "probes": probes})
    raw = {"hooks": HOOKS, "positions": positions, "if_probe": {"probe": "mood", "pool": pool}}
    spec = FilesystemConsumer.validate_client_spec(raw, context)
    lengths = RequestLengths(num_prompt=5, max_tokens=4, num_samples=1)

    with pytest.raises(RequestError, match=f"is {pool}, and `positions`") as caught:
        FilesystemConsumer.check_lengths(spec, context, lengths)
    assert caught.value.field == "capture.files.if_probe.pool"


def test_without_a_pool_the_rows_that_the_probe_was_made_for_decide(tmp_path: Path) -> None:
    probes = {}
    for pooling in ("token", "last_prompt", "prompt_mean"):
        probes[pooling] = str(tmp_path / f"{pooling}.safetensors")
        save(probes[pooling], replace(MOOD, pooling=pooling))
    context = spec_context({"root": "captures", "probes": probes})

    def pool(name: str, **given: Any) -> Any:
        raw = {"hooks": HOOKS, "if_probe": {"probe": name, **given}}
        return FilesystemConsumer.validate_client_spec(raw, context).options["if_probe"]["pool"]

    assert [pool("token"), pool("last_prompt"), pool("last_prompt", pool="token")] == ["token", "last_prompt", "token"]
    assert pool("prompt_mean", pool="token", above=1) == "token"
    assert refused(probes, {"probe": "prompt_mean", "above": 1}).startswith("capture.files.if_probe.pool: ")
    told = refused(probes, {"probe": "prompt_mean", "pool": "token"})  # its threshold is one of means
    assert told.startswith("capture.files.if_probe.above: ")
    assert "pooling prompt_mean" in told


@pytest.fixture
def no_caller() -> Iterator[None]:
    yield
    show()


@pytest.mark.usefixtures("no_caller")
def test_a_key_that_does_not_allow_the_probes_site_is_told_which_field_has_it(probes: dict[str, str]) -> None:
    raw = {"hooks": HOOKS, "if_probe": {"probe": "mood"}}
    spec = FilesystemConsumer.validate_client_spec(raw, spec_context({"root": "captures", "probes": probes}))
    for allowed, field in (({1, 3}, "if_probe"), ({2}, "hooks.post_mlp")):
        sites: Any = {"post_mlp": frozenset(allowed), "final_norm": "all"}
        show(AccessKey(name="alice", sha256=digest_of("alice"), roles=("capture",), sites=sites))
        with pytest.raises(ForbiddenError, match="may not capture the site") as caught:
            check_spec(FilesystemConsumer, spec, "capture.files")
        assert caught.value.field == f"capture.files.{field}"


def test_without_a_probe_in_the_configuration_the_error_says_where_to_name_one() -> None:
    assert "consumer's parameter probes" in refused({}, {"probe": "mood"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hooks": None}, "if_probe .* give hooks"),
        ({"if_probe": {"probe": "nobody"}}, "if_probe.probe"),
        ({"if_probe": {"probe": "cosine"}}, "if_probe.above"),
        ({"probes": {"mood": "gone.safetensors"}}, "probes.mood"),
        ({"if_probe": {"probe": "mood", "above": 10**400}}, "if_probe.above: expected a finite number"),
        ({"probes": CLASSES}, "2 classes"),
        ({"probes": MLP}, "probes.mood: is an MLP"),
    ],
)
def test_wrong_parameters_are_refused_by_name(
    tmp_path: Path, probes: dict[str, str], change: dict[str, Any], message: str
) -> None:
    params = {"root": "captures", "hooks": HOOKS, "probes": probes, "if_probe": {"probe": "mood"}, **change}
    if isinstance(params["probes"], Probe):
        save(tmp_path / "other.safetensors", params["probes"])
        params["probes"] = {"mood": str(tmp_path / "other.safetensors")}

    with pytest.raises(ConfigError, match=message):
        FilesystemConsumer.check_params(params)


@pytest.mark.parametrize(
    ("probe", "settings", "message"),
    [
        (WIDE, {}, "reads rows of 8 values; the model has 16"),
        (ELSEWHERE, {}, "2.mlp_out is not captured here"),
        (MOOD, {"stage": (0, 2)}, "location=driver"),
    ],
)
def test_probes_that_cannot_decide_here_keep_the_engine_from_starting(
    root: Path, tmp_path: Path, probe: Probe, settings: dict[str, Any], message: str
) -> None:
    save(tmp_path / "probe.safetensors", probe)

    with pytest.raises(ConfigError, match=message):
        Capturing(root, probes={"mood": str(tmp_path / "probe.safetensors")}, **settings)


COLUMNS = {"post_mlp": {"layers": [2], "columns": [0, 8]}}


@pytest.mark.parametrize(
    ("hooks", "positions", "pool", "message"),
    [
        (COLUMNS, "all", "token", "hooks: selects columns of 2.post_mlp"),
        (HOOKS, "all_generated", "last_prompt", "if_probe.pool: is last_prompt, .* leaves"),
        (HOOKS, [-3], "last_prompt", "if_probe.pool: is last_prompt"),
        (HOOKS, {"start": -4, "stop": -1}, "last_prompt", "if_probe.pool: is last_prompt"),
        (HOOKS, [-3, 5], "last_prompt", None),
        (HOOKS, [5], "last_prompt", None),
        (HOOKS, [1, 3, -4], "last_prompt", None),
        (HOOKS, {"start": 5, "stop": 7}, "last_prompt", None),
        (HOOKS, [0], "token", "if_probe.pool: is token, .* position 0 alone"),
        (HOOKS, [-3], "token", None),
        (HOOKS, "last_prompt", "token", None),
        (HOOKS, {"start": 10}, "last_prompt", None),
        (HOOKS, {"stop": 9}, "last_prompt", None),
        (HOOKS, {"role": "user"}, "last_prompt", None),
    ],
)
def test_a_condition_of_the_operator_that_records_nothing_keeps_the_engine_from_starting(
    root: Path, probes: dict[str, str], hooks: Any, positions: Any, pool: str, message: str | None
) -> None:
    params = {"probes": probes, "hooks": hooks, "positions": positions, "if_probe": {"probe": "mood", "pool": pool}}
    if message is None:
        Capturing(root, **params).close()
        return

    with pytest.raises(ConfigError, match=f"^filesystem: {message}"):
        Capturing(root, **params)


def test_a_file_that_has_changed_ends_requests_with_an_error(root: Path, probes: dict[str, str]) -> None:
    with capturing(root, probes=probes) as files:
        save(probes["mood"], replace(MOOD, threshold=0.5))  # as another start of the front end would read it
        request = asked(files, -1e9)

        with pytest.raises(ConsumerError, match="has changed since the engine started"):
            files.feed.whole(request)
        assert left(root) == []


def test_the_operator_can_record_what_a_probe_fires_on(probes: dict[str, str]) -> None:
    params = {"root": "captures", "hooks": {"post_mlp": [0]}, "probes": probes, "if_probe": {"probe": "mood"}}

    spec = FilesystemConsumer.global_capture_spec(spec_context(params))

    assert spec is not None
    assert [site.name for site in spec.sites] == ["0.post_mlp", "2.post_mlp"]
    wanted = {"probe": "mood", "sha256": MOOD.sha256, "above": 0.25, "pool": "token"}
    assert spec.options["if_probe"] == wanted
    assert FilesystemConsumer.offers(params) == {"if_probe": ["mood", "cosine"]}
    asking = FilesystemConsumer.validate_client_spec({"hooks": {"post_mlp": [0]}}, spec_context(params))
    assert "if_probe" not in asking.options  # who asks without a condition is recorded


def test_a_root_in_an_object_store_gets_what_fired_and_nothing_else(tmp_path: Path, probes: dict[str, str]) -> None:
    store = fsspec.filesystem("memory")
    with capturing("memory://fires/run", spool=str(tmp_path / "spool"), probes=probes) as files:
        quiet, loud = (
            files.feed.whole(asked(files, above, raw={"request_id": name}))
            for name, above in (("quiet", 1e9), ("loud", -1e9))
        )

    assert (quiet["stored"], quiet["paths"]) == (False, [])
    assert (loud["stored"], loud["uploaded"]) == (True, True)
    assert store.find("/fires") == ["/fires/run/default/loud.safetensors"]
    store.rm("/fires", recursive=True)


@pytest.fixture
def recorded(root: Path, probes: dict[str, str]) -> Path:
    """A capture by the probe `mood`, one by `cosine` and one without a condition."""
    with capturing(root, threads=1, probes=probes) as files:
        for name in ("mood", "cosine"):
            files.feed.whole(
                asked(files, condition={"probe": name, "above": -1e9}, raw={"request_id": name}, client_id=name)
            )
        files.feed.whole(files.request({"request_id": "plain"}, client_id="plain"))
    return root


def context(root: Path, allows_site: Callable[[Site], bool] = lambda site: True, **query: str) -> ReportContext:
    return ReportContext(
        params={"root": str(root)},
        query=query,
        allows_site=allows_site,
        allows_tag=lambda tag: True,
        allows_owner=lambda owner: True,
    )


def test_lists_show_and_filter_what_fired(recorded: Path) -> None:
    everything = FilesystemConsumer.list_captures(context(recorded))["captures"]
    (mood,) = FilesystemConsumer.list_captures(context(recorded, probe="mood"))["captures"]
    one = FilesystemConsumer.describe_capture(context(recorded), "default", "mood.safetensors")

    stored = open_captures(recorded)["mood"].metadata["if_probe"]
    assert {each["request_id"]: (each["if_probe"] or {}).get("probe") for each in everything} == {
        **{"mood": "mood", "cosine": "cosine", "plain": None}
    }
    assert mood["if_probe"] == one["metadata"]["if_probe"] == stored
    assert stored["positions"] == list(range(1, 8))


def test_scores_of_a_site_that_the_key_does_not_allow_are_not_shown(recorded: Path) -> None:
    def allows(site: Site) -> bool:
        return site != SITE

    listed = FilesystemConsumer.list_captures(context(recorded, allows))["captures"]
    one = FilesystemConsumer.describe_capture(context(recorded, allows), "default", "mood.safetensors")
    sent = FilesystemConsumer.send_capture(context(recorded, allows), "default", "mood.safetensors")

    assert [each["if_probe"] for each in listed if each["request_id"] == "mood"] == [None]
    assert "if_probe" not in one["metadata"]
    assert b"if_probe" not in b"".join(sent.pieces)
    assert FilesystemConsumer.list_captures(context(recorded, allows, probe="mood"))["captures"] == []


def test_dump_shows_and_filters_what_fired(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    runner = CliRunner()
    listed = json.loads(runner.invoke(app, ["ls", str(recorded), "--probe", "mood", "--json"]).stdout)
    told = runner.invoke(app, ["show", str(recorded), "mood"]).stdout
    plain = runner.invoke(app, ["show", str(recorded), "plain"]).stdout

    assert [each["request_id"] for each in listed] == ["mood"]
    facts = listed[0]["if_probe"]
    assert "mood above -1e+09 on 7 of 7 rows of 2.post_mlp: 1, 2, 3, 4, 5, 6, 7" in told
    assert f"highest {facts['highest']:.4g} at {facts['at']}" in told
    assert "fired" not in plain
