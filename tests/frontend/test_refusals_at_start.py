"""An engine that is configured for capture and cannot serve it does not start; others are none of our business."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from argparse import Namespace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.engine.arg_utils import EngineArgs

from headgate.capture import LLM
from headgate.capture.engine import vllm_names
from headgate.capture.engine.commands.doctor import settings_of
from headgate.capture.engine.commands.verify_engine import fit_cpu_cache
from headgate.capture.engine.frontends import startup
from headgate.capture.engine.plugin import register
from headgate.capture.engine.setup import patch_set, startup_checks
from headgate.capture.engine.setup.engine_settings import SERVED, Refusal, Served
from headgate.capture.engine.setup.patch_set import PatchSet
from headgate.capture.engine.vllm_types import VllmConfig
from headgate.capture.schema.errors import ConfigError, UnsupportedError
from tests.deadlines import patience
from tests.engine.tiny_models import tiny_model
from tests.frontend.conftest import ENGINE, capture_settings

pytestmark = pytest.mark.engine
GIB = 1 << 30


def config(additional: Any) -> Any:
    return Namespace(additional_config=additional)


@pytest.fixture
def broken_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = PatchSet(())
    patches.problems.append("vllm.thing.is_gone does not exist")
    monkeypatch.setattr(patch_set, "_of_this_process", patches)


@pytest.mark.usefixtures("broken_patches")
def test_a_vllm_that_differs_is_refused_with_the_versions_that_work() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)vllm\.thing\.is_gone.*works with vLLM 0\.26 to 0\.33"):
        startup_checks.check_servable(config(capture_settings()))


@pytest.mark.usefixtures("broken_patches")
@pytest.mark.parametrize("additional", [None, {}, {"other plugin": 1}, {"headgate": {}}])
def test_without_a_configuration_a_vllm_that_differs_is_served(additional: Any) -> None:
    startup_checks.check_servable(config(additional))

    assert startup.open_front_end(config(additional)) is None


def test_a_vllm_of_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_names, "NEWEST", (0, 25))

    with pytest.raises(UnsupportedError, match="found"):
        startup_checks.check_servable(config(capture_settings()))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("VLLM_PLUGINS", "fake_worker,other", "add headgate to it"),
        ("VLLM_USE_RUST_FRONTEND", "1", "Rust front end"),
        ("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1", "the id of an earlier one whose step still runs"),
    ],
)
def test_an_environment_that_keeps_headgate_out_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    register()

    with pytest.raises(UnsupportedError, match=reason):
        startup_checks.check_servable(config(capture_settings()))


def test_in_a_vllm_of_another_release_nothing_but_the_refusal_is_installed() -> None:
    script = """
from headgate.capture.engine import plugin
from headgate.capture.engine import vllm_names as versions
versions.NEWEST = (0, 25)
plugin.register()
from headgate.capture.engine.patch_table import PATCHES
from vllm import SamplingParams
installed = [patch.target.path for patch in PATCHES if list(patch.target.imported()) and patch.is_installed()]
expected = ["EngineArgs.add_cli_args", "EngineArgs.from_cli_args", "EngineArgs.create_engine_config"]
assert installed == expected, installed
try:
    SamplingParams().capture = {"rows": {}}
except ValueError as error:
    assert "this vLLM is not supported" in str(error)
else:
    raise AssertionError("capture was taken and ignored")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patience(300), check=False
    )

    assert done.returncode == 0, done.stderr


def start(model_dir: Path, **settings: Any) -> None:
    from vllm import LLM

    register()
    LLM(str(model_dir), **{**ENGINE, **settings})


