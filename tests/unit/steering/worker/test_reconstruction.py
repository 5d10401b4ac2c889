"""Reconstruction of rows on a CPU: its definition, and as part of the operation of the forward's graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tqdm import tqdm

from headgate.capture.schema.errors import ConfigError
from headgate.steering.features.source_coder import CoderKind, Norm
from headgate.steering.features.sparse_coder import coder_of
from headgate.steering.programs.codes import (
    CODE,
    NUM_CODES,
    NUM_PARAMS,
    NUM_SUMS,
    SUM_ROWS,
    Code,
    Edit,
    FeatureActivation,
    InputNorm,
)
from headgate.steering.worker.gates.step_gates import no_gates
from headgate.steering.worker.program_action import program_deltas_and_state
from headgate.steering.worker.program_reference import program_deltas_reference
from headgate.steering.worker.reconstruction import reconstructed_deltas_reference, reconstruction_deltas_reference
from headgate.steering.worker.steering_part import SteeringPart
from tests.fakes.encoded_worker import HIDDEN, SET, EncodedWorker
from tests.fakes.saes import NORMS as SAE_NORMS
from tests.fakes.saes import TinySae
from tests.fakes.sparse_coders import rows, source

WIDTH, FEATURES = 6, 20
NORMS = {
    Norm.NONE: InputNorm.NONE,
    Norm.LAYER_NORM: InputNorm.LAYER_NORM,
    Norm.CONSTANT_NORM_RESCALE: InputNorm.CONSTANT_NORM,
}


def coder(norm: InputNorm = InputNorm.NONE, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Encoder, decoder, numbers of features, decoder bias and norm."""
    generator = torch.Generator().manual_seed(1)
    encoder, decoder = (torch.randn(FEATURES, WIDTH, generator=generator).to(dtype) for _ in range(2))
    numbers = torch.randn(4, FEATURES, generator=generator)
    return encoder, decoder, numbers, torch.randn(WIDTH, generator=generator), int(norm)


def no_sums(width: int = WIDTH) -> torch.Tensor:
    return torch.zeros(NUM_SUMS + width, dtype=torch.float64)


def state(num_tokens: int = 5) -> tuple[torch.Tensor, ...]:
    """Neither changes nor gates."""
    return torch.zeros(num_tokens, 0), *no_gates(torch.device("cpu"))


@pytest.mark.parametrize("norm", list(InputNorm), ids=lambda norm: norm.name)
def test_a_row_becomes_what_the_formulas_say(norm):
    value, shift = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    tokens, count = torch.tensor([2, 0, 77], dtype=torch.int32), torch.tensor([2, 2, 2], dtype=torch.int32)
    encoder, decoder, numbers, bias, _ = arguments = coder(norm)

    delta = reconstruction_deltas_reference(value, None, shift, tokens, count, *arguments[:4], no_sums(), norm)

    for token in (0, 2):
        h = (value + shift)[token].double().numpy()
        mean = h.mean() if norm == InputNorm.LAYER_NORM else 0.0
        gains = {
            InputNorm.NONE: 1.0,
            InputNorm.LAYER_NORM: h.std(ddof=1),
            InputNorm.CONSTANT_NORM: np.linalg.norm(h) / np.sqrt(WIDTH),
        }
        divisor = gains[norm] + (1e-5 if norm == InputNorm.LAYER_NORM else 0.0)
        expected = np.zeros(WIDTH)
        for feature in range(FEATURES):
            p = (h - mean) @ encoder[feature].double().numpy() / divisor
            offset, threshold, scale, magnitude_bias = numbers[:, feature].double().tolist()
            if p + offset > threshold:
                expected += max(p * scale + magnitude_bias, 0) * decoder[feature].double().numpy()
        expected = (expected + bias.double().numpy()) * gains[norm] + mean
        np.testing.assert_allclose(value[token].double().numpy() + delta[token].numpy(), expected, atol=1e-6)
    assert not delta[1].any()


