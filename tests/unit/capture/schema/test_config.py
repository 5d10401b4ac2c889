"""The operator's document and the command line's shorthand: what they accept, and what they say otherwise."""

from __future__ import annotations

import json
import string
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.capture.schema.config import (
    MAX_CONSUMERS,
    CaptureConsumersConfig,
    CaptureConsumerSpec,
    parse_config,
    parse_shorthand,
)
from headgate.capture.schema.errors import ConfigError

INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("document", [None, {}], ids=repr)
def test_nothing_configured_means_no_consumers(document: dict[str, Any] | None) -> None:
    assert parse_config(document) == CaptureConsumersConfig()
    assert parse_config(document).consumers == ()


def test_a_whole_document_is_read() -> None:
    document = {
        "consumers": [
            {"name": "filesystem", "params": {"root": "/data", "fsync": False}},
            {"name": "filesystem", "instance_name": "second", "overload": "spill", "queue_bytes": 1, "max_stall_s": 2},
        ],
        "sites": {"post_mlp": [1, 2], "final_norm": "all"},
        "ring_rows": 4096,
        "result_wait_s": 0,
    }

    config = parse_config(MappingProxyType(document))

    assert [consumer.instance for consumer in config.consumers] == ["filesystem", "second"]
    assert config.consumers[0].params == {"root": "/data", "fsync": False}
    assert config.consumers[1].overload == "spill"
    assert (config.sites, config.ring_rows, config.result_wait_s) == (document["sites"], 4096, 0)


def test_consumers_may_be_given_as_objects() -> None:
    consumer = CaptureConsumerSpec(name="logging")

    assert parse_config({"consumers": [consumer]}).consumers == (consumer,)


