"""Probes: weights that read a score off the rows of one site.

::

    from headgate.steering import probes

    probe = probes.load("anger.safetensors")
    probe.site, probe.kind, probe.threshold   # Site(12, post_mlp), ProbeKind.LINEAR, 0.5
    probe.scores(rows)                        # float64 [n, classes] of rows [n, hidden]

* ``probe``: `Probe`, with the reference for scores.
* ``files``: safetensors files of probes.
"""

from __future__ import annotations

from headgate.steering.probes.files import load, save
from headgate.steering.probes.probe import Activation, HiddenLayer, Pooling, Probe, ProbeError, ProbeKind

__all__ = ["Activation", "HiddenLayer", "Pooling", "Probe", "ProbeError", "ProbeKind", "load", "save"]