@pytest.mark.parametrize("norm", Norm)
@pytest.mark.parametrize("kind", [CoderKind.RELU, CoderKind.JUMPRELU, CoderKind.GATED])
def test_it_is_what_a_coder_decodes_of_what_it_encodes(kind: CoderKind, norm: Norm):
    coder, x = coder_of(source(kind=kind, norm=norm, subtracts_bias=True), Path("x")), rows()
    every = slice(0, coder.num_features)
    encoding = coder.weights.encoding(every, np.float64)
    tables = [encoding.encoder, coder.weights.decoder(every), np.stack(encoding[1:]), coder.weights.decoder_bias()]
    value, listed = torch.from_numpy(x.astype(np.float64)), torch.arange(len(x), dtype=torch.int32)

    delta = reconstruction_deltas_reference(
        *(value, None, None, listed, torch.tensor([len(x), 0, len(x)]), *map(torch.from_numpy, tables)),
        *(no_sums(x.shape[1]), NORMS[norm]),
    )

    expected = coder.decode(coder.encode(x, np.float64), x)
    np.testing.assert_allclose((value + delta).numpy(), expected, rtol=1e-10, atol=1e-10)


def programs(norm: InputNorm = InputNorm.NONE) -> tuple[Any, ...]:
    """Rows of two programs and none: add a vector, reconstruct, and set feature 3; or reconstruct alone."""
    encoder, decoder, numbers, _, _ = coder()
    pool = torch.stack([torch.zeros(WIDTH), torch.ones(WIDTH) / 2, encoder[3], decoder[3]])
    codes, params = torch.zeros(3, 4, NUM_CODES, dtype=torch.int32), torch.zeros(3, 4, NUM_PARAMS)
    codes[1, :3, :3] = torch.tensor(
        [[Code.ADD, 0, 1], [Code.RECONSTRUCT, 0, 0], [Code.FEATURE | FeatureActivation.GATED | Edit.SET | norm, 2, 3]]
    )
    params[1, 0, 1] = 1.0
    bias, _, scale, magnitude_bias = numbers[:, 3].tolist()
    params[1, 2] = torch.tensor([1.0, 1.0, bias, 0.0, 2.5, scale, magnitude_bias, encoder[3].sum()])
    codes[2, 0, CODE] = Code.RECONSTRUCT
    rows = torch.tensor([1, 0, 2, 1, 1], dtype=torch.int32)
    return pool, rows, torch.tensor([0, 3, 1], dtype=torch.int32)[rows.long()], codes, params, None


