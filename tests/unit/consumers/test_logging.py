"""The logging consumer."""

from __future__ import annotations

import logging

import pytest

from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.capture.schema.errors import ConfigError
from headgate.consumers.feed import EXAMPLE_MODEL, ExampleRequest, Feed
from headgate.consumers.logging import LoggingConsumer


def test_one_line_says_who_and_what(caplog: pytest.LogCaptureFixture) -> None:
    context = SpecContext(instance_name="log", model=EXAMPLE_MODEL, params={}, client_request_id="r1")
    spec = LoggingConsumer.validate_client_spec({"hooks": {"post_mlp": [1]}}, context)
    feed = Feed(LoggingConsumer({"level": "warning"}, ConsumerContext(instance_name="log", model=EXAMPLE_MODEL)))

    with caplog.at_level(logging.WARNING):
        feed.whole(ExampleRequest(spec, "r1", prompt=5, output=4))

    (line,) = [record.getMessage() for record in caplog.records if record.name == "headgate.consumers.logging"]
    assert line == ("log: request client-r1 (stop): 8 rows, 5 of the prompt, 0 dropped: {'1.post_mlp': [8, 16]}")


@pytest.mark.parametrize("level", ["loud", 3, None])
def test_an_unknown_level_is_refused(level: object) -> None:
    with pytest.raises(ConfigError, match="level"):
        LoggingConsumer.check_params({"level": level})
