"""Consumers are found by name, only when asked for, and refused with words that help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headgate.capture.schema.config import CaptureConsumersConfig, CaptureConsumerSpec
from headgate.capture.schema.consumer import check_ids
from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.registry import load_configured, load_consumer, load_readouts, open_consumers
from tests.fakes.pipeline import MODEL, SITES
from tests.fakes.published import install_plugin

Publish = Callable[..., None]

CONSUMER = """
from headgate.capture.schema.consumer import BatchedConsumer, StreamingConsumer, CaptureConsumer
from headgate.capture.schema.errors import ConfigError
log = []

class Good(BatchedConsumer):
    def __init__(self, params, context):
        super().__init__(params, context)
        log.append(("open", context.instance_name))
        if params.get("fail"):
            raise OSError("no disk")
    @classmethod
    def check_params(cls, params):
        if "wrong" in params:
            raise ConfigError("wrong: is not a parameter")
        log.append(("check", None))
    def on_capture(self, captured): ...
    def close(self, timeout_s):
        log.append(("close", self.context.instance_name))

class Driver(Good):
    location = "driver"

class Unfinished(StreamingConsumer):
    def write(self, blocks): ...

class Elsewhere(Good):
    location = "moon"

class Moody(Good):
    reads_client_spec = "sometimes"

class Lazy(Good):
    linger_s = 60

class Reading(Good):
    @classmethod
    def readouts(cls, params, model):
        from tests.fakes.readouts import Multiples
        if params.get("missing"):
            raise OSError("no such file")
        outputs = params.get("outputs", 2)
        kind = type("Asking", (Multiples,), {"num_arguments": params.get("arguments", 0)})
        return {model.sites[place]: kind(outputs + place) for place in params.get("places", [2, 0])}

class ReadingElsewhere(Good):
    @classmethod
    def readouts(cls, params, model):
        from headgate.capture.schema.sites import Site
        from tests.fakes.readouts import Multiples
        return {Site.parse("7.post_mlp"): Multiples(1)}

class Neither(CaptureConsumer): ...

def function(): ...
"""


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publish]:
    """Install a package that publishes consumers: ``publish("name", good="Good")``."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(distribution: str, source: str = CONSUMER, **entries: str) -> None:
        install_plugin(tmp_path, distribution, source, entries)

    yield install
    for name in [name for name in sys.modules if name.startswith("consumers_of_")]:
        del sys.modules[name]


def config(*consumers: CaptureConsumerSpec) -> CaptureConsumersConfig:
    return CaptureConsumersConfig(consumers=consumers)


def log_of(distribution: str) -> list[tuple[str, str | None]]:
    return sys.modules[f"consumers_of_{distribution}"].log


def test_a_consumer_is_loaded_by_its_name(publish: Publish) -> None:
    publish("acme", good="Good")

    assert load_consumer("good").__name__ == "Good"


def test_only_what_is_asked_for_is_imported(publish: Publish) -> None:
    publish("acme", good="Good")
    publish("broken", source="raise RuntimeError('at import')", bad="Bad")

    load_consumer("good")

    assert "consumers_of_broken" not in sys.modules


def test_an_unknown_name_is_answered_with_the_known_ones(publish: Publish) -> None:
    publish("acme", good="Good", other="Driver")

    with pytest.raises(ConfigError, match=r"consumer 'god' is not installed; installed: .*good.*other"):
        load_consumer("god")


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("function", r"is <function .*; expected a subclass of BatchedConsumer or StreamingConsumer"),
        ("Neither", "subclasses CaptureConsumer alone"),
        ("Unfinished", "does not define finish"),
        ("Elsewhere", "location is 'moon'; expected 'worker', 'engine' or 'driver'"),
        ("Moody", "reads_client_spec is 'sometimes'; expected True or False"),
        ("Lazy", "linger_s is 60; expected seconds, from 0 to 1"),
        ("Missing", "cannot be imported: AttributeError"),
    ],
)
def test_what_does_not_fulfil_the_contract_is_refused_with_what_is_missing(
    publish: Publish, attribute: str, message: str
) -> None:
    publish("acme", mine=attribute)

    with pytest.raises(ConfigError, match=rf"consumer 'mine' \(consumers_of_acme:{attribute} of acme 1.5\).*{message}"):
        load_consumer("mine")


def test_a_module_that_fails_to_import_is_refused_with_its_error(publish: Publish) -> None:
    publish("broken", source="import a_module_that_is_missing", bad="Bad")

    with pytest.raises(ConfigError, match=r"cannot be imported: ModuleNotFoundError: .*a_module_that_is_missing"):
        load_consumer("bad")


def test_a_name_that_two_packages_publish_is_refused_with_both(publish: Publish) -> None:
    publish("acme", good="Good")
    publish("rival", good="Good")

    with pytest.raises(ConfigError, match=r"published more than once: .*of acme 1.5, .*of rival 1.5"):
        load_consumer("good")