def sae(norm: InputNorm = InputNorm.NONE, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """The listed tokens 2 and 0 with the coder, whose features are active above 0."""
    encoder, decoder, numbers, bias, _ = coder(norm, dtype)
    numbers[1] = 0.0
    return (
        torch.tensor([2, 0, 77], dtype=torch.int32),
        torch.tensor([2, 2, 2], dtype=torch.int32),
        encoder,
        decoder,
        numbers,
        bias,
        no_sums(),
    )


@pytest.mark.parametrize("norm", list(InputNorm), ids=lambda norm: norm.name)
def test_a_row_becomes_what_its_edited_activations_decode_to(norm):
    value, tables, weights = torch.randn(5, WIDTH), programs(norm), sae(norm)

    delta = reconstructed_deltas_reference(value, None, tables, weights, norm)

    for token, h in ((0, value[0] + 0.5), (2, value[2])):
        h = h.double()
        gain = {InputNorm.NONE: 1.0, InputNorm.LAYER_NORM: h.std(), InputNorm.CONSTANT_NORM: h.norm() / WIDTH**0.5}[
            norm
        ]
        mean = h.mean() if norm == InputNorm.LAYER_NORM else 0.0
        p = (h - mean) / (gain + (1e-5 if norm == InputNorm.LAYER_NORM else 0)) @ weights[2].double().T
        bias, _, scale, magnitude_bias = weights[4].double()
        a = torch.where(p + bias > 0, (p * scale + magnitude_bias).clamp(min=0), 0)
        if token == 0:
            a[3] = 2.5
        expected = (a @ weights[3].double() + weights[5].double()) * gain + mean
        torch.testing.assert_close(value[token].double() + delta[token], expected, rtol=0, atol=1e-5)
    plain = program_deltas_reference(value, None, *tables)
    assert torch.equal(delta[[1, 3, 4]], plain[[1, 3, 4]])  # not listed: as the program alone moves them
    assert plain[[3, 4]].any(dim=1).all()


@pytest.mark.parametrize("shape", [(3, WIDTH), (1, 3, WIDTH)], ids=["rows", "with-a-leading-axis"])
@pytest.mark.parametrize("has_addend", [False, True], ids=["value", "sum"])
def test_tables_and_list_may_be_longer_than_the_batch(shape, has_addend):
    value = torch.randn(shape)
    addend = torch.randn(shape) if has_addend else None
    pool, rows, counts, *others = programs()

    run, given = torch.ops.headgate.program_deltas_and_state, (*state(), *sae(), int(InputNorm.NONE), 0)
    delta = run(value, addend, pool, rows, counts, *others, *given)

    stream = value.reshape(3, WIDTH) + (addend.reshape(3, WIDTH) if has_addend else 0)
    tables = (pool, rows[:3], counts[:3], *others)
    expected = reconstructed_deltas_reference(stream, None, tables, sae(), InputNorm.NONE, dtype=torch.float32)
    assert delta.dtype == torch.float32
    torch.testing.assert_close(delta, expected)
    assert not delta[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_compiler_is_told_the_shape_and_dtype_that_come(dtype):
    value = torch.randn(1, 3, WIDTH).to(dtype)
    pool, *others = programs()

    for addend in (None, value.clone()):
        arguments = (value, addend, pool.to(dtype), *others, *state(), *sae(dtype=dtype), int(InputNorm.NONE), 0)
        torch.library.opcheck(program_deltas_and_state, arguments)


def test_a_compiled_forward_adds_to_the_sums_as_it_does_otherwise():
    tqdm.monitor_interval = 0  # the compiler shows a bar now and then: no thread for it
    tables, weights, given = programs(), sae(), state()
    values = [torch.randn(5, WIDTH) for _ in range(2)]

    def forward(value: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        arguments = (*tables, *given, *weights[:-1], sums, int(InputNorm.NONE), 0)
        return 2 * program_deltas_and_state(value * 2, None, *arguments)

    found, expected = no_sums(), no_sums()
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True)
    for value in values:
        torch.testing.assert_close(compiled(value, found), forward(value, expected))

    assert torch.equal(found, expected)
    assert found[SUM_ROWS] == 4


@pytest.mark.parametrize("architecture", ["standard", "jumprelu", "gated", "topk"])
@pytest.mark.parametrize("norm", SAE_NORMS)
def test_rows_of_the_phase_that_asks_become_reconstructions_and_no_others(tmp_path, architecture, norm):
    sae = TinySae(architecture=architecture, norm=norm, width=HIDDEN)
    worker = EncodedWorker(tmp_path, sae)
    worker.add("plain", 3)
    worker.add("decode", 2, decode_sae_reconstruction=["a"], decode_steering_features=[SET])
    worker.add("both", 2, sae_reconstruction=["a"])
    worker.add("edit", 1, steering_features=[SET])
    stream = torch.randn(9, HIDDEN)

    worker.step(("plain", 0, 3), ("decode", 1, 2), ("both", 1, 3), ("edit", 0, 1))
    found, rows = worker.run(stream), stream.double().numpy()

    assert worker.listed == ([4, 5, 6, 7, 8] if architecture == "topk" else [4, 5, 6, 7])
    assert torch.equal(found[:4], stream[:4])
    np.testing.assert_allclose(found[4:5], sae.reconstructed(rows[4:5], [SET]), atol=1e-5)
    np.testing.assert_allclose(found[5:8], sae.reconstructed(rows[5:8]), atol=1e-5)
    np.testing.assert_allclose(found[8:], sae.edited(rows[8:], [SET]), atol=1e-5)


TOP_K_EDITS = [
    {"sae": "a", "feature": 2, "set": 1.5},
    {"sae": "a", "feature": 4, "scale": 3.0},
    {"sae": "a", "feature": 5, "add": 0.5, "only_if_active": True},
    {"sae": "a", "feature": 6, "max": 0.1},
    {"sae": "a", "feature": 7, "add": 0.25},
]


@pytest.mark.parametrize("norm", SAE_NORMS)
def test_edits_of_top_k_features_are_those_of_the_true_selection(tmp_path, norm):
    sae = TinySae(architecture="topk", norm=norm, width=HIDDEN, num_features=200, k=9)
    worker = EncodedWorker(tmp_path, sae)
    worker.add("edit", 3, steering_features=TOP_K_EDITS)
    worker.add("add", 1, steering_features=TOP_K_EDITS[-1:])
    worker.add("both", 1, sae_reconstruction=["a"], decode_steering_features=TOP_K_EDITS)
    worker.add("plain", 2)
    stream = torch.randn(8, HIDDEN)

    worker.step(("edit", 0, 4), ("add", 0, 1), ("both", 1, 1), ("plain", 0, 2))
    found, rows = worker.run(stream), stream.double().numpy()

    assert worker.listed == [5, 0, 1, 2, 3], "what only adds reads no activation"
    np.testing.assert_allclose(found[:4], sae.edited(rows[:4], TOP_K_EDITS), atol=1e-5)
    np.testing.assert_allclose(found[4:5], sae.edited(rows[4:5], TOP_K_EDITS[-1:]), atol=1e-5)
    np.testing.assert_allclose(found[5:6], sae.reconstructed(rows[5:6], TOP_K_EDITS), atol=1e-5)
    assert torch.equal(found[6:], stream[6:])


def test_a_list_is_taken_back_when_nobody_asks_any_more(tmp_path):
    worker, stream = EncodedWorker(tmp_path, TinySae(width=HIDDEN)), torch.randn(3, HIDDEN)
    worker.add("a", 2, prefill_sae_reconstruction=["a"])
    worker.add("b", 2)
    worker.step(("a", 0, 2), ("b", 0, 1))
    assert worker.listed == [1, 0]

    for requests in ((("a", 2, 1), ("b", 1, 1)), (("b", 2, 1),)):
        worker.step(*requests)
        assert worker.listed == []
        assert torch.equal(worker.run(stream), stream)
    worker.step(("b", 3, 1), ("a", 0, 2))
    assert worker.listed == [2, 1]  # rows at position 0 are last
    worker.part.headgate_step_begins(None)
    assert worker.listed == []


def test_weights_are_on_the_device_once_and_counted(tmp_path):
    sae = TinySae(width=HIDDEN, num_features=40)
    worker = EncodedWorker(tmp_path, sae)
    tables, sites = worker.part._allocated().tables, {"op_sites": {"post_mlp": [1]}}
    other = SteeringPart(replace_config(worker.config, **sites))

    weights = 4 * (2 * 40 * HIDDEN + 4 * 40 + HIDDEN) + 8 * (NUM_SUMS + HIDDEN)
    listed = 4 * (worker.facts.max_tokens + 3)
    num_entries = 2 * (2 * worker.facts.max_num_seqs + 3)  # two more for each table row: codes and params
    assert tables.saes[0].device_bytes == weights + listed
    assert worker.num_bytes - other.headgate_allocate(worker.facts) == weights + listed + num_entries * 48
    assert "saes" in worker.part.headgate_graph_key()["steering"]
    other.headgate_allocate(worker.facts)
    assert "saes" not in other.headgate_graph_key()["steering"]


def replace_config(config: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(config, sae_encode=[], **changes)


def test_weights_of_a_model_in_bfloat16_are_rounded_to_it(tmp_path):
    sae = TinySae(width=HIDDEN)
    worker = EncodedWorker(tmp_path, sae, dtype=torch.bfloat16)

    (loaded,) = worker.part._allocated().tables.saes.values()

    encoder = torch.from_numpy(sae.weights["W_enc"].T.astype(np.float32))
    assert torch.equal(loaded.encoder, encoder.bfloat16())
    assert loaded.numbers.dtype == loaded.bias.dtype == torch.float32


def test_weights_that_find_no_room_are_refused_with_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**30))
    sae = TinySae(width=HIDDEN, num_features=9000)

    with pytest.raises(ConfigError, match=r"--sae-encode\): the weights of SAE 'a' are 1\.2 MiB \(9000 features"):
        EncodedWorker(tmp_path, sae, device=torch.device("cuda"))
