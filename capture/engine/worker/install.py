"""Installs headgate in a vLLM worker, right after its model was loaded and before anything is traced."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from headgate.capture.engine import vllm_names
from headgate.capture.engine.compiler.graph_code import digest_of, traced_modules
from headgate.capture.engine.compiler.rewrites import REWRITES
from headgate.capture.engine.contracts.parts import worker_part
from headgate.capture.engine.contracts.worker_hooks import WorkerFacts, WorkerHooks
from headgate.capture.engine.model import forward_wrappers
from headgate.capture.engine.model.attention_facts import attention_facts
from headgate.capture.engine.model.find_layers import find_decoder_stack, find_final_norm
from headgate.capture.engine.model.inner_places import HookPlace
from headgate.capture.engine.model.layer_structure import LayerStructure, analyse_layer
from headgate.capture.engine.setup.hosts import SETUP_RPC, action_target, network_keys, worker_setup
from headgate.capture.engine.setup.settings import compiler_config, model_info, section, sections
from headgate.capture.engine.setup.startup_checks import refuse_unsupported_settings
from headgate.capture.engine.site_action import SiteAction
from headgate.capture.engine.vllm_types import Function, ModelRunner, VllmConfig, Worker, WorkerWrapper
from headgate.capture.engine.worker.model_head import find_head
from headgate.capture.engine.worker.runner import LaunchedStep, RunnerAdapter
from headgate.capture.monitoring.logs import speak_through_vllm
from headgate.capture.monitoring.step_log import open_step_log
from headgate.capture.schema.batch import Document
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import UnsupportedError
from headgate.capture.schema.sites import FINAL_NORM_SITE, INNER_HOOKS, HookPoint, Site, SiteShape


def has_one_row_each() -> bool:
    """Whether each request of the forward has one row, for certain.

    Operations ask while vLLM runs or records the forward. False if unknown: in graphs of pieces of it, and
    where attention has no metadata.
    """
    get_forward_context = vllm_names.FORWARD_CONTEXT.get()
    is_forward_context_available = vllm_names.IS_IN_FORWARD.get()

    if not is_forward_context_available():
        return False
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        return False
    return all(getattr(of_layer, "max_query_len", None) == 1 for of_layer in metadata.values())


logger = logging.getLogger("headgate")

ENGINE_ATTRIBUTE = "headgate_worker"

Wanted = Mapping[HookPoint, Sequence[SiteAction]]
"""The actions of one layer, by hook point."""


def patch_worker(wrapper: Any, worker: Any) -> None:
    """Let every worker of vLLM install headgate when its model is loaded.

    Args:
        wrapper: vLLM's ``WorkerWrapperBase``.
        worker: Its ``WorkerBase``, which gets our RPCs.

    Raises:
        UnsupportedError: If another plugin does the same.
    """
    if "load_model" in vars(wrapper):
        if getattr(vars(wrapper)["load_model"], "headgate", False):
            return
        raise UnsupportedError("WorkerWrapperBase.load_model is taken: another plugin or a newer vLLM defines it")

    def load_model(self: WorkerWrapper, *args: object, **kwargs: object) -> object:
        result = self.worker.load_model(*args, **kwargs)
        if sections(self.worker.vllm_config):
            install(self.worker)
        return result

    load_model.headgate = True  # type: ignore[attr-defined]
    wrapper.load_model = load_model
    worker.headgate_stats = _stats
    worker.headgate_call = _call
    setattr(worker, SETUP_RPC, _setup)


def _stats(self: Worker) -> Document:
    """Serve a worker RPC: counters of every part, by name."""
    installed: InstalledWorker = getattr(self, ENGINE_ATTRIBUTE)
    return installed.stats()


def _setup(self: Worker) -> Document:
    """Serve a worker RPC: what all workers of an engine must have alike; refuses where nothing was installed."""
    if not hasattr(self, ENGINE_ATTRIBUTE):
        raise UnsupportedError(f"headgate was not installed in the worker of rank {self.rank}")
    return worker_setup(self.vllm_config, self.rank)


def _call(self: Worker, part: str, method: str, args: Document) -> object:
    """Serve a worker RPC: `method` of one part, called by the same part in the engine core."""
    installed: InstalledWorker = getattr(self, ENGINE_ATTRIBUTE)
    return installed.call(part, method, args)


def install(worker: Worker) -> InstalledWorker:
    """Put the configured parts into `worker`.

    Raises:
        ConfigError: If a section of the configuration is unknown or wrong.
        UnsupportedError: If the model or a setting cannot be served.
    """
    config = worker.vllm_config
    REWRITES.is_on = compiler_config(config).rewrites
    speak_through_vllm()
    refuse_unsupported_settings(config)
    opened = {name: worker_part(name).worker(section(config, name)) for name in sections(config)}
    parts = {name: part for name, part in reversed(opened.items()) if part is not None}
    model = worker.model_runner.get_model()
    parent, stack_name, layers = find_decoder_stack(model)
    running = LaunchedStep(torch.device(worker.device))
    facts = _facts(worker, model_info(config), [index for index, _ in layers], reapplies_mid(layers), running)
    find = partial(find_head, config, model, parent, facts.device, facts.gather, facts.tp_rank, worker)
    facts = replace(facts, head=find, post_norms=post_norms(layers))
    device_bytes = sum(part.headgate_allocate(facts) for part in parts.values())
    actions = _collect_actions(parts, facts)
    attention = attention_facts(layers, actions, facts.model, config.model_config, facts.gather)
    facts = replace(facts, model=replace(facts.model, attention=attention))
    install_actions(parent, stack_name, layers, actions, facts.model, facts.tp_size)
    for part in parts.values():
        part.headgate_start(facts)
    _add_to_model_memory(worker.model_runner, device_bytes)
    _key_graph(_configs(config, model), parts, actions)
    installed = InstalledWorker(worker, facts, parts, device_bytes, running)
    setattr(worker, ENGINE_ATTRIBUTE, installed)
    return installed


class InstalledWorker:
    """The parts at work in one vLLM worker, and the moments of its life that they follow.

    Attributes:
        facts: The worker's.
        parts: By name.
        device_bytes: Device memory that the parts allocated.
    """

    def __init__(
        self,
        worker: Worker,
        facts: WorkerFacts,
        parts: Mapping[str, WorkerHooks],
        device_bytes: int,
        running: LaunchedStep,
    ) -> None:
        self.facts = facts
        self.device_bytes = device_bytes
        self.parts = parts
        self._step_log = open_step_log(worker.rank)
        self._runner = RunnerAdapter(
            worker.model_runner,
            parts,
            is_output_rank=facts.is_output_rank,
            is_last_stage=facts.is_last_stage,
            verifies_drafts=worker.vllm_config.speculative_config is not None,
            step_log=self._step_log,
            running=running,
        )
        _after(worker, "compile_or_warm_up_model", self._self_test)
        _before(worker, "shutdown", self.close)

    def stats(self) -> Document:
        """Return the counters of every part, by name, and those of the rewrites of kernels."""
        counted = {key: value for part in self.parts.values() for key, value in part.headgate_stats().items()}
        return counted | {"compiler": REWRITES.stats()}

    def call(self, part: str, method: str, args: Document) -> object:
        """Return the part's answer; None if it has none."""
        answers = (each.headgate_call(part, method, args) for each in self.parts.values())
        return next((answer for answer in answers if answer is not None), None)

    def close(self) -> None:
        """Close every part; idempotent, since the parts are."""
        for part in self.parts.values():
            part.headgate_close()
        if self._step_log is not None:
            self._step_log.close()

    def _self_test(self) -> None:
        for part in self.parts.values():
            part.headgate_self_test(self.facts, self._runner.run_dummy)


