"""What the demo prints."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from examples.demo.requests import Answer

if TYPE_CHECKING:
    from examples.demo.check import HookError
    from examples.demo.gate import Gated
    from examples.demo.steer import Apart, Steered
    from headgate.consumers.reader import CaptureFolder

EXPLAINED = {
    "pre_attn": "stream into the layer",
    "attn_in": "normed input of attention",
    "hook_z": "what its heads give",
    "attn_out": "what attention adds to it",
    "post_attn": "stream between attention and MLP",
    "mlp_in": "normed input of the MLP",
    "mlp_out": "what the MLP adds",
    "post_mlp": "stream out of the layer",
    "final_norm": "into the LM head",
}

SEEN_AT = 20
"""Layer at which the effect of steering is shown."""
CLEARLY = 0.1
"""How much further along a stronger vector must lead; from sad to glad prompts it is 1."""

console = Console(width=None if sys.stdout.isatty() else 118, highlight=False)


def section(title: str, line: str) -> None:
    """A heading and what follows it."""
    console.print(f"\n[bold cyan]{title}[/bold cyan]  {line}")


def table_of(*columns: str) -> Table:
    """An empty table; a column whose name begins with ``>`` is aligned to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def show_requests(answers: list[Answer]) -> None:
    """Who asked what, and what was captured of it."""
    section("Requests", "each with its own selection")
    table = table_of("request", "question and answer", "captured", ">rows")
    for answer in answers:
        text = f"{answer.ask.question}\n[green]{shorten(answer.text)}[/green]"
        table.add_row(answer.ask.name, text, answer.ask.wants, str(answer.result.get("num_rows", "")))
    console.print(table)


def show_files(folder: CaptureFolder, root: Path) -> None:
    """What the requests of `show_requests` left on the disk, as the reader sees it."""
    section("Files", f"under {root}, read back with open_captures()")
    table = table_of("file", ">sites", ">rows", "dtype", ">size")
    num_vectors = num_bytes = 0
    for capture in folder:
        if capture.tag.startswith(("contrast", "ablated", "steered", "mood")):
            continue
        name = Path(capture.paths[0]).relative_to(root.resolve())
        if capture.layout == "raw":
            name = name.parent / "*"
        counts = (str(len(capture.sites)), str(capture.num_rows), str(capture.metadata["dtype"]))
        table.add_row(str(name), *counts, f"{capture.num_bytes / 1e6:.2f} MB")
        num_vectors += len(capture.sites) * capture.num_rows
        num_bytes += capture.num_bytes
    console.print(table)
    console.print(f"{num_vectors} vectors, {num_bytes / 1e6:.1f} MB")


def show_check(errors: list[HookError], tolerance: float) -> bool:
    """The largest error of each hook point; returns whether all of them are within `tolerance`."""
    table = table_of("hook point", "", ">layers", ">vectors", ">values up to", ">max error", ">max relative error")
    for error in errors:
        layers = "-" if error.hook == "final_norm" else str(error.num_sites)
        numbers = (str(error.num_rows), f"{error.scale:.0f}", f"{error.largest:.1e}", f"{error.relative:.1e}")
        table.add_row(error.hook, EXPLAINED[error.hook], layers, *numbers)
    console.print(table)
    worst = max(error.relative for error in errors)
    verdict = "[green]equal[/green]" if worst <= tolerance else "[red]NOT EQUAL[/red]"
    console.print(f"{verdict}: the largest relative error of a vector is {worst:.1e} (allowed: {tolerance:.0e})")
    return worst <= tolerance


def show_steered(steered: list[Steered]) -> bool:
    """The answers and where their last layer's stream lies; returns whether more strength always leads further."""
    table = table_of(">strength", "answer", f">mood at layer {SEEN_AT}")
    for answer in steered:
        strength = f"{answer.strength:+.0f}" if answer.strength else "unsteered"
        table.add_row(strength, shorten(answer.text, 78), f"{answer.mood[SEEN_AT]:+.2f}")
    console.print(table)
    moods = [answer.mood[SEEN_AT] for answer in steered]
    is_ordered = all(less + CLEARLY < more for less, more in pairwise(moods))
    verdict = "[green]more strength, more joy[/green]" if is_ordered else "[red]NOT IN ORDER[/red]"
    console.print(f"{verdict}: there, 0 is the mean of the sad prompts and 1 that of the glad ones")
    return is_ordered


def show_ablated(apart: Apart) -> bool:
    """How far glad and sad prompts lie apart with and without the direction; returns whether little is left of it."""
    plain, ablated = (abs(float(one[SEEN_AT])) for one in (apart.plain, apart.ablated))
    is_gone = ablated < plain / 5
    verdict = "[green]joy ablated[/green]" if is_gone else "[red]STILL THERE[/red]"
    console.print(
        f"{verdict}: along the vector, glad and sad prompts lie {plain:.2f} apart at layer {SEEN_AT}; with its "
        f"direction taken out of every layer before, {ablated:.2f}"
    )
    return is_gone


def show_gated(gated: Gated) -> bool:
    """Scores, answers and whether the gate fired; returns whether it did for the angry question alone."""
    table = table_of("mood", "answer", ">anger", "gate")
    table.add_row("angry", shorten(gated.ungated, 78), "", "none")
    for mood, answer in gated.answers.items():
        score, has_fired = f"{gated.decisive_score(mood):+.2f}", any(gated.applied(mood))
        table.add_row(mood, shorten(answer.text, 78), score, "fired" if has_fired else "quiet")
    console.print(table)
    is_right = any(gated.applied("angry")) and not any(gated.applied("calm")) and gated.is_plain_untouched
    verdict = "[green]only the angry one is calmed[/green]" if is_right else "[red]NOT ONLY THE ANGRY ONE[/red]"
    same = "the tokens" if gated.is_plain_untouched else "OTHER TOKENS than those"
    console.print(f"{verdict}; their plain neighbour has {same} that it had alone")
    return is_right


def shorten(text: str, width: int = 52) -> str:
    """The beginning of `text` in one line."""
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."
