"""Vectors come back from disk as they were, and other tools can read and write the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from headgate.capture.schema.errors import RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.documents.request import read_module
from headgate.steering.files import tensor_bytes
from headgate.steering.files.vector_files import VectorFile, VectorFileError, load, save
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.vector_forms import HIDDEN, Rows, exact_rows, model, nested

FORMATS = ("safetensors", "json", "gguf")
RAMP = np.arange(1, HIDDEN + 1, dtype=np.float32)


def vectors(*layers: int, hook: HookPoint = HookPoint.POST_MLP) -> PhaseVectors:
    made = PhaseVectors.from_rows({Site(layer, hook): RAMP * (layer + 0.1) for layer in layers})
    assert made is not None
    return made


@given(
    cases=st.lists(exact_rows(), min_size=3, max_size=3),
    notes=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
    suffix=st.sampled_from(FORMATS[:2]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tiers_come_back_with_equal_values_dtypes_keys_and_notes(
    cases: list[tuple[Rows, str]], notes: dict[str, str], suffix: str, tmp_path: Path
) -> None:
    tiers = [PhaseVectors.from_rows(rows) for rows, _ in cases]
    file = VectorFile(vectors=tiers[0], prefill_vectors=tiers[1], decode_vectors=tiers[2], metadata=notes)
    path = tmp_path / f"module.{suffix}"
    if not file.tiers():
        return

    save(path, file)
    loaded = load(path)

    assert loaded == file
    for name, tier in loaded.tiers().items():
        assert tier.payload == file.tiers()[name].payload
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_loaded_file_is_a_module_of_a_model_that_it_fits(suffix: str, tmp_path: Path) -> None:
    save(tmp_path / f"v.{suffix}", vectors(1, 3))

    loaded = load(tmp_path / f"v.{suffix}")

    spec = loaded.spec(model())
    assert spec.prefill == spec.decode == vectors(1, 3)
    with pytest.raises(RequestError, match=r"vectors\.post_mlp\.3: 3\.post_mlp cannot be steered"):
        loaded.spec(model(sites=(Site(1, HookPoint.POST_MLP),)))


def test_a_control_vector_keeps_its_notes_and_is_laid_out_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    file = VectorFile(vectors=vectors(1, 3), metadata={"model": "llama", "made by": "me"})

    save(path, file)

    assert load(path) == file
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "controlvector"
    assert reader.fields["controlvector.model_hint"].contents() == "llama"
    assert reader.fields["controlvector.layer_count"].contents() == 2
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert sorted(found) == ["direction.1", "direction.3"]
    assert {tensor.tensor_type.name for tensor in found.values()} == {"F32"}
    np.testing.assert_array_equal(found["direction.3"].data, RAMP * np.float32(3.1), strict=False)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_control_vector_of_repeng_acts_at_the_output_of_its_layers(dtype: Any, tmp_path: Path) -> None:
    path = tmp_path / "repeng.gguf"
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", 2)
    for layer in (2, 0):
        writer.add_tensor(f"direction.{layer}", (RAMP + layer).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    loaded = load(path)

    assert loaded.metadata == {"model": "mistral"}
    assert loaded.vectors == PhaseVectors.from_rows({Site(n, HookPoint.POST_MLP): RAMP + n for n in (0, 2)})


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (vectors(0, 1), "post_mlp of layer 1 and above only, not 0.post_mlp"),
        (vectors(1, hook=HookPoint.PRE_ATTN), "not 1.pre_attn"),
        (VectorFile(vectors=vectors(1), decode_vectors=vectors(1)), "both phases alike"),
    ],
    ids=["layer 0", "another hook", "phases"],
)
def test_what_a_control_vector_cannot_hold_is_refused(
    file: VectorFile | PhaseVectors, message: str, tmp_path: Path
) -> None:
    with pytest.raises(VectorFileError, match=message):
        save(tmp_path / "v.gguf", file)

    assert list(tmp_path.iterdir()) == []


def test_the_safetensors_library_reads_what_we_write_and_writes_what_we_read(tmp_path: Path) -> None:
    halves = PhaseVectors.from_rows({Site(1, HookPoint.POST_MLP): RAMP})
    assert halves is not None
    assert halves.dtype == "bfloat16"

    save(tmp_path / "ours.safetensors", VectorFile(decode_vectors=halves, metadata={"format": "mine"}))
    save_file(
        {"1.post_block": torch.tensor(RAMP).bfloat16(), "prefill_vectors/final_norm": torch.tensor(RAMP).double()},
        tmp_path / "theirs.safetensors",
        metadata={"format": "pt"},
    )

    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("decode_vectors/1.post_mlp"), torch.tensor(RAMP).bfloat16())
        assert file.metadata() == {"format": "mine", "headgate.steering": "1"}
    theirs = load(tmp_path / "theirs.safetensors")
    assert theirs.vectors == halves
    assert theirs.prefill_vectors is not None
    assert theirs.prefill_vectors.sites == (Site(-1, HookPoint.FINAL_NORM),)


def test_a_json_document_may_have_any_form_of_a_request(tmp_path: Path) -> None:
    rows = {Site(2, HookPoint.POST_MLP): RAMP, Site(-1, HookPoint.FINAL_NORM): -RAMP}
    document = nested(rows, lambda row: {"vector": row.tolist(), "scale": 2.0})
    registered = {"name": "calm", "vectors": document, "prefill_vectors": None}
    (tmp_path / "full.json").write_text(json.dumps(registered))
    (tmp_path / "bare.json").write_text(json.dumps(document))

    full, bare = load(tmp_path / "full.json"), load(tmp_path / "bare.json")

    assert full == bare
    assert full.spec(model()) == read_module({"vectors": document}, model())


def with_tensor(name: str, tensor: torch.Tensor) -> Any:
    return lambda path: save_file({name: tensor}, path)


def gguf_with(arch: str, name: str) -> Any:
    def write(path: Path) -> None:
        writer = gguf.GGUFWriter(path, arch)
        writer.add_tensor(name, RAMP)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


def gguf_that_says(key: str) -> Any:
    def write(path: Path) -> None:
        writer = gguf.GGUFWriter(path, "controlvector")
        writer.add_string(key, "projection")
        writer.add_tensor("direction.1", RAMP)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return write


def endless(path: Path) -> None:
    """A file that says it has 2**60 fields."""
    content = whole(path)
    path.write_bytes(content[:16] + (1 << 60).to_bytes(8, "little") + content[24:])


def whole(path: Path) -> bytes:
    save(path, vectors(1))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("v.onnx", lambda path: path.write_bytes(b""), "unknown suffix '.onnx'"),
        ("v.safetensors", lambda path: path.write_bytes(b""), "not a safetensors file"),
        ("v.safetensors", lambda path: path.write_bytes(b"GGUF" * 9), "not a safetensors file"),
        ("v.safetensors", lambda path: path.write_bytes(whole(path)[:-1]), "cut off or damaged"),
        (
            "v.safetensors",
            lambda path: path.write_bytes(whole(path).replace(b'"F32"', b'"I32"')),
            "elements of type int32",
        ),
        (
            "v.safetensors",
            with_tensor("layers.1", torch.ones(4)),
            "; it has layers.1 .*safetensors@tensor=layers.1,",
        ),
        ("v.safetensors", with_tensor("other/1.post_mlp", torch.ones(4)), "with a tier of vectors"),
        (
            "v.safetensors",
            with_tensor("1.post_mlp", torch.ones(4, dtype=torch.int32)),
            "elements of type int32",
        ),
        ("v.safetensors", with_tensor("1.post_mlp", torch.ones(2, 4)), r"expected the shape \[hidden\]"),
        ("v.safetensors", with_tensor("1.post_mlp", torch.full((4,), torch.nan)), "not finite"),
        ("v.safetensors", with_tensor("1.post_mlp", torch.zeros(4)), "no vector other than zero"),
        ("v.json", lambda path: path.write_text("{"), "truncated"),
        ("v.json", lambda path: path.write_text("[1]"), "Expected `object`"),
        ("v.json", lambda path: path.write_text("{}"), "no vector other than zero"),
        ("v.json", lambda path: path.write_text('{"vector": {}}'), "unknown keys"),
        ("v.json", lambda path: path.write_text('{"post_mlp": {"-1": [1]}}'), "counts layers from 0"),
        ("v.json", lambda path: path.write_text('{"post_mlp": {"9999999": [1]}}'), "4095 at most"),
        ("v.json", lambda path: path.write_text('{"post_mlp": {"0": [1], "1": [1, 2]}}'), "expected 2 numbers"),
        ("v.json", lambda path: path.write_text('{"post_mlp": {"x": [1]}}'), "not an integer"),
        ("v.json", lambda path: path.write_text('{"post_mlp": {"0": "AAAA"}}'), "a list of 1 numbers"),
        ("v.gguf", lambda path: path.write_bytes(b""), ""),
        ("v.gguf", lambda path: path.write_bytes(b"nope" * 20), "magic"),
        ("v.gguf", lambda path: path.write_bytes(whole(path)[:-16]), ""),
        ("v.gguf", gguf_with("llama", "direction.1"), "expected a GGUF file of controlvector, got 'llama'"),
        (
            "v.gguf",
            gguf_that_says("controlvector.method"),
            "controlvector.method = 'projection', which may",
        ),
        ("v.gguf", endless, "damaged|which GGUF has not"),
        ("v.gguf", gguf_with("controlvector", "blk.1.ffn"), "got 'blk.1.ffn'"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_a_file_that_cannot_be_used_is_refused_by_name(name: str, write: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    write(path)

    with pytest.raises(VectorFileError, match=message) as refused:
        load(path)

    assert str(refused.value).startswith(f"{path}: ")


def test_a_save_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    save(path, vectors(1))
    before = path.read_bytes()

    with pytest.raises(VectorFileError):
        save(path, vectors(0))

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_versions_of_the_library_below_0_8_get_dicts(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.delattr(safetensors, "TensorSpec", raising=False)
    monkeypatch.setattr(safetensors, "serialize", lambda specs, metadata: given.append((specs, metadata)) or b"file")

    content = tensor_bytes.encode({"v": tensor_bytes.Tensor(dtype, (2,), b"12345678")}, {"note": "mine"})

    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    assert content == b"file"
    assert given == [({"v": {"dtype": names[dtype], "shape": [2], "data": b"12345678"}}, {"note": "mine"})]


def header(text: dict[str, Any], data: bytes) -> bytes:
    encoded = json.dumps(text).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def tensor(start: int, stop: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "content",
    [
        header({"a": tensor(4, 8, 1)}, bytes(8)),
        header({"a": tensor(0, 4, 1), "b": tensor(0, 4, 1)}, bytes(4)),
        header({"a": tensor(0, 4, 2)}, bytes(4)),
        header({"a": tensor(0, 4, 2**62, 2**62)}, bytes(4)),
        header({"a": tensor(0, 4, 1)}, bytes(8)),
        header({"__metadata__": {"a": 1}, "b": tensor(0, 4, 1)}, bytes(4)),
        (1 << 40).to_bytes(8, "little") + b"{}",
    ],
    ids=["gap", "overlap", "size", "giant shape", "bytes behind", "metadata", "giant header"],
)
def test_a_malformed_safetensors_file_is_refused_before_anything_is_copied(content: bytes) -> None:
    with pytest.raises(ValueError, match="not a safetensors file"):
        tensor_bytes.decode(content)
