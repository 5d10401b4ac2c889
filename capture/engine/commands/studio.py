"""``headgate studio MODEL``: `headgate serve` with everything that the page at ``/headgate/`` shows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import typer

from headgate.capture.engine import vllm_names
from headgate.capture.engine.commands.demo_model import ModelError, ensure_model, model_folder
from headgate.capture.engine.commands.serve import serve_model
from headgate.capture.schema.config import parse_config
from headgate.capture.schema.errors import ConfigError

INLINE_BYTES = 64 << 20
_CONSUMERS = "--capture-consumers"
_CONFIG, _SETTINGS = "--config", "--additional-config"
"""vLLM's flags for a YAML file of flags, and for JSON settings."""
DEFAULTS = {
    "--host": ["127.0.0.1"],
    _CONSUMERS: [f"inline:max_bytes={INLINE_BYTES}", "lens"],
    "--steering-op-sites": ['{"post_mlp": "all"}'],
}
"""Flags of `headgate serve` that the studio sets where the user has not."""

DEMO = {
    **DEFAULTS,
    "--served-model-name": ["smollm2"],
    "--dtype": ["float32"],
    "--max-model-len": ["4096"],
    "--kv-cache-memory-bytes": [str(1 << 30)],
}
"""Flags that `--demo` sets; its model is small enough for any CPU.

Keys and values of 23,000 tokens: vLLM's share of the memory, several GiB, is written once at the start, 10 s.
"""

HELP = f"""Serve a model with the studio, a page in the browser: headgate studio MODEL, or headgate studio --demo.

Takes every flag of `headgate serve`, and sets these unless they are given: {", ".join(DEFAULTS)}. --demo serves
SmolLM2-135M-Instruct, made of a package of 93 MB (it needs accelerate and gguf), without compilation.
"""

studio = typer.Typer(add_completion=False)


@studio.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def run(context: typer.Context) -> None:
    """Serve MODEL with the studio."""
    if not context.args or context.args[-1] in ("-h", "--help"):
        typer.echo(HELP)
        return
    try:
        arguments = arguments_of(context.args)
    except ModelError as error:
        typer.secho(f"headgate studio: {error}", err=True, fg="red")
        raise typer.Exit(1) from None
    serve_model(arguments)


def arguments_of(given: Sequence[str]) -> list[str]:
    """Return the arguments of `headgate serve`.

    Raises:
        ModelError: If the demo's model cannot be made.
    """
    if "--demo" not in given:
        return with_defaults(given, DEFAULTS)
    # vLLM's sampler compiles the ranks of log-probabilities even in eager mode: 15 s of the first answer on a CPU.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    rest = [argument for argument in given if argument != "--demo"]
    return with_defaults([str(_demo_folder()), *rest, "--enforce-eager"], DEMO)


def _demo_folder() -> Path:
    """Return the folder of the demo's model; if need be, another process makes it while this one imports vLLM.

    Raises:
        ModelError: If it cannot be made.
    """
    if (known := model_folder(cache_folder())).is_dir():
        return known
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        made = pool.submit(ensure_model, cache_folder())
        vllm_names.SERVE_COMMANDS.get()
        return made.result()


def with_defaults(given: Sequence[str], defaults: Mapping[str, Sequence[str]]) -> list[str]:
    """Return arguments with those of `defaults` that are not given: as a flag, in any of its spellings, in the file of
    ``--config``, or, consumers, in ``--additional-config``."""
    flags = {argument.partition("=")[0].replace("_", "-") for argument in given if argument.startswith("--")}
    flags |= {f"--{name}".replace("_", "-") for path in _values(given, _CONFIG) for name in _read_config(path)}
    consumers = [name for text in _values(given, _SETTINGS) for name in _consumers_in(text)]
    added: list[str] = []
    for flag, values in defaults.items():
        left = [value for value in values if flag != _CONSUMERS or value.partition(":")[0] not in consumers]
        if flag not in flags and left:
            added += [flag, *left]
    return [*given, *added]


def _values(given: Sequence[str], flag: str) -> list[str]:
    """Return the values of a flag that takes one."""
    pairs = zip(given, [*given[1:], ""], strict=True)
    apart = [value for argument, value in pairs if argument.replace("_", "-") == flag]
    return [*apart, *(each.partition("=")[2] for each in given if each.replace("_", "-").startswith(f"{flag}="))]


def _read_config(path: str) -> Mapping[str, object]:
    try:
        found = msgspec.yaml.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}  # `headgate serve` says what is wrong with it
    return found if isinstance(found, dict) else {}


def _consumers_in(settings: str) -> list[str]:
    """Return the names of the consumers in vLLM's ``--additional-config``."""
    try:
        section = msgspec.json.decode(settings)["headgate"]["capture"]
        return [consumer.instance for consumer in parse_config(section).consumers]
    except (msgspec.DecodeError, KeyError, TypeError, ConfigError):
        return []  # none, or `headgate serve` says what is wrong with it


def cache_folder() -> Path:
    """Return the folder for the demo's model: ``HEADGATE_CACHE``, else ``headgate`` in the user's own cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HEADGATE_CACHE") or Path(cache) / "headgate")