def test_a_configuration_shares_no_default_with_another() -> None:
    parse_config({}).sites["mlp_in"] = "all"
    CaptureConsumerSpec(name="a").params["root"] = "/"

    assert parse_config({}).sites == {"post_mlp": "all"}
    assert CaptureConsumerSpec(name="a").params == {}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"consumer": []}, "unknown field `consumer`"),
        ([], "expected an object, got []"),
        ("", "expected an object, got ''"),
        ({"consumers": [{"name": "a", "root": "/"}]}, "unknown field `root` - at `$.consumers[0]`"),
        ({"consumers": [{}]}, "missing required field `name`"),
        ({"consumers": [{"name": ""}]}, "name is empty"),
        ({"consumers": [{"name": "a"}, {"name": "a"}]}, "['a'] configured more than once"),
        ({"consumers": [{"name": "a"}, {"name": "b", "instance_name": "a"}]}, "['a'] configured more than once"),
        ({"consumers": [{"name": str(i)} for i in range(MAX_CONSUMERS + 1)]}, "at most 63 are supported"),
        ({"consumers": [{"name": "a", "overload": "wait"}]}, "Invalid enum value 'wait'"),
        ({"consumers": [{"name": "a", "queue_bytes": 0}]}, "a.queue_bytes: must be above 0, got 0"),
        ({"consumers": [{"name": "a", "max_stall_s": 0}]}, "a.max_stall_s: must be above 0"),
        ({"consumers": [{"name": "a", "max_stall_s": INFINITY}]}, "a.max_stall_s: must be above 0 and at most"),
        ({"sites": {}}, "name at least one hook point"),
        ({"ring_rows": 0}, "ring_rows: must be above 0, got 0"),
        ({"ring_rows": "all"}, "Expected `int | null`, got `str` - at `$.ring_rows`"),
        ({"staging_bytes": -1}, "staging_bytes: must be above 0, got -1"),
        ({"result_wait_s": -0.1}, "result_wait_s: must be from 0"),
        ({"result_wait_s": NAN}, "result_wait_s: must be from 0"),
        ({"result_timeout_s": NAN}, "result_timeout_s: must be above 0"),
        ({"close_timeout_s": INFINITY}, "close_timeout_s: must be above 0 and at most"),
        ({"self_test": "no"}, "Expected `bool`, got `str` - at `$.self_test`"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_wrong_document_is_refused_with_its_field(document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(document)

    assert message.lower() in str(caught.value).lower()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("logging", CaptureConsumerSpec(name="logging")),
        (" logging : ", CaptureConsumerSpec(name="logging")),
        ("fs:root=/data", CaptureConsumerSpec(name="fs", params={"root": "/data"})),
        ("fs:root=s3://bucket/a=b", CaptureConsumerSpec(name="fs", params={"root": "s3://bucket/a=b"})),
        ("fs:n=3,x=0.5,on=true,off=False,no=None,", CaptureConsumerSpec(
            name="fs", params={"n": 3, "x": 0.5, "on": True, "off": False, "no": None})),
        ("fs: layers = [1, 2], map = {\"a\": [3, 4]} ", CaptureConsumerSpec(
            name="fs", params={"layers": [1, 2], "map": {"a": [3, 4]}})),
        ('fs:root="/a,b",tag="7"', CaptureConsumerSpec(name="fs", params={"root": "/a,b", "tag": "7"})),
        (r'fs:tag="a\"],b",n=1', CaptureConsumerSpec(name="fs", params={"tag": 'a"],b', "n": 1})),
        ("fs:tag=a b", CaptureConsumerSpec(name="fs", params={"tag": "a b"})),
        ("fs:tag=", CaptureConsumerSpec(name="fs", params={"tag": ""})),
        ("fs:name=x,params=y", CaptureConsumerSpec(name="fs", params={"name": "x", "params": "y"})),
        ("fs:location=driver,root=/", CaptureConsumerSpec(name="fs", location="driver", params={"root": "/"})),
        ("fs:instance_name=second,overload=drop,queue_bytes=1024,max_stall_s=1,root=/", CaptureConsumerSpec(
            name="fs", instance_name="second", overload="drop", queue_bytes=1024, max_stall_s=1, params={"root": "/"})),
    ],
)  # fmt: skip
def test_the_shorthand_is_read(text: str, expected: CaptureConsumerSpec) -> None:
    assert parse_shorthand(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected name:key=val,key=val"),
        (":root=/", "expected name:key=val,key=val"),
        ("fs:root", "'root' is not key=val"),
        ("fs:=3", "'=3' is not key=val"),
        ("fs:a=1,/b", "'/b' is not key=val"),
        ("fs:a=1,b=2,a=3", "a is given twice"),
        ("fs:overload=wait", "Invalid enum value 'wait'"),
        ("fs:queue_bytes=1e6", "Expected `int`, got `float`"),
        ("fs:root=/a[x,b=1", "quotes or brackets do not match"),
        ("fs:root=/a]x,b=1", "quotes or brackets do not match"),
        ('fs:tag=5",b=1', "quotes or brackets do not match"),
        ('fs:tag="a', "quotes or brackets do not match"),
    ],
)
def test_a_wrong_shorthand_is_refused_and_quoted(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_shorthand(text)

    assert message in str(caught.value)
    assert repr(text) in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.text(string.ascii_lowercase, min_size=1).map(lambda key: f"p_{key}")


@given(params=st.dictionaries(KEYS, JSON, max_size=4), is_ascii=st.booleans())
def test_whatever_is_written_as_json_is_read_back(params: dict[str, Any], is_ascii: bool) -> None:
    pairs = ",".join(f"{key}={json.dumps(value, ensure_ascii=is_ascii)}" for key, value in params.items())

    assert parse_shorthand(f"fs:{pairs}") == CaptureConsumerSpec(name="fs", params=params)


@pytest.mark.parametrize(
    ("document", "sites"),
    [
        ({"consumers": [{"name": "hidden_states"}]}, {"final_norm": "all"}),
        ({"consumers": [{"name": "hidden_states"}, {"name": "a"}]}, {"post_mlp": "all", "final_norm": "all"}),
        (
            {"consumers": [{"name": "hidden_states"}], "sites": {"pre_attn": [1]}},
            {"pre_attn": [1], "final_norm": "all"},
        ),
        (
            {"consumers": [{"name": "hidden_states"}], "sites": {"last_hidden_state": None}},
            {"last_hidden_state": None},
        ),
        ({"consumers": [{"name": "a", "instance_name": "hidden_states"}]}, {"post_mlp": "all"}),
    ],
    ids=["alone", "beside another", "other sites", "its site already", "another of that name"],
)
def test_hidden_states_bring_their_site(document: dict[str, Any], sites: dict[str, Any]) -> None:
    assert parse_config(document).sites == sites
