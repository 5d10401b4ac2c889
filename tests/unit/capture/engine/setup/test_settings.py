"""The sections of a config are read once, and leave no trace in it."""

from __future__ import annotations

import gc
from argparse import Namespace
from typing import Any

from headgate.capture.engine.setup import settings

SECTION = {"consumers": [{"name": "memory"}]}


def config(**server: Any) -> Any:
    model = Namespace(
        hf_text_config=Namespace(num_hidden_layers=2),
        served_model_name="tiny",
        dtype="torch.float32",
        max_model_len=8,
        get_hidden_size=lambda: 4,
    )
    ours = {"capture": SECTION, "server": server, "compiler": {"rewrites": False}}
    return Namespace(additional_config={"headgate": ours}, model_config=model)


def test_a_config_keeps_the_fields_that_it_has() -> None:
    """vLLM copies configs field by field, and fails at what is no field."""
    made = config()
    before = set(vars(made))

    assert set(settings.sections(made)) == {"capture"}
    assert settings.capture_config(made) is settings.capture_config(made)
    assert settings.model_info(made) is settings.model_info(made)
    assert not settings.compiler_config(made).rewrites

    assert set(vars(made)) == before


def test_sections_stay_when_their_place_in_the_config_is_taken() -> None:
    made = config()
    read = settings.sections(made)

    made.additional_config = {"headgate": {"graph": {}}}

    assert settings.sections(made) is read
    assert settings.capture_config(made) is not None


def test_nothing_is_kept_of_a_config_that_is_gone() -> None:
    before = len(settings._kept)
    made = config()
    settings.model_info(made)
    assert len(settings._kept) == before + 1

    del made
    gc.collect()

    assert len(settings._kept) == before
