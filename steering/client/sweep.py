"""The result of a sweep of activation patching: a grid of values, and its heat map."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import msgspec
import numpy as np

from headgate.capture.schema.sites import FINAL_NORM_SITE
from headgate.steering.client.answers import Answer, Array, ServerError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = " .:-=+*#%@?"
"""From low to high; the last is for no value."""


class SweepOptions(TypedDict, total=False):
    """Options of a sweep: which rows it puts where, and the metric.

    Attributes:
        foil: The token that the answer is compared with; none if absent.
        metric: ``recovered`` (0 as the corrupted prompt, 1 as the clean one; the default), ``logit_diff`` or
            ``logprob``.
        hook: Hook point of the rows; ``post_mlp`` if absent.
        layers: ``"all"`` (the default), a list, or ranges.
        positions: Positions of the corrupted prompt, as captures select them; ``all_prompt`` if absent.
        alpha: Share of the clean row in the patched one; 1 if absent.
        consumer: Name of the server's consumer that keeps rows; ``memory`` if absent.
    """

    foil: Any
    metric: str
    hook: str
    layers: Any
    positions: Any
    alpha: float | None
    consumer: str


class SweepPlan(NamedTuple):
    """The two requests of a sweep.

    Attributes:
        consumer: Keeps the clean run's rows.
        fields: Fields of the clean run, beside its prompt.
        body: Body of the sweep, beside the model.
    """

    consumer: str
    fields: dict[str, Any]
    body: dict[str, Any]


class Cell(NamedTuple):
    """One value of a sweep.

    Attributes:
        site: Where the clean row was put.
        position: Position of the row in the corrupted prompt.
        value: The metric of the patched prompt; not a number if the server could not compute it.
    """

    site: str
    position: int
    value: float


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """The first event of a sweep.

    Attributes:
        metric: ``logprob``, ``logit_diff`` or ``recovered``.
        sites: In the order of the forward pass.
        positions: Positions of the corrupted prompt, ascending.
        source_positions: Positions of the rows in the clean prompt.
        tokens: Texts of the corrupted prompt's tokens at `positions`.
        skipped: Positions that were asked for and have no partner in the clean prompt.
        clean: Logprob of the answer after the clean prompt; with a foil, less the foil's.
        corrupt: The same after the corrupted prompt.
        num_cells: Values that follow.
    """

    metric: str
    sites: tuple[str, ...]
    positions: tuple[int, ...]
    source_positions: tuple[int, ...]
    tokens: tuple[str, ...]
    skipped: tuple[int, ...]
    clean: float
    corrupt: float
    num_cells: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchSweep:
    """A whole sweep.

    Attributes:
        grid: What was swept, and the metric without patches.
        values: float64 ``[sites, positions]``; not a number where there is no value.
    """

    grid: Grid
    values: Array = field(repr=False)

    def best(self, count: int = 1) -> list[Cell]:
        """Return the cells with the largest values, the largest first."""
        order = np.argsort(-np.nan_to_num(self.values, nan=-np.inf), axis=None, kind="stable")[:count]
        return [self._cell(*divmod(int(index), len(self.grid.positions))) for index in order]

    def _cell(self, row: int, column: int) -> Cell:
        return Cell(self.grid.sites[row], self.grid.positions[column], float(self.values[row, column]))

    def text(self) -> str:
        """Return a heat map in letters: a line for each site, a letter for each position, and the tokens below."""
        low, high = np.nanmin(self.values), np.nanmax(self.values)
        share = (self.values - low) / ((high - low) or 1.0)
        shades = np.nan_to_num(share * (len(_SHADES) - 2), nan=-1.0).round().astype(int)
        width = max(len(site) for site in self.grid.sites)
        lines = [
            f"{site:>{width}} |{''.join(_SHADES[shade] for shade in row)}|"
            for site, row in zip(self.grid.sites, shades, strict=True)
        ]
        legend = f"{self.grid.metric}: {_SHADES[0]!r} {low:.3g} to {_SHADES[-2]!r} {high:.3g}"
        tokens = " ".join(f"{p}:{token!r}" for p, token in zip(self.grid.positions, self.grid.tokens, strict=True))
        return "\n".join([*reversed(lines), tokens, legend])

    def plot(self) -> Figure:
        """Return the heat map as a matplotlib figure (``pip install 'headgate[plot]'``), the last site at the top."""
        from matplotlib.figure import Figure

        grid, (num_sites, num_positions) = self.grid, self.values.shape
        figure = Figure(figsize=(2 + 0.45 * num_positions, 1.5 + 0.2 * num_sites), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(self.values, origin="lower", aspect="auto", cmap="viridis")
        axes.set_yticks(range(num_sites), grid.sites, fontsize=7)
        axes.set_xticks(range(num_positions), [token.replace("$", r"\$") for token in grid.tokens], rotation=60)
        axes.set_title(f"{grid.metric}: clean {grid.clean:.2f}, corrupted {grid.corrupt:.2f}")
        figure.colorbar(image, ax=axes)
        return figure


def collect(events: Iterable[Mapping[str, Any]]) -> PatchSweep:
    """Put the events of a sweep together.

    Raises:
        ServerError: If the stream ended early.
        msgspec.ValidationError: If an event is none of a sweep.
    """
    arriving = iter(events)
    first = next(arriving, None)
    if first is None:
        raise ServerError("the sweep ended before it began", status=None, field=None)
    grid = msgspec.convert(first, Grid)
    values = np.full((len(grid.sites), len(grid.positions)), np.nan)
    rows = {site: row for row, site in enumerate(grid.sites)}
    columns = {position: column for column, position in enumerate(grid.positions)}
    num_cells = 0
    for event in arriving:
        value = event["value"]
        values[rows[event["site"]], columns[event["position"]]] = np.nan if value is None else value
        num_cells += 1
    if num_cells != grid.num_cells:
        raise ServerError(f"the sweep ended after {num_cells} of {grid.num_cells} cells", status=None, field=None)
    return PatchSweep(grid=grid, values=values)


def check_kept(answer: Answer, consumer: str) -> None:
    """Refuse to go on without the clean run's rows.

    Raises:
        ServerError: If they were not kept.
    """
    result = answer.capture_results[consumer]
    if result.status != "ok":
        raise ServerError(f"the clean run was not captured: {result.error}", status=None, field=f"capture.{consumer}")


def plan_sweep(
    corrupt: Any,
    answer: Any,
    *,
    foil: Any = None,
    metric: str = "recovered",
    hook: str = "post_mlp",
    layers: Any = "all",
    positions: Any = "all_prompt",
    alpha: float | None = None,
    consumer: str = "memory",
) -> SweepPlan:
    """Return the requests of a sweep; see `SweepOptions`. The rows are kept under a name that is new each time."""
    name = f"sweep-{secrets.token_hex(8)}"
    is_last = hook == FINAL_NORM_SITE.hook
    spec = {"hooks": {hook: "all" if is_last else layers}, "positions": "all_prompt", "keep": name}
    at = hook if is_last else {"hook": hook, "layers": layers}
    body = {"source": name, "prompt": corrupt, "answer": answer, "foil": foil, "metric": metric, "at": at}
    body |= {"positions": positions, "alpha": alpha}
    return SweepPlan(consumer, {"max_tokens": 1, "capture": {consumer: spec}}, body)