def install_actions(
    parent: nn.Module,
    stack_name: str,
    layers: Sequence[tuple[int, nn.Module]],
    actions: Mapping[Site, Sequence[SiteAction]],
    model: ModelInfo | None = None,
    num_ranks: int = 1,
) -> None:
    """Put `actions` into the modules of one decoder stack.

    Args:
        parent: Owner of the list of layers.
        stack_name: The list's attribute there.
        layers: Global index and module of each layer.
        actions: By site.
        model: What all processes take the shapes of sites from; None: shapes are not compared with the modules.
        num_ranks: Of tensor parallelism.

    Raises:
        UnsupportedError: If a site does not exist in the model; the message says which there are. Also if its rows
            have another shape than `model` says.
    """
    for index, layer in layers:
        wanted = forward_wrappers.sites_by_hook(actions, index)
        if wanted:
            shapes = {} if model is None else {hook: model.shape(Site(index, hook)) for hook in wanted}
            where = f"{stack_name}.{index}"
            _check_hooks(where, layer, wanted, layers)
            _install_layer(where, layer, wanted, shapes, is_first=index == 0, num_ranks=num_ranks)
    if FINAL_NORM_SITE in actions:
        _install_final_norm(parent, actions[FINAL_NORM_SITE])


_UNFUSED = INNER_HOOKS | {HookPoint.ATTN_IN, HookPoint.HOOK_Z}
"""Hook points whose actions the compiler does not fuse with what is in front of them."""


