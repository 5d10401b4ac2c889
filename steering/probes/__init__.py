"""Probes: weights that read a score off the rows of one site.

::

    from headgate.steering import probes

    probe = probes.fit("captures", {"req-1": True, "req-2": False}, at="12.post_mlp")
    probe.threshold, probe.metadata["held_out_auroc"]
    probe.scores(rows)                        # float64 [n, classes] of rows [n, hidden]
    probes.save("anger.safetensors", probe)   # for --probes anger=anger.safetensors

* `Probe`, with the reference for scores, and its files are in ``headgate.capture.probe``: consumers read them, too.
* ``wire``: probes as plain values.
* ``examples``: labels, and labelled rows, of captures or arrays.
* ``fitting``: `fit`, `from_sklearn` and `from_direction`.
* ``groups``: directions between groups of rows, such as ``pos_3 - default_1``.
* ``judging``: ROC curves, thresholds, and all figures of a probe.
* ``commands``: ``headgate probe``.
"""

from __future__ import annotations

from headgate.capture.probe import Activation, HiddenLayer, Pooling, Probe, ProbeError, ProbeKind, load, save
from headgate.steering.probes.examples import read_labels
from headgate.steering.probes.fitting import fit, from_direction, from_sklearn
from headgate.steering.probes.judging import Evaluation, evaluate

__all__ = [
    "Activation",
    "Evaluation",
    "HiddenLayer",
    "Pooling",
    "Probe",
    "ProbeError",
    "ProbeKind",
    "evaluate",
    "fit",
    "from_direction",
    "from_sklearn",
    "load",
    "read_labels",
    "save",
]
