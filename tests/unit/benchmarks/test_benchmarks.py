"""The pure parts of the benchmarks: statistics, tables, what is asked, what is read back, and options."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from headgate.capture.engine.commands.verify import verify
from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.steering.config import SteeringConfig
from headgate.steering.documents.operations import read_ops
from headgate.steering.programs.program import Program
from tests.benchmarks import bench_kernels, gpu_call, suite
from tests.benchmarks.figures import Answer, Round, percentile, ratios, spread, summarize, summary, tables
from tests.benchmarks.gpu_call import SIDE_BY_SIDE
from tests.benchmarks.load import Raw, Share, events, read, send_all
from tests.benchmarks.models import MODELS, ModelSize, size_of
from tests.benchmarks.operations import NUM_SITES, op_sites, operations
from tests.benchmarks.servers import FEATURES, SINKS, Usage, counters, delays, publish_plugins, start_facts
from tests.benchmarks.suite import jobs_of, rounds_of
from tests.benchmarks.suite_http import Run, cost_figures, cpu_figures, delay_figures, read_options, runnable
from tests.benchmarks.turns import LONG, Engine
from tests.benchmarks.workload import HOOKS, MODES, SHAPES, Asked, chosen, listed, packed, server_of

SIZE = ModelSize(num_layers=8, hidden=16, vocabulary=5000)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, 100 * share)), abs=1e-6)


def test_quartiles_of_two_values_lie_between_them() -> None:
    assert spread([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert math.isnan(percentile([], 0.5))


def test_latencies_count_from_sending_and_tokens_from_the_first_sent_to_the_last_closed() -> None:
    answers = [Answer(10, 10.1, 11.1, 11.2, 11), Answer(10.5, 10.7, 12.7, 13.0, 21), Answer(0, 0, 0, 99, 0, error="no")]

    found = summarize(answers)

    assert (found["requests"], found["errors"]) == (3, 1)
    assert found["wall_s"] == pytest.approx(3.0)
    assert found["tok_s"] == pytest.approx(32 / 3)
    assert found["ttft_p50"] == pytest.approx(150)
    assert found["tpot_p50"] == pytest.approx(100)
    assert found["e2e_p99"] == pytest.approx(2487, abs=1)
    assert not any(name.startswith("tpot") for name in summarize([Answer(0, 1, 1, 1, 1)]))


def test_times_between_tokens_are_those_of_all_requests() -> None:
    answers = [Answer(0, 1, 3, 3, 3, gaps=(0.5, 1.5)), Answer(0, 1, 2, 2, 2, gaps=(1.0,))]

    assert summarize(answers)["itl_p50"] == pytest.approx(1000)
    assert "itl_p50" not in summarize([Answer(0, 1, 1, 1, 1)])


def test_requests_of_an_open_loop_arrive_by_chance_at_their_share_of_the_capacity() -> None:
    shape = SHAPES["open-50"].at_capacity(80.0, seconds=50)

    times = shape.arrivals(seed=1)

    assert (shape.rate, shape.requests) == (40.0, 2000)
    assert times == sorted(times) == shape.arrivals(seed=1) != shape.arrivals(seed=2)
    assert times[-1] == pytest.approx(50, rel=0.1)
    gaps = np.diff(times)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.1)  # as those of a Poisson process
    assert SHAPES["crowd"].arrivals(seed=1) == []


def test_requests_of_an_open_loop_count_from_their_arrival() -> None:
    asked = Asked(MODES["stock"], SHAPES["tiny"], SIZE, "m", seed=1)
    share = Share("http://127.0.0.1:1/none", asked, first=0, step=1, in_flight=1, arrivals=(0.0, 0.1))

    (_, raw), (_, late) = asyncio.run(send_all(share, [(1, "application/json", b"{}")] * 2))

    assert late.sent == pytest.approx(raw.sent + 0.1)
    assert raw.status == late.status == 0
    assert "ClientConnectorError" in read(late, tokens=1).error


def test_costs_are_cpu_milliseconds_of_each_process_for_a_request() -> None:
    before = {"api": Usage(1.0, 5, 5, 5), "engine": Usage(2.0)}
    after = {"api": Usage(1.5, 2**20, 7, 3), "engine": Usage(3.0), "capture": Usage(0.25)}

    found = cost_figures(before, after, requests=100)

    assert (found["api_ms"], found["engine_ms"], found["capture_ms"]) == (5.0, 10.0, 2.5)
    assert (found["api_rss_mib"], found["api_files"], found["api_threads"]) == (1, 7, 3)
    assert cpu_figures(before, after, 0.5) == {"api_cpu": 1.0, "engine_cpu": 2.5}


def test_waiting_for_files_is_no_cost_of_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"api": Usage(), "engine": Usage(), "capture": Usage()}
    server: Any = SimpleNamespace(name="capture", url="", usage=lambda: dict(used), metrics=dict, delays=dict)
    load: Any = SimpleNamespace()
    run = Run(read_options(["m", "out"]), SIZE, {"capture": server}, load)

    def answers(*_: object) -> tuple[list[Answer], float]:
        used.update(api=Usage(1.0), engine=Usage(2.0), capture=Usage(0.5))
        return [Answer(0.0, 0.1, 0.9, 1.0, 10)] * 10, 0.1

    def drains(*_: object) -> dict[str, float]:
        used.update(api=Usage(4.0), capture=Usage(0.75))
        return {}

    load.run = answers
    monkeypatch.setattr(Run, "_captured", drains)

    found = run.measure(1, "1 layer", SHAPES["tiny"])

    assert (found["api_ms"], found["engine_ms"], found["capture_ms"]) == (100.0, 200.0, 75.0)


def rounds() -> list[Round]:
    """Stock gets slower from round to round, and the mode takes a tenth more each time; once stock is missing."""
    made = []
    for number, value in enumerate([10.0, 20.0, 40.0], start=1):
        made.append(Round(number, "chat", "mode", {"tpot_p50": 1.1 * value, "dropped": 0}))
        if number != 3:
            made.append(Round(number, "chat", "stock", {"tpot_p50": value}))
    return made


def test_modes_are_compared_within_a_round() -> None:
    assert ratios(rounds(), "chat", "mode", "tpot_p50", "stock") == pytest.approx([1.1, 1.1])
    found = summary(rounds(), "stock")["chat"]["mode"]
    assert found["to_base"]["tpot_p50"] == pytest.approx([1.1, 1.1, 1.1])
    assert found["median"]["tpot_p50"] == pytest.approx(statistics.median([11, 22, 44]))


def test_the_table_has_a_line_for_each_mode_and_compares_all_but_stock() -> None:
    head, ours, stock = tables(rounds(), "stock")

    assert head.split() == ["chat", "rounds", "tpot_p50", "dropped"]
    assert ours.split()[:4] == ["mode", "3", "22", "+10.0%"]
    assert stock.split() == ["stock", "2", "15"]


@given(st.integers(1, 40), st.integers(0, 3))
def test_events_of_a_stream_are_found_however_it_is_cut(cut: int, num_results: int) -> None:
    told = {"choices": [], "capture_results": {"files": {"status": "ok", "error": None, "dropped_rows": num_results}}}
    documents = [*({"choices": [{"text": f"w{i}"}]} for i in range(3)), {"usage": {"completion_tokens": 3}}, told]
    stream = "".join(f"data: {json.dumps(document)}\n\n" for document in documents).encode() + b"data: [DONE]\n\n"
    chunks = [(float(at), stream[at : at + cut]) for at in range(0, len(stream), cut)]

    found = list(events(chunks))
    answer = read(Raw(-1.0, 200, chunks, 999.0), tokens=3)

    assert [document for _, document in found] == documents
    assert (answer.error, answer.tokens, answer.dropped_rows) == ("", 3, num_results)
    assert (answer.first, answer.last) == (found[0][0], found[2][0])


@pytest.mark.parametrize(
    ("status", "stream", "error"),
    [
        (400, b'{"error": "bad"}', "HTTP 400"),
        (200, b'data: {"error": {"message": "gone"}}\n\n', "gone"),
        (200, b'data: {"choices": [{"text": "a"}]}\n\ndata: {"usage": {"completion_tokens": 2}}\n\n', "expected 3"),
        (200, b'data: {"capture_results": {"f": {"status": "error", "error": "disk full"}}}\n\n', "f: disk full"),
    ],
    ids=["refused", "failed", "cut", "lost"],
)
def test_an_answer_that_is_not_whole_is_an_error(status: int, stream: bytes, error: str) -> None:
    assert error in read(Raw(0.0, status, [(1.0, stream)], 2.0), tokens=3).error


@pytest.mark.parametrize("name", ["shared list", "16 configs", "16 msgpack"])
def test_bodies_of_every_form_hold_the_same_vectors(name: str) -> None:
    asked = Asked(MODES[name], SHAPES["tiny"], SIZE, "m", seed=3)
    media_type, body = asked.body(1)
    document = msgspec.msgpack.decode(body) if "msgpack" in media_type else msgspec.json.decode(body)
    config = (3 * SHAPES["tiny"].requests + 1) % MODES[name].configs

    given = document["steering_vectors"]["post_mlp"]

    if name == "shared list":
        assert given == listed(config, SIZE)["post_mlp"]
    else:
        data = given["data"] if isinstance(given["data"], bytes) else base64.b64decode(given["data"])
        assert data == packed(config, SIZE)["post_mlp"]["data"]
        assert len(data) == 2 * SIZE.num_layers * SIZE.hidden
    assert document["steering_vectors"].keys() == set(HOOKS)
    assert len(document["prompt"]) == SHAPES["tiny"].prompt


@pytest.mark.parametrize("name", list(SINKS))
def test_servers_find_the_consumers_that_leave_work_undone(name: str, tmp_path: Path) -> None:
    publish_plugins(tmp_path)
    points = [point for one in distributions(path=[str(tmp_path)]) for point in one.entry_points]
    found = {point.name: point for point in points if point.group == "vllm.capture_consumers"}
    context = ConsumerContext(instance_name=name, model=EXAMPLE_MODEL)
    (mode,) = (mode for mode in MODES.values() if mode.consumer == name)
    asked = Asked(mode, SHAPES["tiny"], SIZE, "m", seed=1)
    capture = msgspec.json.decode(asked.body(0)[1])["capture"]
    params = {"root": str(tmp_path / "files")}

    consumer = found[name].load()
    consumer.check_params(params)
    spec = consumer.validate_client_spec(
        {**capture[name], "hooks": {"post_mlp": [1]}},
        SpecContext(instance_name=name, model=EXAMPLE_MODEL, params=params, client_request_id="a"),
    )
    feed = Feed(consumer(params, context))

    assert found.keys() == SINKS.keys()
    assert capture.keys() == {name}
    assert feed.whole(ExampleRequest(spec, "engine-a")) == {}
    feed.consumer.close(TIMEOUT_S)
    assert not list((tmp_path / "files").glob("run*"))


def test_parts_of_a_capture_are_measured_only_when_they_are_named() -> None:
    arguments = ["m", "out", "--modes", "stock", "1 layer cut"]

    assert "1 layer cut" not in read_options(["m", "out"]).modes
    assert read_options(arguments).modes == ["stock", "1 layer cut"]
    assert "1 layer cut" not in suite.ENGINE_MODES


def test_requests_that_come_and_go_differ_in_length_and_others_do_not() -> None:
    chat, decode = SHAPES["chat"], SHAPES["decode"]

    lengths = [chat.tokens_of(index) for index in range(2000)]
    bodies = [msgspec.json.decode(Asked(MODES["stock"], chat, SIZE, "m", seed).body(7)[1]) for seed in (1, 2)]

    assert (min(lengths), max(lengths)) == (chat.tokens // 2, chat.most_tokens)
    assert abs(sum(lengths) / len(lengths) - chat.tokens) < 0.03 * chat.tokens
    assert [body["max_tokens"] for body in bodies] == [chat.tokens_of(7)] * 2
    assert {decode.tokens_of(index) for index in range(9)} == {decode.tokens} == {decode.most_tokens}


def test_a_prompt_with_a_period_repeats_it_to_its_whole_length() -> None:
    shape = SHAPES["repeats"]._replace(prompt=70, period=32)

    prompt = msgspec.json.decode(Asked(MODES["stock"], shape, SIZE, "m", seed=1).body(0)[1])["prompt"]

    assert len(prompt) == 70
    assert prompt[32:] == prompt[:38]
    assert len({*prompt[:32]}) > 16


def test_no_two_prompts_begin_alike() -> None:
    asked = [Asked(MODES["stock"], shape, SIZE, "m", seed) for shape in SHAPES.values() for seed in (1, 2)]

    begins = [tuple(msgspec.json.decode(one.body(index)[1])["prompt"][:16]) for one in asked for index in range(4)]

    assert len(set(begins)) == len(begins)


def test_requests_bring_as_many_configurations_as_their_mode_says() -> None:
    asked = Asked(MODES["4 configs"], SHAPES["chat"], SIZE, "m", seed=1)

    bodies = {json.dumps(msgspec.json.decode(asked.body(index)[1])["steering_vectors"]) for index in range(8)}

    assert len(bodies) == 4


def test_each_request_brings_operations_of_its_own_to_the_op_sites_of_the_server() -> None:
    asked = Asked(MODES["4 ops"], SHAPES["decode"], SIZE, "m", seed=1)
    documents = [msgspec.json.decode(asked.body(index)[1]) for index in range(64)]

    ops = [document["steering_ops"] for document in documents]

    assert len({json.dumps(one) for one in ops}) == 64
    assert "steering_vectors" not in documents[0]
    steerable = SteeringConfig(op_sites=op_sites(SIZE)).steerable(
        num_layers=SIZE.num_layers, hidden_size=SIZE.hidden, dtype="bfloat16"
    )
    for brought in (ops[0], operations(64, SIZE, 4)):
        found = read_ops({"steering_ops": brought}, steerable, steerable.op_sites, steerable.max_ops_per_site)
        assert found is not None
        assert isinstance(found.prefill, Program)
        assert (len(found.prefill.sites), found.prefill.num_rows) == (4 * NUM_SITES, 5)


def test_layers_are_spread_over_the_model() -> None:
    gemma = ModelSize(34, 2560, 262144)
    assert (chosen("one", gemma), chosen("four", gemma), chosen("all", gemma)) == ([17], [4, 12, 21, 29], "all")


def test_a_mode_runs_on_the_server_with_the_least_beyond_what_it_needs() -> None:
    few = {name: FEATURES[name] for name in ("stock", "both")}

    assert server_of(MODES["16 configs"], FEATURES) == "steering"
    assert server_of(MODES["16 configs"], few) == "both"
    assert server_of(MODES["both"], FEATURES) == "both"
    assert server_of(MODES["installed"], few) is None
    assert {server_of(mode, FEATURES) for mode in MODES.values()} == set(FEATURES)
    assert "installed" not in runnable(list(MODES), ["stock", "both"])


def test_delays_of_one_round_are_means_of_what_vllm_clocked_in_it() -> None:
    def page(ttft: float, queued: float, count: int) -> str:
        return (
            f'vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} {ttft}\n'
            f'vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {count}.0\n'
            f'vllm:request_queue_time_seconds_sum{{engine="0",model_name="m"}} {queued}\n'
            f'vllm:request_queue_time_seconds_count{{engine="0",model_name="m"}} {count}.0\n'
            'vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 0.0\n'
        )

    before, after = delays(page(1.0, 0.5, 10)), delays(page(2.0, 0.6, 30) + page(1.0, 0.0, 0))

    assert delay_figures(before, after) == pytest.approx({"server_ttft": 100.0, "queued": 5.0, "prefilled": 0.0})
    assert delay_figures(after, after) == {}


def test_the_share_of_drafts_that_a_round_accepts_is_summed_over_engines() -> None:
    def page(drafted: int, accepted: int, engine: int) -> str:
        labels = f'{{engine="{engine}",model_name="m"}}'
        return (
            f"vllm:spec_decode_num_draft_tokens_total{labels} {drafted}.0\n"
            f"vllm:spec_decode_num_draft_tokens_created{labels} 1.7e+09\n"
            f"vllm:spec_decode_num_accepted_tokens_total{labels} {accepted}.0\n"
        )

    before, after = delays(page(100, 90, 0)), delays(page(150, 100, 0) + page(50, 10, 1))

    assert delay_figures(before, after) == {"accepted": pytest.approx(0.2)}
    assert delay_figures(after, after) == {}


def test_counters_are_summed_over_workers_and_consumers() -> None:
    page = (
        "# HELP headgate_capture_consumer_bytes x\n"
        'headgate_capture_consumer_bytes_total{consumer="a",engine="0"} 10.0\n'
        'headgate_capture_consumer_bytes_total{consumer="b",engine="0"} 2.5e1\n'
        'headgate_capture_staged_bytes{engine="0"} 3\n'
        'vllm:prompt_tokens_total{engine="0"} 7\n'
    )

    assert counters(page) == {"consumer_bytes": 35.0, "staged_bytes": 3.0}


def test_times_of_a_start_are_read_from_vllms_log() -> None:
    line = "init engine (profile, create kv cache, warmup model) took 31.50 s"

    assert start_facts(f"INFO [core.py:1] {line} (compilation: 12.25 s)\n") == {"init_s": 31.5, "compile_s": 12.25}
    assert start_facts(f"INFO [core.py:1] {line}\n") == {"init_s": 31.5}
    assert start_facts("nothing") == {}


def test_wrong_options_name_the_right_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["m", "out", "--modes", "stock", "nonsense"])
    assert "nonsense: unknown; known: stock, installed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        read_options(["m", "out", "--modes", "named"])
    assert "the mode and the server 'stock'" in capsys.readouterr().err


def test_models_have_the_sizes_of_the_real_ones() -> None:
    sizes = {name: (config["num_hidden_layers"], config["hidden_size"]) for name, config in MODELS.items()}

    del sizes["tiny"]
    assert sizes == {
        "gemma3-4b": (34, 2560),
        "gemma3-27b": (62, 5376),
        "llama3-8b": (32, 4096),
        "llama3-8b-eagle3": (1, 4096),
        "qwen3-30b-a3b": (48, 2048),
    }


def test_figures_of_engines_are_per_token_or_of_the_whole_job() -> None:
    engine = Engine("e", process=None, connection=None)  # type: ignore[arg-type]
    jobs = jobs_of(["bs16", "prefill"])
    for number in range(2):
        for job in jobs:
            seconds = 0.1 + (LONG - 1) * 0.004 * (number + 1) if job.tokens == LONG else 0.1
            engine.seconds.setdefault(("stock", job), []).append(seconds)
    engine.seconds["stock", jobs[0]].append(9.0)  # a round that was cut off

    found = rounds_of([engine], jobs)

    assert [one.number for one in found] == [1, 2]
    assert [one.figures["bs16"] for one in found] == pytest.approx([4, 8])
    assert found[0].figures.keys() == {"bs16", "prefill"}
    assert found[0].figures["prefill"] == pytest.approx(100)


CALLS = [
    (call, "gemma3-4b")
    for call in (
        *("check", "race", "idle", "soak", "verify", "dynamic", "memory", "kernels", "parallel", "parallel-cost"),
        *("http", "http-main", "http-inline", "http-decode", "ops", "gates", "controllers", "saes", "suite"),
        *("http-crowd", "crowd", "crowd-open", "idle-settings", "idle-parallel"),
        *("drafts-cost", "eagle-cost", "plain-cost"),
    )
]


@pytest.mark.parametrize(
    ("call", "model"), [*CALLS, *((call, model) for call in ("kernels", "http", "suite") for model in SIDE_BY_SIDE)]
)
def test_the_steps_of_a_call_are_what_the_programs_take(call: str, model: str) -> None:
    options = gpu_call.read_options([call, model, "--out", "unused"])

    for step in options.steps:
        assert step.limit_s <= gpu_call.LIMIT_S
        if step.name == "disk":
            continue
        command = gpu_call.Runner(options).command(step, step.limit_s)
        if step.name == "verify":
            parsed = get_command(verify).make_context("verify", command[command.index("verify") + 1 :])
            assert (parsed.params["model"], parsed.params["repeats"]) == (str(options.models / model), 0)
            assert parsed.args[::2] == ["--load-format", "--max-model-len", "--max-num-seqs"]
            continue
        program = command[command.index("-m") + 1]
        if program == "pytest":
            tests = [word for word in command if word.startswith("tests/")]
            assert tests
            assert all(Path(word).exists() for word in tests)
        elif program == gpu_call.WRITES_MODELS:
            assert {*command[command.index(program) + 2 :]} <= MODELS.keys()
        elif program == "tests.benchmarks.bench_kernels":
            assert "stock" in bench_kernels.read_options(command[command.index(program) + 1 :]).variants
        else:
            read = {"suite": suite.read_options, "suite_http": read_options}[program.rpartition(".")[2]]
            assert read(command[command.index(program) + 1 :]).seconds == step.limit_s - 25


def test_other_options_stand_before_the_flags_of_servers() -> None:
    options = gpu_call.read_options(["eagle-cost", "--out", "unused", "--more", "--rounds", "2"])
    writes, measures = options.steps
    runner = gpu_call.Runner(options)

    assert "--rounds" not in runner.command(writes, writes.limit_s)
    command = runner.command(measures, measures.limit_s)
    parsed = read_options(command[command.index("tests.benchmarks.suite_http") + 1 :])
    assert (parsed.rounds, parsed.flags[0]) == (2, "--speculative-config")
    assert json.loads(parsed.flags[1])["model"] == str(options.work / "llama3-8b-eagle3")


def test_a_call_that_there_is_not_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in ((["nonsense"], "known: check, idle, soak"), (["http", "gpt"], "known: gemma3-4b")):
        with pytest.raises(SystemExit):
            gpu_call.read_options([*arguments, "--out", "unused"])
        assert told in capsys.readouterr().err


def test_a_call_with_few_layers_has_a_model_folder_of_its_own(tmp_path: Path) -> None:
    arguments = ["verify", "--layers", "3", "--models", str(tmp_path), "--work", str(tmp_path / "work")]
    options = gpu_call.read_options([*arguments, "--out", str(tmp_path / "out"), "--seconds", "1"])
    assert str(tmp_path / "gemma3-4b-3") in gpu_call.Runner(options).command(options.steps[0], 60)

    assert gpu_call.main([*arguments, "--out", str(tmp_path / "out"), "--seconds", "1"]) == 0
    assert size_of(tmp_path / "gemma3-4b-3").num_layers == 3


def test_a_step_is_stopped_at_its_limit_and_said_to_have_failed(tmp_path: Path) -> None:
    options = gpu_call.read_options(
        ["tiny", "--out", str(tmp_path / "out"), "--work", str(tmp_path), "--seconds", "60"]
    )
    runner = gpu_call.Runner(options)
    python = ("-c", "import sys; print('working', flush=True); sys.stdin.read() if len(sys.argv) > 1 else exit(3)")

    failed = runner.run(gpu_call.Step("fails", (sys.executable, *python), 40))
    missing = runner.run(gpu_call.Step("lacks", (sys.executable,), 40, needs="no-such-program"))
    runner.collect()

    assert failed.status == "FAILED with status 3"
    assert failed.tail == "working"
    assert missing.status == "skipped: no-such-program is not on this machine"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["logs-tiny-tiny.tgz"]
    sleeper = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    assert gpu_call.wait(sleeper, 0.5) == "FAILED: stopped after 0 s"


def test_a_gpu_host_without_vllm_and_without_what_brings_it_stops_at_once(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho asked >&2\nexit 1\n")
    python.chmod(0o755)
    script = f". tests/benchmarks/gpu_host.sh {tmp_path}; echo went on"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stdout == ""
    assert f"there is no {tmp_path}/env.sh" in done.stderr


def test_parts_of_a_vllm_are_waited_for_and_checked(tmp_path: Path) -> None:
    contents = {"vllm-9.9.9.01": b"first", "vllm-9.9.9.02": b"second"}
    sums = "".join(f"{hashlib.sha256(made).hexdigest()}  {name}\n" for name, made in contents.items())
    for name in contents:
        (tmp_path / name[-2:]).mkdir()
        (tmp_path / name[-2:] / name).write_bytes(contents[name])
        (tmp_path / name[-2:] / "sums").write_text(sums)

    def take(part: str) -> str:
        command = ["bash", "tests/benchmarks/gpu_part.sh", str(tmp_path / part)]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    assert take("02") == "not here yet, or not whole: vllm-9.9.9.01\n"
    (tmp_path / "01/vllm-9.9.9.01").write_bytes(b"damaged")
    assert take("01") == "not here yet, or not whole: vllm-9.9.9.01\n"