def _check_hooks(where: str, layer: nn.Module, wanted: Wanted, layers: Sequence[tuple[int, nn.Module]]) -> None:
    structure = analyse_layer(type(layer), layer)
    missing = next((hook for hook in wanted if hook not in structure.hooks), None)
    if missing is None:
        return
    why = f": {structure.absent[missing]}" if missing in structure.absent else ""
    others = list(_layers_with(missing, layers))
    elsewhere = f" Layers of this stage with {missing}: {others}." if others else ""
    raise UnsupportedError(
        f"{where} ({type(layer).__name__}) has no hook point {missing}{why}; it has "
        f"{', '.join(sorted(structure.hooks))}.{elsewhere} Take {missing} out of the configured sites"
    )


def _layers_with(hook: HookPoint, layers: Sequence[tuple[int, nn.Module]]) -> Iterator[int]:
    for index, layer in layers:
        with suppress(UnsupportedError):  # a layer with an action is refused when that is installed
            if hook in analyse_layer(type(layer), layer).hooks:
                yield index


def _install_layer(
    where: str,
    layer: nn.Module,
    wanted: Wanted,
    shapes: Mapping[HookPoint, SiteShape],
    *,
    is_first: bool,
    num_ranks: int,
) -> None:
    structure = analyse_layer(type(layer), layer)
    _check_shapes(f"{where} ({type(layer).__name__})", structure, shapes, num_ranks)
    parameters = list(inspect.signature(type(layer).forward).parameters)[1:]
    wanted = {**wanted} | {hook: _unfused(actions) for hook, actions in wanted.items() if hook in _UNFUSED}
    wanted, early_places = _place_around_mid_norm(structure, wanted, is_first=is_first)
    places = submodule_places(structure, layer) | early_places
    for name in dict.fromkeys(place.module for place in places.values()):
        taken = [(hook, place) for hook, place in places.items() if hook in wanted and place.module == name]
        if taken:
            _install_module(layer, name, taken, wanted)
    own = {hook: forward_wrappers.attach(layer, hook, wanted[hook]) for hook in wanted if hook not in places}
    reapplied = reapplied_runs(structure, layer, wanted.get(HookPoint.POST_ATTN, ()))
    if own or reapplied:
        forward_wrappers.swap_class(layer, forward_wrappers.layer_forward(structure, own, parameters, reapplied))


def _install_module(layer: nn.Module, name: str, taken: Sequence[tuple[HookPoint, HookPlace]], wanted: Wanted) -> None:
    """Put the actions of one submodule of a layer into it; into a copy for this layer if others have it too."""
    module = layer.get_submodule(name)
    if any(place.is_shared for _, place in taken):
        module = copy.copy(module)
        owner, _, attribute = name.rpartition(".")
        setattr(layer.get_submodule(owner), attribute, module)
    runs = [(hook, place, forward_wrappers.attach(module, hook, wanted[hook])) for hook, place in taken]
    choices = [each for each in runs if each[1].is_choice]
    if choices:
        forward_wrappers.watch_choices(module, choices)
    if len(choices) < len(runs):
        forward_wrappers.swap_class(
            module, forward_wrappers.module_forward([each for each in runs if not each[1].is_choice])
        )


def _check_shapes(where: str, structure: LayerStructure, shapes: Mapping[HookPoint, SiteShape], num_ranks: int) -> None:
    """Compare shapes that all processes share with what the layer's modules show.

    Raises:
        UnsupportedError: If they differ.
    """
    for hook, shape in shapes.items():
        if (place := structure.inner.get(hook)) is None or not place.width:
            continue
        is_split = bool(place.whole_width) and place.width != place.whole_width
        whole = place.whole_width or shape.width
        if (place.width, whole) != (shape.part_width(num_ranks), shape.width):
            on_ranks = f"{place.width} of them on each tensor-parallel rank" if is_split else "all of them on each rank"
            raise UnsupportedError(
                f"{where}: {hook} has {place.whole_width or place.width} values, {on_ranks}; the model's configuration "
                f"says {shape.width} ({shape.shard}). Take {hook} out of the configured sites and report the "
                "architecture"
            )


