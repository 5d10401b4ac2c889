"""``headgate doctor``: whether headgate fits what is installed, and what a model offers."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headgate.capture.engine import vllm_names
from headgate.capture.engine.compiler.inductor import KERNELS, LOWERING, missing_symbols
from headgate.capture.engine.model.find_layers import find_decoder_stack, find_final_norm
from headgate.capture.engine.model.layer_structure import LayerStructure, analyse_layer
from headgate.capture.engine.setup.engine_settings import Refusal, Served, applying
from headgate.capture.engine.setup.settings import OUR_KEY
from headgate.capture.engine.setup.site_shapes import declared_shapes
from headgate.capture.engine.vllm_names import check_version, versions
from headgate.capture.engine.worker.install import submodule_places
from headgate.capture.schema.config import MIB
from headgate.capture.schema.errors import HeadgateError
from headgate.capture.schema.registry import GROUP
from headgate.capture.schema.sites import HookPoint, Site, SiteShape
from headgate.capture.staging.ring import NUM_TRASH_ROWS


class HookReport(NamedTuple):
    """One hook point of a model: where it is taken, and the shape of the rows of each of its sites."""

    hook: HookPoint
    module: str
    shapes: tuple[SiteShape, ...]

    @property
    def widths(self) -> str:
        """The widths that occur, the largest first."""
        return ", ".join(str(width) for width in sorted({shape.width for shape in self.shapes}, reverse=True))


class ModelReport(NamedTuple):
    """The sites of a model and their memory, found without loading its weights; why it lacks others."""

    architecture: str
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    max_tokens: int
    hooks: tuple[HookReport, ...]
    absent: Mapping[HookPoint, str] = {}

    def hook_mib(self, hook: HookReport) -> float:
        """Device memory that capture takes for all sites of a hook point and a full step, in MiB."""
        return (self.max_tokens + NUM_TRASH_ROWS) * sum(shape.row_bytes for shape in hook.shapes) / MIB


command = typer.Typer(add_completion=False)


@command.command("doctor", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def doctor(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Model folder or name; its sites are listed.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also list every wrapped attribute of vLLM, and vLLM's own log.")
    ] = False,
) -> None:
    """Say whether headgate fits what is installed, and what MODEL offers: its sites and the memory they cost.

    Flags of `vllm serve` after MODEL: which of these settings headgate serves, and which it refuses.
    """
    if not verbose:
        os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
        for name in ("vllm", "huggingface_hub"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    console = Console()
    healthy = _report_versions(console)
    healthy &= _report_patches(console, verbose)
    healthy &= _report_compiler(console)
    _report_consumers(console)
    if model is not None:
        healthy &= _report_model(console, model, verbose) and _report_settings(console, model, context.args)
    if not healthy:
        raise typer.Exit(1)


def _report_model(console: Console, model: str, verbose: bool) -> bool:
    if _is_path(model) and not Path(model).is_dir():
        console.print(f"[red]{escape(model)}: there is no such folder", soft_wrap=True)
        return False
    try:
        report = examine(model)
    except Exception as error:  # noqa: BLE001  (vLLM and transformers raise much: whatever it is, it is one line)
        if verbose:
            console.print_exception()
        console.print(f"[red]{escape(model)}: {escape(_in_one_line(error))}", soft_wrap=True)
        return False
    _print_model(console, report)
    return True


def _report_settings(console: Console, model: str, flags: Sequence[str]) -> bool:
    try:
        found = settings_of(model, flags) if flags else []
    except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever vLLM raises; its parser has written why)
        console.print(f"[red]{escape(' '.join(flags))}: {escape(_in_one_line(error))}", soft_wrap=True)
        return False
    for each in found:
        color = "red" if isinstance(each, Refusal) else "green"
        console.print(f"[bold]{escape(each.what)}[/] [{color}]{escape(each.answer)}", soft_wrap=True, highlight=False)
    return not any(isinstance(each, Refusal) for each in found)


def settings_of(model: str, flags: Sequence[str]) -> list[Served | Refusal]:
    """Served and refused settings of an engine that ``vllm serve MODEL`` with `flags` starts.

    Raises:
        SystemExit: If vLLM knows no such flag; it has said so.
    """
    EngineArgs = vllm_names.ENGINE_ARGS.get()
    FlexibleArgumentParser = vllm_names.ARGUMENT_PARSER.get()

    parser = FlexibleArgumentParser(prog="headgate doctor")
    (command,) = vllm_names.SERVE_COMMANDS.get()()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    arguments = parser.parse_args(["serve", model, *flags])
    arguments.model = model
    engine = EngineArgs.from_cli_args(arguments)
    others = {name: each for name, each in (engine.additional_config or {}).items() if name != OUR_KEY}
    engine.additional_config = others  # with ours, vLLM's function refuses, and names no other setting
    return applying(engine.create_engine_config())


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, HeadgateError):
        return str(error)
    reported = " ".join(str(error).split("[type=")[0].split()[:60])  # pydantic appends the input's representation
    return f"{type(error).__name__}: {reported} (--verbose: all of it)"


def _is_path(model: str) -> bool:
    """Whether a model can only be a folder: names at a hub are ``name`` or ``owner/name``."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def examine(model: str) -> ModelReport:
    """Build `model` without weights and look at its layers.

    Raises:
        UnsupportedError: If its layers are not understood.
    """
    EngineArgs = vllm_names.ENGINE_ARGS.get()
    initialize_model = vllm_names.MAKE_MODEL.get()

    config = EngineArgs(model=model, enforce_eager=True, skip_tokenizer_init=True).create_engine_config()
    with _single_process(config), torch.device("meta"):
        built = initialize_model(config)
    parent, _, layers = find_decoder_stack(built)
    analysed = [(layer, analyse_layer(type(layer), layer)) for _, layer in layers]
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    stream = SiteShape(config.model_config.get_hidden_size(), dtype)
    return ModelReport(
        architecture=type(built).__name__,
        num_layers=len(layers),
        hidden_size=config.model_config.get_hidden_size(),
        dtype=config.model_config.dtype,
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        hooks=tuple(_hooks(parent, analysed, stream, declared_shapes(config, len(layers), stream))),
        absent={hook: why for _, structure in reversed(analysed) for hook, why in structure.absent.items()},
    )