@pytest.mark.parametrize(
    ("additional", "reason"),
    [
        ({"headgate": {"captur": {}}}, "no section 'captur'; known: capture"),
        (capture_settings(consumers=[{"name": "nobody"}]), "consumer 'nobody' is not installed; installed: .*rows"),
        (capture_settings(consumers=[{"name": "rows", "params": {"sise": 1}}]), "rows takes 'size' alone"),
        (capture_settings(sites={"post_mlp": [99]}), r"capture\.sites\.post_mlp: layer 99"),
        (capture_settings(ring_row=3), "ring_row"),
    ],
    ids=["section", "consumer", "parameter", "site", "setting"],
)
def test_a_wrong_configuration_is_refused_before_any_process_starts(
    model_dir: Path, additional: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        start(model_dir, additional_config=additional)


def test_a_setting_that_cannot_be_served_is_refused_before_any_process_starts(model_dir: Path) -> None:
    with pytest.raises(UnsupportedError, match="pooling models"):
        start(model_dir, additional_config=capture_settings(), runner="pooling")


@pytest.mark.parametrize(
    "settings",
    [
        {"nnodes": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        {"data_parallel_size": 2, "data_parallel_size_local": 1},
    ],
    ids=["nodes", "engines"],
)
def test_a_server_over_several_hosts_is_refused_without_keys(model_dir: Path, settings: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs

    register()
    arguments = {**ENGINE, "additional_config": capture_settings(), **settings}
    with pytest.raises(ConfigError, match=r"workers on other hosts need keys, .*`headgate keys new FILE`"):
        AsyncEngineArgs(model=str(model_dir), **arguments).create_engine_config()


def test_an_engine_without_configuration_is_stock_and_refuses_capture(model_dir: Path) -> None:
    from vllm import LLM

    from headgate.capture import SamplingParams
    from headgate.capture.engine.requests.capture_frontend import front_end_of
    from tests.frontend.conftest import stop

    llm = LLM(str(model_dir), **ENGINE)
    plain = {"prompt_token_ids": [1, 2, 3]}
    (output,) = llm.generate(plain, SamplingParams(max_tokens=3), use_tqdm=False)
    with pytest.raises(ValueError, match="capture: this engine was started without capture"):
        llm.generate(plain, SamplingParams(capture={"rows": {}}), use_tqdm=False)
    stop(llm.llm_engine)

    assert front_end_of(llm.llm_engine) is None
    assert output.capture_results == output.outputs[0].capture_results == {}
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("is_cpu", "share", "set_bytes", "free_gib", "expected_gib"),
    [
        (True, 0.92, None, 250, None),
        (True, 0.92, None, 236, 4.0),
        (True, 0.92, None, 8, 1.0),
        (True, 0.92, GIB, 8, 1.0),
        (False, 0.92, None, 8, None),
    ],
    ids=["enough is free", "too little beside vLLM itself", "little is free", "the user's size", "a GPU"],
)
def test_the_cache_on_cpus_fits_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_cpu: bool,
    share: float,
    set_bytes: int | None,
    free_gib: int,
    expected_gib: float | None,
) -> None:
    """vLLM takes 92 % of the memory, and does not start on a machine that others use, too."""
    cache = SimpleNamespace(gpu_memory_utilization=share, kv_cache_memory_bytes=set_bytes)
    engine = cast("VllmConfig", SimpleNamespace(cache_config=cache, parallel_config=SimpleNamespace(world_size=2)))
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    monkeypatch.setattr(startup_checks, "cpu_memory", lambda: (256 * GIB, free_gib * GIB))

    with caplog.at_level("WARNING", "headgate"):
        startup_checks.bound_cpu_cache(engine)

    assert cache.kv_cache_memory_bytes == (None if expected_gib is None else expected_gib * GIB)
    is_ours = expected_gib is not None and set_bytes is None
    assert ("VLLM_CPU_KVCACHE_SPACE" in caplog.text) == is_ours


def test_doctor_answers_for_the_users_own_flags() -> None:
    """Every setting is read from where this vLLM has it."""
    flags = "--max-model-len 128 --tensor-parallel-size 2 --pipeline-parallel-size 2 --enable-lora --enforce-eager"
    flags += " --host 127.0.0.1 --enable-steering"
    flags += " --decode-context-parallel-size 2 --kv-cache-dtype fp8 --enable-prompt-embeds --no-enable-prefix-caching"
    model = str(tiny_model("llama"))

    found = settings_of(model, ["--skip-tokenizer-init", *flags.split(), "--kv-sharing-fast-prefill"])

    refused = [each.what for each in found if isinstance(each, Refusal)]
    names = {each.what.partition(" (")[0] for each in found if isinstance(each, Served)}
    expected = ["fast prefill of layers that share keys and values", "decode context parallelism"]
    assert [what.partition(" (")[0] for what in refused] == expected
    expected = {"tensor parallelism", "pipeline parallelism", "LoRA", "prompt embeddings"}
    assert expected | {"type of the KV cache", "chunked prefill"} <= names
    assert not {"prefix caching", "data parallelism", "torch.compile", "speculative decoding, the methods"} & names


def test_every_setting_is_where_this_vllm_has_it() -> None:
    """An attribute with another name would make a setting look as if it were not set."""
    config = EngineArgs(model=str(tiny_model("llama")), skip_tokenizer_init=True, max_model_len=128)
    made = config.create_engine_config()

    paths = [each.path for each in SERVED if each.path]
    assert len(paths) > 15
    for path in paths:
        attrgetter(path)(made)


def test_a_share_of_the_memory_that_the_user_named_is_kept(tmp_path: Path) -> None:
    assert startup_checks.is_left_to_vllm(EngineArgs(model=str(tmp_path)))
    assert not startup_checks.is_left_to_vllm(EngineArgs(model=str(tmp_path), gpu_memory_utilization=0.5))


@pytest.mark.parametrize(("given", "expected"), [({}, 2 * GIB), ({"kv_cache_memory_bytes": GIB}, GIB)])
def test_the_stock_engine_of_verify_on_cpus_fits_what_is_free_too(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, int], expected: int
) -> None:
    """Nothing of headgate's is in its process, and vLLM alone would not start."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    monkeypatch.setattr(startup_checks, "cpu_memory", lambda: (256 * GIB, 8 * GIB))
    arguments = EngineArgs(model=str(tiny_model("llama")), skip_tokenizer_init=True, max_model_len=128, **given)

    fit_cpu_cache(arguments)

    assert arguments.kv_cache_memory_bytes == expected


@pytest.mark.parametrize(
    ("script", "error", "told"),
    [
        ("llm = LLM('m')\n", ConfigError, 'if __name__ == "__main__":'),
        ("if __name__ == '__main__':\n    llm = LLM('m')\n", RuntimeError, "Engine core initialization failed"),
    ],
    ids=["unguarded", "guarded"],
)
def test_a_script_that_would_start_its_engine_again_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, error: type[Exception], told: str
) -> None:
    """The engine's process imports the script; 122 lines of traceback ended in "Engine core initialization failed"."""

    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise RuntimeError("Engine core initialization failed")

    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "script.py"), raising=False)
    monkeypatch.setattr("vllm.LLM.__init__", fail)

    with pytest.raises(error, match=told):
        LLM("m")


def test_a_process_that_imports_the_script_again_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)

    with pytest.raises(SystemExit):
        LLM("m")