def _place_around_mid_norm(
    structure: LayerStructure, wanted: Wanted, *, is_first: bool
) -> tuple[Wanted, dict[HookPoint, HookPlace]]:
    """Choose how actions around a fused mid norm run: before attention where all can, with the places; else unfused."""
    if structure.mid_residual is None:
        mid = [replace(action, run=action.run_and_keep or action.run) for action in wanted.get(HookPoint.POST_ATTN, ())]
        return {**wanted, HookPoint.POST_ATTN: mid} if mid else wanted, {}
    chosen, places = dict(wanted), {}
    for hook in (HookPoint.ATTN_OUT, HookPoint.POST_ATTN):
        actions = wanted.get(hook, ())
        early = [
            replace(action, run=action.before_attention) for action in actions if action.before_attention is not None
        ]
        if structure.first_norm is not None and not is_first and actions and len(early) == len(actions):
            chosen[hook] = early
            places[hook] = HookPlace(module=structure.first_norm, result=1)
        elif actions:
            chosen[hook] = _unfused(actions)
    return chosen, places


def _unfused(actions: Sequence[SiteAction]) -> list[SiteAction]:
    return [replace(action, run=action.unfused or action.run) for action in actions]


def reapplied_runs(
    structure: LayerStructure, layer: nn.Module, actions: Sequence[SiteAction]
) -> tuple[forward_wrappers.Run, ...]:
    """Attach the actions that must act on the stream again: a module reads the mid stream without passing it on."""
    if structure.mid_residual is not None:
        return ()
    changing = sorted(
        (action for action in actions if action.reapply_to_residual is not None), key=lambda action: action.order
    )
    forward_wrappers.attach(layer, HookPoint.POST_ATTN, changing)
    return tuple(action.reapply_to_residual for action in changing if action.reapply_to_residual is not None)


def submodule_places(structure: LayerStructure, layer: nn.Module) -> dict[HookPoint, HookPlace]:
    """Return the hook points that are taken at submodules of `layer` and not at `layer`, in the forward's order."""
    places: dict[HookPoint, HookPlace] = {}
    is_pair = structure.style == "pair"
    scale = float(getattr(layer, structure.branch_scale)) if structure.branch_scale else None
    if structure.attn:
        places[HookPoint.ATTN_IN] = HookPlace(module=structure.attn, value=structure.attn_input)
    places |= structure.inner
    if structure.attn_branch and not is_pair:
        places[HookPoint.ATTN_OUT] = HookPlace(module=structure.attn_branch, scale=scale)
    if structure.mid:
        addend = structure.mid_residual if is_pair else None
        if is_pair:
            places[HookPoint.ATTN_OUT] = HookPlace(module=structure.mid, value=structure.mid_input, carry=addend)
        places[HookPoint.POST_ATTN] = HookPlace(
            module=structure.mid, value=structure.mid_input, addend=addend, carry=addend
        )
    if structure.mlp_in_is_norm_output and structure.mid_norm:
        places[HookPoint.MLP_IN] = HookPlace(module=structure.mid_norm)
    elif structure.mlp:
        places[HookPoint.MLP_IN] = HookPlace(module=structure.mlp, value=structure.mlp_input)
    if structure.mlp_branch and not is_pair:
        places[HookPoint.MLP_OUT] = HookPlace(module=structure.mlp_branch, scale=scale)
    return {hook: place for hook, place in places.items() if hook in structure.hooks}


def _install_final_norm(parent: nn.Module, actions: Sequence[SiteAction]) -> None:
    found = find_final_norm(parent)
    if found is None:
        raise UnsupportedError(
            f"no final norm was found in {type(parent).__name__}.forward; take final_norm out of the configured sites"
        )
    module = parent.get_submodule(found[0])
    runs = forward_wrappers.attach(module, HookPoint.FINAL_NORM, actions)
    taken = [(HookPoint.FINAL_NORM, HookPlace(module=found[0]), runs)]
    forward_wrappers.swap_class(module, forward_wrappers.module_forward(taken))


def reapplies_mid(layers: Sequence[tuple[int, nn.Module]]) -> bool:
    """Return whether a layer's mid stream is read by a module that does not pass it on."""
    try:
        return any(analyse_layer(type(layer), layer).mid_residual is None for _, layer in layers)
    except UnsupportedError:  # a layer with an action is refused when that is installed
        return True


