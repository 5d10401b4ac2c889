"""``headgate doctor``: what is installed, what would be patched, and what a model offers."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from headgate.capture.engine.compiler.inductor import KERNELS, LOWERING, missing_symbols
from headgate.capture.engine.model.find_layers import find_decoder_stack, find_final_norm
from headgate.capture.engine.model.layer_layout import LayerLayout, analyse_layer
from headgate.capture.engine.setup.versions import check_version, versions
from headgate.capture.engine.worker.install import submodule_places
from headgate.capture.schema.config import MIB
from headgate.capture.schema.errors import HeadgateError
from headgate.capture.schema.registry import GROUP
from headgate.capture.schema.sites import HookPoint


class HookReport(NamedTuple):
    """One hook point of a model: where it is taken, and at how many of the layers."""

    hook: HookPoint
    module: str
    num_sites: int


class ModelReport(NamedTuple):
    """The sites of a model and their memory, found without loading its weights; why there is no `hook_z`, if so."""

    architecture: str
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    max_tokens: int
    hooks: tuple[HookReport, ...]
    no_hook_z: str = ""

    def site_mib(self) -> float:
        """Device memory that one capture site costs, in MiB."""
        return (self.max_tokens + 1) * self.hidden_size * self.dtype.itemsize / MIB


def doctor(
    model: Annotated[str | None, typer.Argument(help="Model folder or name; its sites are listed.")] = None,
) -> None:
    """Say what is installed, what would be patched, and what MODEL offers: its sites and the memory they cost."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    console = Console()
    healthy = _report_versions(console)
    healthy &= _report_patches(console)
    healthy &= _report_compiler(console)
    _report_consumers(console)
    if model is not None:
        try:
            _print_model(console, examine(model))
        except HeadgateError as error:
            console.print(f"[red]{model}: {error}")
            healthy = False
    if not healthy:
        raise typer.Exit(1)


def examine(model: str) -> ModelReport:
    """Build `model` without weights and look at its layers.

    Raises:
        UnsupportedError: If its layers are not understood.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(model=model, enforce_eager=True, skip_tokenizer_init=True).create_engine_config()
    with _single_process(config), torch.device("meta"):
        built = initialize_model(config)
    parent, _, layers = find_decoder_stack(built)
    analysed = [(layer, analyse_layer(type(layer), layer)) for _, layer in layers]
    return ModelReport(
        architecture=type(built).__name__,
        num_layers=len(layers),
        hidden_size=config.model_config.get_hidden_size(),
        dtype=config.model_config.dtype,
        max_tokens=config.scheduler_config.max_num_batched_tokens,
        hooks=tuple(_hooks(parent, analysed)),
        no_hook_z=next((layout.no_hook_z for _, layout in analysed if layout.no_hook_z), ""),
    )


def _hooks(parent: torch.nn.Module, analysed: list[tuple[torch.nn.Module, LayerLayout]]) -> Iterator[HookReport]:
    found: dict[HookPoint, list[str]] = {}
    for layer, layout in analysed:
        places = submodule_places(layout, layer)
        for hook in layout.hooks:
            at = f".{places[hook].module}" if hook in places else ""
            found.setdefault(hook, []).append(f"{type(layer).__name__}{at}")
    for hook in HookPoint:
        if hook in found:
            yield HookReport(hook, ", ".join(sorted(set(found[hook]))), len(found[hook]))
    final = find_final_norm(parent)
    if final is not None:
        yield HookReport(HookPoint.FINAL_NORM, f"{type(parent).__name__}.{final[0]}", 1)


@contextmanager
def _single_process(config: object) -> Iterator[None]:
    """The process groups that vLLM's layers ask for when they are built, for this process alone."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        try:
            ensure_model_parallel_initialized(1, 1)
            yield
        finally:
            cleanup_dist_env_and_memory()


def _report_versions(console: Console) -> bool:
    for name, version in versions().items():
        console.print(f"[bold]{name}[/] {version}")
    try:
        check_version(versions()["vllm"])
    except HeadgateError as error:
        console.print(f"[red]{error}")
        return False
    return True


def _report_patches(console: Console) -> bool:
    from headgate.capture.engine.patch_table import PATCHES

    table = Table("vLLM attribute", "what headgate's wrapper does", "state", title="Patches", title_justify="left")
    problems = [patch.problem(import_module(patch.module)) for patch in PATCHES]
    for patch, problem in zip(PATCHES, problems, strict=True):
        table.add_row(patch.target, patch.why, "[green]fits" if problem is None else f"[red]{problem}")
    console.print(table)
    return not any(problems)


def _report_compiler(console: Console) -> bool:
    """Say whether torch's inductor has every symbol that headgate's lowerings and rewrites use, and name the switch."""
    missing, uses = missing_symbols(kernels=True), {**LOWERING, **KERNELS}
    for name in missing:
        console.print(f"[red]torch._inductor.{name} does not exist: {uses[name]}")
    state = (
        f"[red]{len(missing)} of {len(uses)} symbols are missing: run with --enforce-eager"
        if missing
        else f"[green]all {len(uses)} symbols are there; rewrites of kernels are on unless "
        "additional_config['headgate']['compiler'] says otherwise"
    )
    console.print(f"[bold]inductor[/] {state}")
    return not missing


def _report_consumers(console: Console) -> None:
    found = entry_points(group=GROUP)
    console.print(f"[bold]consumers[/] {', '.join(sorted(found.names)) or 'none installed'}")


def _print_model(console: Console, report: ModelReport) -> None:
    console.print(
        f"[bold]{report.architecture}[/] {report.num_layers} layers, hidden size {report.hidden_size}, "
        f"{str(report.dtype).removeprefix('torch.')}, steps of up to {report.max_tokens} tokens"
    )
    table = Table("hook point", "taken at", "sites", "device memory", title="Sites", title_justify="left")
    for hook, module, num_sites in report.hooks:
        table.add_row(hook.value, module, str(num_sites), f"{num_sites * report.site_mib():.1f} MiB")
    console.print(table)
    if report.no_hook_z:
        console.print(f"no hook_z: {report.no_hook_z}")
