"""The operator's document of steering."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.capture.schema.errors import ConfigError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.config import SteeringConfig, parse_config


@pytest.mark.parametrize("document", [None, {}], ids=repr)
def test_by_default_every_stream_site_can_be_steered_in_both_phases(document: dict[str, Any] | None) -> None:
    steerable = parse_config(document).steerable(num_layers=2, hidden_size=8, dtype="bfloat16")

    stream = (HookPoint.PRE_ATTN, HookPoint.POST_ATTN, HookPoint.POST_MLP)
    assert steerable.sites == tuple(Site(layer, hook) for layer in range(2) for hook in stream)
    assert steerable.max_vectors == 12


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SteeringConfig(max_vectors_per_request=3), 3),
        (SteeringConfig(max_steering_slots=5), 4),
        (SteeringConfig(sites={"final_norm": "all"}), 2),
    ],
    ids=["configured", "as the slots reach", "every site"],
)
def test_a_request_may_bring_what_can_ever_fit(config: SteeringConfig, expected: int) -> None:
    assert config.steerable(num_layers=2, hidden_size=8, dtype="float32").max_vectors == expected


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object"),
        ({"max_slots": 3}, "max_slots"),
        ({"max_steering_slots": "many"}, "Expected `int`"),
        ({"max_steering_slots": 1}, "at least 2"),
        ({"max_steering_configs": 0}, "max_steering_configs must be at least 1"),
        ({"max_steering_configs": 2, "max_steering_slots": 9}, "give one of them"),
        ({"max_vectors_per_request": 0}, "from 1 to max_steering_slots - 1 = 8191, got 0"),
        ({"max_vectors_per_request": 9, "max_steering_slots": 9}, "= 8, got 9"),
        ({"sites": {}}, "name at least one hook point"),
        ({"modules": {"": "a.json"}}, "module's name"),
        ({"modules": {"calm": ""}}, "modules.calm: the path is empty"),
    ],
    ids=str,
)
def test_a_wrong_document_is_refused_with_the_field_named(document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"additional_config\['headgate'\]\['steering'\]") as refused:
        parse_config(document)

    assert message in str(refused.value)


@pytest.mark.parametrize("num_layers", [2, 64, 100])
def test_n_configurations_of_all_sites_fit_beside_global_vectors(num_layers: int) -> None:
    config = parse_config({"max_steering_configs": 3})

    num_sites = len(config.steerable(num_layers=num_layers, hidden_size=8, dtype="float32").sites)

    assert num_sites == 3 * num_layers
    assert config.num_slots(num_layers) - 1 == (3 + 1) * 2 * num_sites


def test_sites_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"sites\.post_mlp: layer 2"):
        SteeringConfig(sites={"post_mlp": [2]}).steerable(num_layers=2, hidden_size=8, dtype="float32")