def test_consumers_of_a_location_are_opened_with_their_place_in_the_configuration(publish: Publish) -> None:
    publish("acme", good="Good", driver="Driver")
    document = config(
        CaptureConsumerSpec(name="driver"),
        CaptureConsumerSpec(name="good", instance_name="mine", params={"root": "/data"}),
    )

    (worker,) = open_consumers(
        document, model=MODEL, location="worker", pp_rank=1, pp_size=2, versions={"vllm": "0.32"}
    )
    (driver,) = open_consumers(document, model=MODEL, location="driver")

    assert (worker.bit, driver.bit) == (1, 0)
    assert worker.spec is document.consumers[1]
    assert worker.consumer.params == {"root": "/data"}
    context = worker.consumer.context
    assert (context.instance_name, context.pp_rank, context.pp_size) == ("mine", 1, 2)
    assert context.versions == {"vllm": "0.32"}
    assert context.model is MODEL


def test_a_consumer_of_the_worker_can_be_configured_for_the_driver(publish: Publish) -> None:
    publish("acme", good="Good")
    document = config(
        CaptureConsumerSpec(name="good", instance_name="here"),
        CaptureConsumerSpec(name="good", instance_name="there", location="driver"),
        CaptureConsumerSpec(name="good", instance_name="said", location="worker"),
    )

    workers = open_consumers(document, model=MODEL, location="worker")
    (driver,) = open_consumers(document, model=MODEL, location="driver")

    assert [worker.spec.instance for worker in workers] == ["here", "said"]
    assert (driver.bit, driver.spec.instance, driver.consumer.location) == (1, "there", "driver")
    assert isinstance(driver.consumer, load_consumer("good"))
    assert load_consumer("good").location == "worker"
    moved = load_configured(document.consumers[1])
    assert (moved.__module__, moved.__qualname__, moved.linger_s) == ("consumers_of_acme", "Good", 0.25)


def test_a_consumer_of_the_driver_cannot_be_configured_for_the_worker(publish: Publish) -> None:
    publish("acme", driver="Driver")
    document = config(CaptureConsumerSpec(name="driver", instance_name="mine", location="worker"))

    with pytest.raises(ConfigError, match="consumer 'mine': location is 'worker', but driver needs what only the"):
        open_consumers(document, model=MODEL, location="worker")


def test_parameters_of_all_are_checked_before_any_is_opened(publish: Publish) -> None:
    publish("acme", good="Good")
    document = config(
        CaptureConsumerSpec(name="good"),
        CaptureConsumerSpec(name="good", instance_name="second", params={"wrong": 1}),
    )

    with pytest.raises(ConfigError, match="consumer 'second': wrong: is not a parameter"):
        open_consumers(document, model=MODEL, location="worker")

    assert log_of("acme") == [("check", None)]


def test_a_consumer_that_cannot_be_opened_closes_those_before_it(publish: Publish) -> None:
    publish("acme", good="Good")
    document = config(
        CaptureConsumerSpec(name="good", instance_name="first"),
        CaptureConsumerSpec(name="good", instance_name="second", params={"fail": True}),
    )

    with pytest.raises(ConfigError, match="consumer 'second' cannot be opened: no disk"):
        open_consumers(document, model=MODEL, location="worker")

    assert log_of("acme")[2:] == [("open", "first"), ("open", "second"), ("close", "first")]


def test_readouts_are_those_of_all_consumers_for_the_sites_of_a_worker(publish: Publish) -> None:
    publish("one", reads="Reading", plain="Good")
    many = CaptureConsumerSpec(name="reads", instance_name="many", params={"outputs": 5, "places": [1, 2]})

    configured = config(CaptureConsumerSpec(name="plain"), CaptureConsumerSpec(name="reads"), many)
    classes = [load_configured(spec) for spec in configured.consumers]

    found = load_readouts(configured, classes, MODEL, SITES[1:])

    assert [(at.bit, at.site, at.facts.num_outputs) for at, _ in found] == [
        (1, SITES[2], 4),
        (2, SITES[1], 6),
        (2, SITES[2], 7),
    ]
    assert all(readout.key == at.facts.key for at, readout in found)


def test_ids_that_a_float32_does_not_hold_are_refused() -> None:
    check_ids(1 << 24, "sae 'wide'")
    assert float(np.float32((1 << 24) - 1)) == (1 << 24) - 1

    with pytest.raises(ConfigError, match="sae 'wide': 16777217 ids; a readout can return ids below 16777216"):
        check_ids((1 << 24) + 1, "sae 'wide'")


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("reads", {"wrong": 1}, "consumer 'reads': wrong: is not a parameter"),
        ("reads", {"missing": True}, "consumer 'reads': no such file"),
        ("reads", {"outputs": -2}, "consumer 'reads': the readout of 2.post_mlp has 0 outputs; expected 1 to 65536"),
        ("reads", {"outputs": 70000}, "expected 1 to 65536"),
        ("reads", {"arguments": 1025}, "the readout of 2.post_mlp has 1025 arguments; expected 0 to 1024"),
        ("elsewhere", {}, "consumer 'elsewhere': reads 7.post_mlp, which is not captured here"),
    ],
)
def test_a_readout_that_cannot_be_made_is_refused(
    publish: Publish, name: str, params: dict[str, object], message: str
) -> None:
    publish("one", reads="Reading", elsewhere="ReadingElsewhere")

    with pytest.raises(ConfigError, match=message):
        load_readouts(config(CaptureConsumerSpec(name=name, params=params)), [load_consumer(name)], MODEL, SITES)