def post_norms(layers: Sequence[tuple[int, nn.Module]]) -> frozenset[Site]:
    """Return the sites in front of norms whose results are added to the stream."""
    found = set[Site]()
    for index, layer in layers:
        with suppress(UnsupportedError):  # a layer with an action is refused when that is installed
            hooks = analyse_layer(type(layer), layer).inner.keys() & {HookPoint.ATTN_OUT_PRE, HookPoint.MLP_OUT_PRE}
            found |= {Site(index, hook) for hook in hooks}
    return frozenset(found)


def _facts(
    worker: Worker, model: ModelInfo, owned_layers: list[int], is_mid_reapplied: bool, running: LaunchedStep
) -> WorkerFacts:
    CompilationMode = vllm_names.COMPILATION_MODE.get()
    CUDAGraphMode = vllm_names.GRAPH_MODE.get()
    get_pp_group = vllm_names.PIPELINE_GROUP.get()
    get_tp_group = vllm_names.TENSOR_GROUP.get()

    config = worker.vllm_config
    mode = config.compilation_config.cudagraph_mode
    # Whole forwards that are recorded for any batch say nothing of the batches that they will be replayed for.
    knows_steps = mode is None or mode.mixed_mode() != CUDAGraphMode.FULL
    sizes = config.compilation_config.cudagraph_capture_sizes or [0]
    return WorkerFacts(
        model=model,
        owned_layers=tuple(owned_layers),
        device=torch.device(worker.device),
        dtype=config.model_config.dtype,
        max_tokens=max(config.scheduler_config.max_num_batched_tokens, *sizes, 1),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        is_compiled=config.compilation_config.mode != CompilationMode.NONE,
        tp_rank=get_tp_group().rank_in_group,
        tp_size=get_tp_group().world_size,
        gather=_gather,
        pp_rank=get_pp_group().rank_in_group,
        pp_size=get_pp_group().world_size,
        reapplies_mid=is_mid_reapplied,
        has_one_row_each=has_one_row_each if knows_steps else lambda: False,
        runs_requests=running,
        actions=action_target(config),
        network_keys=network_keys(config),
    )


def _gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all tensor-parallel ranks, ``[ranks, ...]``; each rank calls it at the same point."""
    group = vllm_names.TENSOR_GROUP.get()()
    gathered: torch.Tensor = group.all_gather(tensor[None].contiguous(), dim=0)
    return gathered


def _collect_actions(parts: Mapping[str, WorkerHooks], facts: WorkerFacts) -> dict[Site, list[SiteAction]]:
    collected: dict[Site, list[SiteAction]] = {}
    for part in parts.values():
        for site, action in part.headgate_actions(facts).items():
            collected.setdefault(site, []).append(action)
    return collected


def functions_of(action: SiteAction) -> list[object]:
    """The functions of an action that the forward may call."""
    functions = (
        *(action.run, action.reapply_to_residual, action.run_and_keep),
        *(action.before_attention, action.unfused),
    )
    return [function for function in functions if function is not None]


def _add_to_model_memory(runner: ModelRunner, device_bytes: int) -> None:
    """Add the parts' memory to the model's: vLLM 0.26 sizes the KV cache by it. Others measure; CPU runners lack it."""
    if hasattr(runner, "model_memory_usage"):
        runner.model_memory_usage += device_bytes


def _configs(vllm_config: VllmConfig, model: nn.Module) -> list[VllmConfig]:
    """Return the config of `model`, and the copies that its compiled parts have: of several models in one, each has."""
    copies = (vars(module).get("vllm_config") for module in model.modules())
    found = {id(config): config for config in (vllm_config, *copies) if config is not None}
    return list(found.values())


def _key_graph(
    configs: Iterable[VllmConfig], parts: Mapping[str, WorkerHooks], actions: Mapping[Site, Sequence[SiteAction]]
) -> None:
    """Make vLLM's compile caches distinguish our graphs from stock's and from each other's.

    `additional_config` is hashed into every compile-cache key. The operator's own section is taken out of it here,
    so that a consumer's output folder does not force a compilation; `settings` has read it before.
    """
    all_actions = [action for found in actions.values() for action in found]
    modules = traced_modules(function for action in all_actions for function in functions_of(action))
    key: dict[str, object] = {"code": digest_of(modules), "rewrites": REWRITES.is_on}
    for part in parts.values():
        key.update(part.headgate_graph_key())
    for config in configs:
        config.additional_config = {**config.additional_config, "headgate": {"graph": key}}


def _after(owner: Worker, name: str, call: Callable[[], None]) -> None:
    original: Function = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        call()
        return result

    setattr(owner, name, wrapped)


def _before(owner: Worker, name: str, call: Callable[[], None]) -> None:
    original: Function = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        call()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)
