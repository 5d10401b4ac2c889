"""Controllers: Python that reads scores of running requests and changes their steering, found as plug-ins.

::

    from headgate.steering.controllers import Controller, SetSteering, load_probe

    class CalmDown(Controller):
        def __init__(self, module: str) -> None:
            self.module = module

        def probes(self):
            return {"anger": load_probe("anger.safetensors")}

        def step(self, readings):
            for row in readings.last_rows():
                yield SetSteering(row.request, module=self.module, scale=max(0.0, row.scores["anger"]))

A package declares its class in the entry-point group ``headgate.controllers``; the operator starts it with
``--steering-controllers calm-down:module=calm``. Keys of that shorthand are the arguments of the class.

* `controller`: the class to derive from, and what it is given.
* `actions`: what it may ask for.
* `loading`: from the configuration to an object.
* `host`: calls it, within a budget of time; `controller_process` does so in another process.
* `threshold`, `pid`: the two that come with headgate; `one_module` has what they share.
* `testing`: checks that every controller should pass.

Importing this package imports neither vLLM nor torch.
"""

from headgate.capture.probe import Probe, ProbeKind
from headgate.capture.probe import load as load_probe
from headgate.steering.controllers.actions import Action, SetGlobal, SetScale, SetSteering, SetSteeringEach, Stop
from headgate.steering.controllers.controller import Controller, ReadRow, RequestView, StepReadings

__all__ = [
    "Action",
    "Controller",
    "Probe",
    "ProbeKind",
    "ReadRow",
    "RequestView",
    "SetGlobal",
    "SetScale",
    "SetSteering",
    "SetSteeringEach",
    "StepReadings",
    "Stop",
    "load_probe",
]
