"""The probes of one engine core, and the operator's calls about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from headgate.capture.probe import Probe, ProbeError, load
from headgate.capture.schema.errors import RequestError
from headgate.steering.gates.gate import probe_key
from headgate.steering.vectors.phase_vectors import Steerable

MAX_BYTES = 256 << 20
"""Weights of all registered probes together, at most."""


class ProbeRegistry:
    """Probes by name. Any thread; a probe that a caller has stays as it is when its name is registered anew.

    Attributes:
        by_name: All probes: another object after each change.
    """

    def __init__(self) -> None:
        self.by_name: Mapping[str, Probe] = {}
        self._lock = Lock()

    def put(self, name: str, probe: Probe) -> None:
        """Register a probe, in place of an earlier one of its name.

        Raises:
            RequestError: If the weights of all take more than `MAX_BYTES`. Nothing has changed.
        """
        with self._lock:
            changed = {**self.by_name, name: probe}
            size = sum(each.nbytes for each in changed.values())
            if size > MAX_BYTES:
                raise RequestError(
                    "weight",
                    f"all registered probes would take {size >> 20} MiB of {MAX_BYTES >> 20}; unregister some first",
                )
            self.by_name = changed

    def remove(self, name: str) -> None:
        """Forget the probe of that name."""
        with self._lock:
            self.by_name = {other: probe for other, probe in self.by_name.items() if other != name}

    def find(self, name: str) -> Probe | None:
        """Return the probe of that name, if there is one."""
        return self.by_name.get(name)

    def all(self) -> dict[str, Probe]:
        """Return all probes by name, in the order of the names."""
        return dict(sorted(self.by_name.items()))

    def names(self) -> list[dict[str, Any]]:
        """Return plain values of all probes for front ends, each with its key among registered names as ``name``."""
        return [
            {"name": probe_key(name), "at": probe.site.name, "classes": list(probe.classes)}
            for name, probe in self.all().items()
        ]


def open_probe(path: Path, steerable: Steerable) -> Probe:
    """Read a file of a probe that fits a model.

    Raises:
        ProbeError: If it cannot be read, or does not fit; the message names the file.
    """
    probe = load(path)
    try:
        check_fits(probe, steerable)
    except ProbeError as error:
        raise ProbeError(f"{path}: {error}") from error
    return probe


def refuse_unfit(probe: Probe, steerable: Steerable) -> None:
    """Refuse a client's probe that this engine cannot evaluate: see `check_fits`.

    Raises:
        RequestError: Naming the field of the probe that does not fit.
    """
    try:
        check_fits(probe, steerable)
    except ProbeError as error:
        raise RequestError(error.field or "probe", error.message) from error


def check_fits(probe: Probe, steerable: Steerable) -> None:
    """Refuse a probe that this engine cannot evaluate.

    Raises:
        ProbeError: If it is too large an MLP, its site is not declared, or its width is another one than the site's.
    """
    if probe.hidden is not None and len(probe.hidden.weight) >= steerable.max_probe_units:
        raise ProbeError(
            f"has {len(probe.hidden.weight)} units; room is for {steerable.max_probe_units}, with one more for each "
            "probe; the operator sets --max-probe-units",
            "hidden.weight",
        )
    if probe.site not in steerable.op_sites:
        declared = ", ".join(site.name for site in steerable.op_sites) or "none"
        raise ProbeError(
            f"no probe can read at {probe.site.name}; declared sites: {declared}; the operator declares them with "
            "--steering-op-sites, or by --probes NAME=PATH",
            "at",
        )
    if why := steerable.why_unread(probe.site):
        raise ProbeError(why, "at")
    if probe.hidden_size != (width := steerable.width(probe.site)):
        raise ProbeError(f"expected rows of {width} values, as at {probe.site.name}; got {probe.hidden_size}", "weight")


def described(name: str, probe: Probe) -> dict[str, Any]:
    """Return plain values for the list of probes."""
    return {
        "name": name,
        "at": probe.site.name,
        "kind": probe.kind.value,
        "classes": list(probe.classes),
        "hidden_size": probe.hidden_size,
        "threshold": probe.threshold,
        "pooling": probe.pooling,
        "model": probe.model,
        "metadata": dict(probe.metadata),
        "sha256": probe.sha256,
    }