def _hooks(
    parent: torch.nn.Module,
    analysed: list[tuple[torch.nn.Module, LayerStructure]],
    stream: SiteShape,
    shapes: Mapping[Site, SiteShape],
) -> Iterator[HookReport]:
    found: dict[HookPoint, list[tuple[str, SiteShape]]] = {}
    for index, (layer, structure) in enumerate(analysed):
        places = submodule_places(structure, layer)
        for hook in structure.hooks:
            at = f".{places[hook].module}" if hook in places else ""
            shape = shapes.get(Site(index, hook), stream)
            found.setdefault(hook, []).append((f"{type(layer).__name__}{at}", shape))
    for hook in HookPoint:
        if hook in found:
            modules, of_sites = zip(*found[hook], strict=True)
            yield HookReport(hook, ", ".join(sorted(set(modules))), of_sites)
    final = find_final_norm(parent)
    if final is not None:
        yield HookReport(HookPoint.FINAL_NORM, f"{type(parent).__name__}.{final[0]}", (stream,))


@contextmanager
def _single_process(config: object) -> Iterator[None]:
    """The process groups that vLLM's layers ask for when they are built, for this process alone."""
    set_current_vllm_config = vllm_names.WITH_CONFIG.get()
    cleanup_dist_env_and_memory = vllm_names.CLOSE_GROUPS.get()
    ensure_model_parallel_initialized = vllm_names.OPEN_MODEL_GROUPS.get()
    init_distributed_environment = vllm_names.OPEN_GROUPS.get()

    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            cleanup_dist_env_and_memory()


def _report_versions(console: Console) -> bool:
    console.print(", ".join(f"[bold]{name}[/] {version}" for name, version in versions().items()), highlight=False)
    try:
        check_version(versions()["vllm"])
    except HeadgateError as error:
        console.print(f"[red]{escape(str(error))}", soft_wrap=True)
        return False
    return True


def _report_patches(console: Console, verbose: bool) -> bool:
    from headgate.capture.engine.patch_table import PATCHES

    for name in (*(patch.target for patch in PATCHES), *vllm_names.required_names()):
        list(name.imported())
    missing = [name for name in vllm_names.required_names() if name.find() is None]
    problems = {patch: problem for patch in PATCHES if (problem := patch.problem())}
    if verbose:
        table = Table("vLLM attribute", "what headgate's wrapper does", "state", title="Wrapped", title_justify="left")
        for patch in PATCHES:
            state = f"[red]{escape(problems[patch])}" if patch in problems else "[green]fits"
            table.add_row(patch.target.path, patch.why, state)
        console.print(table)
    for patch, problem in problems.items():
        console.print(f"[red]{escape(problem)}; {escape(patch.why)}", soft_wrap=True)
    for name in missing:
        console.print(f"[red]{name} does not exist", soft_wrap=True)
    num_wrong = len(problems) + len(missing)
    state = f"[red]{num_wrong} do not fit" if num_wrong else "[green]all fit"
    console.print(
        f"[bold]vLLM[/] {len(PATCHES)} attributes are wrapped in memory, {len(vllm_names.required_names())} are used, "
        f"{state}[/]; --verbose lists what each is for",
        highlight=False,
        soft_wrap=True,
    )
    return not num_wrong


def _report_compiler(console: Console) -> bool:
    """Say whether torch's inductor has every symbol that headgate's lowerings and rewrites use, and name the switch."""
    missing, uses = missing_symbols(kernels=True), {**LOWERING, **KERNELS}
    for name in missing:
        console.print(f"[red]torch._inductor.{name} does not exist: {uses[name]}")
    state = (
        f"[red]{len(missing)} of {len(uses)} symbols are missing: run with --enforce-eager"
        if missing
        else f"[green]all {len(uses)} symbols that headgate uses are there"
    )
    console.print(f"[bold]inductor[/] {state}", soft_wrap=True, highlight=False)
    return not missing


def _report_consumers(console: Console) -> None:
    found = entry_points(group=GROUP)
    console.print(f"[bold]consumers[/] {', '.join(sorted(found.names)) or 'none installed'}", soft_wrap=True)


def _print_model(console: Console, report: ModelReport) -> None:
    console.print(
        f"[bold]{report.architecture}[/] {report.num_layers} layers, hidden size {report.hidden_size}, "
        f"{str(report.dtype).removeprefix('torch.')}, steps of up to {report.max_tokens} tokens",
        soft_wrap=True,
        highlight=False,
    )
    table = Table("hook point", "taken at", "width", "sites", "device memory", title="Sites", title_justify="left")
    for each in report.hooks:
        num_sites, memory = str(len(each.shapes)), f"{report.hook_mib(each):.1f} MiB"
        table.add_row(each.hook.value, each.module, each.widths, num_sites, memory)
    console.print(table)
    console.print("The memory is for one full step; with room on a GPU, capture.ring_rows is two by default.")
    has = {each.hook for each in report.hooks}
    missing: dict[tuple[str, str], list[str]] = {}
    for hook, why in report.absent.items():
        missing.setdefault(("some layers have no" if hook in has else "no", why), []).append(hook.value)
    for (some, why), names in missing.items():
        console.print(f"{some} {', '.join(names)}: {escape(why)}", soft_wrap=True)
