"""vLLM's own `LLM` and `SamplingParams`, with our keywords. Importing this imports vLLM."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headgate.capture.engine import vllm_names
from headgate.capture.engine.plugin import register
from headgate.capture.engine.requests.sampling_params import all_fields
from headgate.capture.engine.setup.cli_flags import Consumer, additional_config
from headgate.capture.schema.batch import Document
from headgate.capture.schema.errors import ConfigError

UNGUARDED = """the script starts its engine while it is imported, and vLLM's new process imports it again
Put what the script does, from LLM(...) on, under

    if __name__ == "__main__":
"""

register()


def make_sampling_params() -> type:
    """``headgate.capture.SamplingParams``: vLLM's class, whose constructor also takes our fields by keyword.

    They are `capture`, `capture_wait`, `capture_messages` and `return_hidden_states`, and steering's `steering_vectors`
    and so on.

    Calling it returns an instance of vLLM's own class, and ``isinstance(x, it)`` holds for those, so vLLM sees no
    difference.
    """
    base = vllm_names.SAMPLING_PARAMS.get()

    class Constructor(type(base)):  # type: ignore[misc]
        def __call__(cls, *args: object, **kwargs: object) -> object:
            ours = {name: kwargs.pop(name) for name in all_fields() if name in kwargs}
            params = base(*args, **kwargs)
            for name, value in ours.items():
                setattr(params, name, value)
            return params

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, base)

    return Constructor(
        "SamplingParams", (base,), {"__doc__": base.__doc__, "__module__": "headgate.capture"}, dict=True
    )


SamplingParams: Any = make_sampling_params()


class LLM(vllm_names.LLM.get()):  # type: ignore[misc]
    """vLLM's `LLM` with capture and steering configured by keyword.

    ::

        llm = LLM("model", capture_consumers=["memory"], capture_sites={"post_mlp": [10, 20]})
        params = SamplingParams(max_tokens=32, capture={"memory": {"hooks": {"post_mlp": [20]}}})
        (output,) = llm.generate("Hello", params)
        output.capture_results["memory"]
        (output,), (handle,) = llm.capture("Hello", SamplingParams(max_tokens=32), sites=["20.post_mlp"])
        handle["20.post_mlp"]

        llm = LLM("model", steering=True)
        llm.steering.register("calm", path="calm.safetensors")
        (output,) = llm.generate("Hello", SamplingParams(steering_module_ref=("calm", 2.0)))

    The same configuration works with vLLM's own classes: ``vllm.LLM("model", additional_config=additional_config(
    consumers=["memory"]))``, and so with `AsyncEngineArgs`.
    """

    def __init__(
        self,
        *args: object,
        capture_consumers: Sequence[Consumer] = (),
        capture_sites: Document | None = None,
        steering: object = None,
        **kwargs: Any,
    ) -> None:
        """Start an engine.

        Args:
            args: Arguments of vLLM's `LLM`.
            capture_consumers: Each a `CaptureConsumerSpec`, its shorthand ``name:key=val,key=val``, or its fields
                as a dict.
            capture_sites: ``{hook point: layers}`` that can be captured; ``{"post_mlp": "all"}`` by default.
            steering: True, or an object of settings: the fields of `headgate.steering.SteeringConfig`.
            kwargs: Keywords of vLLM's `LLM`.

        Raises:
            ConfigError: If the configuration is wrong.
            UnsupportedError: If this vLLM, this model or a setting cannot be served.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise SystemExit(1)  # a new process imports the script; the one that started it says what is wrong
        if capture_consumers or capture_sites is not None or steering not in (None, False):
            kwargs["additional_config"] = additional_config(
                consumers=capture_consumers,
                sites=capture_sites,
                base=kwargs.get("additional_config"),
                steering=steering,
            )
        try:
            super().__init__(*args, **kwargs)
        except RuntimeError:
            if _is_unguarded():
                raise ConfigError(UNGUARDED) from None
            raise


def _is_unguarded() -> bool:
    """Whether the program is a script that does the same again when a new process imports it."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return script is not None and "__name__" not in Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def start_llm(
    model: str,
    flags: Sequence[str] = (),
    *,
    capture_consumers: Sequence[Consumer] = (),
    capture_sites: Document | None = None,
    **settings: object,
) -> LLM:
    """Start an engine with flags of vLLM's command line, for commands that run prompts of their own.

    Args:
        model: Its name or folder.
        flags: Such as ``["--dtype", "float32", "--tensor-parallel-size", "2"]``; headgate's own work, too.
        capture_consumers: As for `LLM`.
        capture_sites: As for `LLM`.
        settings: Other fields of `CaptureConsumersConfig`.

    Raises:
        ConfigError: If the configuration is wrong.
        UnsupportedError: If this vLLM, this model or a setting cannot be served.
        SystemExit: If vLLM knows no such flag; it has said so.
    """
    EngineArgs = vllm_names.ENGINE_ARGS.get()
    FlexibleArgumentParser = vllm_names.ARGUMENT_PARSER.get()

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="headgate", usage="flags of vLLM's engine"))
    engine_args = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))
    engine_args.disable_log_stats = True  # as `LLM` has it
    engine_args.additional_config = additional_config(
        consumers=capture_consumers, sites=capture_sites, base=engine_args.additional_config, **settings
    )
    return LLM(**vars(engine_args))
