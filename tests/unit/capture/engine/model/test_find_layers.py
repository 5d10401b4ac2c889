"""Where a model keeps its decoder layers and its last norm."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from headgate.capture.engine.model.find_layers import find_decoder_stack, find_final_norm
from headgate.capture.schema.errors import UnsupportedError


class RMSNorm(nn.Module):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        raise NotImplementedError


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Identity()

    def forward(self, hidden_states: Tensor) -> Tensor:
        raise NotImplementedError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.experts = nn.ModuleList(Expert() for _ in range(8))

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> Any:
        raise NotImplementedError


class Decoder(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embed_norm = RMSNorm()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = RMSNorm()
        self.start_layer, self.end_layer = 0, num_layers

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        hidden_states = self.embed_norm(hidden_states)
        for layer in self.layers[self.start_layer : self.end_layer]:
            hidden_states, residual = layer(None, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Wrapped(nn.Module):
    """A language model, alone or beside the tower of another modality."""

    def __init__(self, decoder: nn.Module, tower: nn.Module | None = None) -> None:
        super().__init__()
        self.tower = tower
        self.model = decoder


class Multimodal(Wrapped):
    def get_language_model(self) -> nn.Module:
        return self.model


def test_the_list_of_layers_is_found_and_not_the_experts_within() -> None:
    decoder = Decoder()

    parent, name, layers = find_decoder_stack(Wrapped(decoder))

    assert parent is decoder
    assert name == "layers"
    assert layers == list(enumerate(decoder.layers))


def test_layers_of_other_pipeline_stages_keep_their_indices() -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    decoder = Decoder(4)
    for index in (0, 3):
        decoder.layers[index] = PPMissingLayer()

    _, _, layers = find_decoder_stack(decoder)

    assert layers == [(1, decoder.layers[1]), (2, decoder.layers[2])]


def test_a_multimodal_model_names_its_language_model() -> None:
    decoder = Decoder()

    parent, _, _ = find_decoder_stack(Multimodal(decoder, tower=Decoder(5)))

    assert parent is decoder


def test_two_lists_alike_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"which of these lists .* Decoder\.layers, Decoder\.layers"):
        find_decoder_stack(Wrapped(Decoder(), tower=Decoder()))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Wrapped: no list of decoder layers"):
        find_decoder_stack(Wrapped(RMSNorm()))


def test_shared_layers_are_refused() -> None:
    decoder = Decoder()
    decoder.layers[2] = decoder.layers[0]

    with pytest.raises(UnsupportedError, match=r"Decoder\.layers: one layer object stands for several"):
        find_decoder_stack(decoder)


class Looping(Decoder):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        for _ in range(2):
            for layer in self.layers:
                hidden_states = layer(None, hidden_states, residual)
        return self.norm(hidden_states)


def test_layers_that_run_more_than_once_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Looping\.layers: the layers run more than once"):
        find_decoder_stack(Looping())


class RepeatedByIndex(Decoder):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        for _ in range(2):
            for i in range(self.start_layer, self.end_layer):
                layer = self.layers[i]
                hidden_states = layer(None, hidden_states, residual)
        return self.norm(hidden_states)


class WrappingAround(Decoder):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        for i in range(2 * self.end_layer):
            hidden_states = self.layers[i % self.end_layer](None, hidden_states, residual)
        return self.norm(hidden_states)


class InAnOrder(Decoder):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        for i in self.order:
            hidden_states = self.layers[i](None, hidden_states, residual)
        return self.norm(hidden_states)


@pytest.mark.parametrize("decoder", [RepeatedByIndex, WrappingAround, InAnOrder])
def test_layers_that_may_run_more_than_once_by_their_indices_are_refused(decoder: type[Decoder]) -> None:
    with pytest.raises(UnsupportedError, match=rf"{decoder.__name__}\.layers: the layers run more than once"):
        find_decoder_stack(decoder())


class Single(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.layers = self.layers, None
        self.ln_f, self.norm = nn.LayerNorm(4), None

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        for layer in self.h:
            hidden_states = layer(None, hidden_states, None)
        if self.ln_f is not None:
            hidden_states = self.ln_f(hidden_states)
        return hidden_states


class Inheriting(Decoder):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class ByIndex(Decoder):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        hidden_states = self.embed_norm(hidden_states)
        for i in range(self.start_layer, self.end_layer):
            layer = self.layers[i]
            hidden_states, residual = layer(None, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Overriding(Decoder):
    """Leaves the loop of its base out."""

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        return self.run_layers(hidden_states, residual)


class Normless(Decoder):
    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        hidden_states = self.embed_norm(hidden_states)
        for layer in self.layers:
            hidden_states = layer(None, hidden_states, residual)
        return hidden_states


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (Decoder, ("norm", True)),
        (Single, ("ln_f", False)),
        (Inheriting, ("norm", True)),
        (ByIndex, ("norm", True)),
        (Overriding, None),
        (Normless, None),
    ],
)
def test_the_last_norm_is_the_one_after_the_layers(decoder: type[Decoder], expected: object) -> None:
    assert find_final_norm(decoder()) == expected


def test_the_last_norm_of_another_stage_is_none_of_ours() -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    decoder = Decoder()
    decoder.norm = PPMissingLayer()

    assert find_final_norm(decoder) is None
