"""Files of vectors that other tools write are read at the sites that they were made for, and run no code."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.files.foreign_files import CONVERTERS, VectorSource
from headgate.steering.files.vector_files import VectorFileError, load, save
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.vector_forms import HIDDEN, model

LAYERS = 3
STACKED = torch.randn(LAYERS + 1, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
ROW = STACKED[1]


def at(rows: dict[str, Tensor]) -> PhaseVectors:
    made = PhaseVectors.from_rows({Site.parse(name): row.double().numpy() for name, row in rows.items()})
    assert made is not None
    return made


def svec(folder: Path, layers: dict[str, Any], name: str = "calm.svec") -> Path:
    path = folder / name
    document = {"model_type": "llama", "directions": layers, "explained_variances": {"1": 0.5}}
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_caa_names_its_layer_and_model(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "vec_layer_13_Llama-2-7b-chat-hf.pt"
    torch.save(ROW.to(dtype), path)

    file = load(path)

    assert file.vectors == at({"13.post_mlp": ROW.to(dtype)})
    assert {**file.metadata, "acts_on": ""} == {
        **{"format": "caa", "dtype": str(dtype).removeprefix("torch."), "model": "Llama-2-7b-chat-hf", "acts_on": ""}
    }
    assert "decode_steering_vectors" in file.metadata["acts_on"]


@pytest.mark.parametrize("kind", ["response_avg", "prompt_avg", "prompt_last"])
def test_persona_vectors_act_at_the_output_of_the_layer_before(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"evil_{kind}_diff.pt"
    torch.save(STACKED.float(), path)

    file, one = load(path), load(path, layer=1)

    rows = STACKED.float()
    assert file.vectors == at({"0.post_mlp": rows[1], "1.post_mlp": rows[2], "2.post_mlp": rows[3]})
    assert "row 0" in file.metadata["left_out"]
    assert one.vectors == at({"1.post_mlp": rows[2]})
    with pytest.raises(VectorFileError, match="there is no layer 3; the file has 0 to 2"):
        load(path, layer=3)


def test_a_refusal_direction_acts_before_its_layer_and_is_rounded_from_float64(tmp_path: Path) -> None:
    torch.save(ROW, tmp_path / "direction.pt")
    (tmp_path / "direction_metadata.json").write_text('{"pos": -2, "layer": 14}')

    file = load(tmp_path / "direction.pt")

    assert file.vectors is not None
    assert file.vectors.sites == (Site(14, HookPoint.PRE_ATTN),)
    np.testing.assert_array_equal(file.vectors.float32()[0], ROW.float().numpy())
    assert (file.metadata["dtype"], file.metadata["pos"]) == ("float64", "-2")


@pytest.mark.parametrize("wrap", [lambda axis: axis, lambda axis: {"axis": axis, "role_mean": axis, "n_roles": 4}])
@pytest.mark.parametrize("name", ["assistant_axis.pt", "axis.pt"])
def test_an_assistant_axis_has_a_row_for_each_layer(wrap: Any, name: str, tmp_path: Path) -> None:
    torch.save(wrap(STACKED.bfloat16()), tmp_path / name)

    file = load(tmp_path / name, format=None if isinstance(wrap(0), dict) else "assistant_axis")

    rows = STACKED.bfloat16()
    assert file.vectors == at({f"{layer}.post_mlp": rows[layer] for layer in range(LAYERS + 1)})
    assert file.metadata["format"] == "assistant_axis"
    assert load(tmp_path / name, format="assistant_axis", layer=2).vectors == at({"2.post_mlp": rows[2]})


def test_svec_acts_before_its_layers(tmp_path: Path) -> None:
    path = svec(tmp_path, {"2": ROW.tolist(), "11": STACKED[2].tolist()})

    file = load(path)

    assert file.vectors == at({"2.pre_attn": ROW, "11.pre_attn": STACKED[2]})
    assert file.metadata["model_type"] == "llama"
    assert load(path, layer=11).vectors == at({"11.pre_attn": STACKED[2]})
    with pytest.raises(VectorFileError, match="no layer 3; the file has 2, 11"):
        load(path, layer=3)


def test_axbench_gives_the_concept_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "DiffMean_weight.pt"
    torch.save(torch.nn.Parameter(STACKED.bfloat16()), path)
    torch.save(torch.tensor([0.0, 0.0, -1.5, 0.0]), tmp_path / "DiffMean_bias.pt")

    file = load(path, layer=20, concept=2)

    assert file.vectors == at({"20.post_mlp": STACKED[2].bfloat16()})
    assert (file.metadata["concept"], file.metadata["bias"]) == ("2", "-1.5")
    assert load(f"{path}@layer=20,concept=2") == file
    (tmp_path / "DiffMean_bias.pt").unlink()
    assert "bias" not in load(path, layer=20, concept=2).metadata


def test_a_format_that_is_named_needs_no_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.pt"
    torch.save(ROW.float(), path)

    with pytest.raises(VectorFileError, match=r"holds a Tensor of the shape \[6\], .* one of caa, persona_vectors"):
        load(path)
    assert load(path, format="caa", layer=2).vectors == at({"2.post_mlp": ROW.float()})
    assert load(f"{path}@format=refusal_direction,layer=2").vectors == at({"2.pre_attn": ROW.float()})


class Trap:
    """An object whose unpickling would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def steering_vector() -> Any:
    """An object of a class that only its name tells, like that of the package steering-vectors."""
    module = types.ModuleType("steering_vectors.steering_vector")
    exec("class SteeringVector: pass", module.__dict__)
    sys.modules.update({"steering_vectors": types.ModuleType("steering_vectors"), module.__name__: module})
    return module.SteeringVector()


REFUSED = {
    "numpy in .pt": ("v.pt", lambda path: torch.save({"1": np.ones(3)}, path), "numpy"),
    "an object in .pt": ("v.pt", lambda path: torch.save(steering_vector(), path), "steering-vectors"),
    "an object in .pkl": ("v.pkl", lambda path: path.write_bytes(pickle.dumps(steering_vector())), "steering-vectors"),
    "a dict in .npy": ("v.npy", lambda path: np.save(path, {"1": ROW.numpy()}, allow_pickle=True), "numpy"),
    "an old .pt": ("v.pt", lambda path: torch.save(ROW, path, _use_new_zipfile_serialization=False), "legacy-torch"),
    "a call in .pt": ("v.pt", lambda path: torch.save(Trap(path.with_name("mark")), path), "objects"),
    "a call in .bin": ("v.bin", lambda path: path.write_bytes(pickle.dumps(Trap(path.with_name("mark")))), "objects"),
}


@pytest.mark.parametrize(("name", "write", "converter"), REFUSED.values(), ids=REFUSED)
def test_pickles_are_refused_by_the_name_of_their_converter(
    name: str, write: Any, converter: str, tmp_path: Path
) -> None:
    write(tmp_path / name)

    with pytest.raises(VectorFileError, match=f"`headgate vectors converter {converter}` prints") as refused:
        load(tmp_path / name)

    assert "weights_only" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_converters_make_files_that_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "OLD.npy", {"2": ROW.float().numpy()}, allow_pickle=True)
    torch.save(ROW.float(), tmp_path / "OLD.pt", _use_new_zipfile_serialization=False)

    for name in ("numpy", "legacy-torch"):
        subprocess.run([sys.executable, "-c", CONVERTERS[name]], cwd=tmp_path, check=True)

    assert load(tmp_path / "NEW.safetensors").vectors == at({"2.post_mlp": ROW.float()})
    assert load(tmp_path / "NEW.pt", format="caa", layer=1).vectors == at({"1.post_mlp": ROW.float()})
    for text in CONVERTERS.values():
        compile(text, "converter", "exec")


ONES = torch.ones(HIDDEN)
WRONG = {
    "CAA without a layer": ("mine.pt", ONES, {"format": "caa"}, "the file's name does not tell the layer; give it"),
    "another layer": ("vec_layer_3_m.pt", ONES, {"layer": 4}, "layer 4 was asked for, and the file's name says 3"),
    "a layer out of reach": ("vec_layer_4096_m.pt", ONES, {}, "layer 4096: expected 0 to 4095"),
    "CAA of two axes": ("vec_layer_3_m.pt", STACKED, {}, r"expected the shape \[hidden\], got \[4, 6\]"),
    "persona of one axis": ("a_response_avg_diff.pt", ONES, {}, r"expected the shape \[layers \+ 1, hidden\]"),
    "persona of one row": ("a_response_avg_diff.pt", STACKED[:1], {}, r"\[layers \+ 1, hidden\], got \[1, 6\]"),
    "whole numbers": ("vec_layer_3_m.pt", ONES.int(), {}, "expected real numbers, got elements of type torch.int32"),
    "sparse": ("vec_layer_3_m.pt", ONES.to_sparse(), {}, "expected a dense tensor"),
    "8 bits": ("vec_layer_3_m.pt", ONES.to(torch.float8_e4m3fn), {}, "float8_e4m3fn are not read"),
    "complex": ("vec_layer_3_m.pt", ONES.to(torch.complex64), {}, "expected real numbers"),
    "not finite": ("vec_layer_3_m.pt", ONES / 0, {}, "not finite in float32"),
    "too large": ("vec_layer_3_m.pt", ONES.double() * 1e300, {}, "not finite in float32"),
    "zeros": ("vec_layer_3_m.pt", ONES * 0, {}, "no vector other than zero"),
    "a list": ("vec_layer_3_m.pt", [ONES], {}, "expected a tensor, got"),
    "a dictionary": ("vec_layer_3_m.pt", {"v": ONES}, {}, r"expected a tensor, got \['v'\]"),
    "an axis without one": (
        "assistant_axis.pt",
        {"a": STACKED},
        {},
        r"'axis' in the dictionary, found \['a'\]",
    ),
    "a dictionary of neither": ("mine.pt", {"a": STACKED}, {}, r"holds a dictionary of \['a'\], and neither that"),
    "AxBench without layer": ("D_weight.pt", STACKED, {"concept": 1}, "holds 4 concepts and no layer; give both"),
    "AxBench without concept": ("D_weight.pt", STACKED, {"layer": 1}, "holds 4 concepts and no layer; give both"),
    "no such concept": ("D_weight.pt", STACKED, {"layer": 1, "concept": 4}, "there is no concept 4; .* 0 to 3"),
    "biases": ("D_bias.pt", ONES, {"layer": 1, "concept": 1}, "the vectors are in D_weight.pt"),
    "a concept of CAA": ("vec_layer_3_m.pt", ONES, {"concept": 1}, "the format caa has no use for it"),
    "no such format": ("vec_layer_3_m.pt", ONES, {"format": "gpt"}, "unknown format 'gpt'; known: safetensors, json"),
    "a negative layer": ("mine.pt", ONES, {"format": "caa", "layer": -1}, "layer: expected a whole number from 0"),
    "repeated elements": (
        *("a_response_avg_diff.pt", torch.zeros(1).expand(2, 1 << 40), {}),
        r"claims 8,796,093,022,208 bytes and stores 4",
    ),
}


@pytest.mark.parametrize(("name", "content", "options", "message"), WRONG.values(), ids=WRONG)
def test_a_file_that_does_not_fit_is_refused_by_name(
    name: str, content: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / name)

    with pytest.raises(VectorFileError, match=message) as refused:
        load(tmp_path / name, **options)

    assert str(refused.value).startswith(f"{tmp_path / name}: ")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vec_layer_3_m.pt"
    torch.save(torch.randn(1000), path)
    whole = path.read_bytes()

    for length in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(VectorFileError, match=re.escape(str(path))):
            load(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        load(path)


@pytest.mark.parametrize("document", ["{", '{"directions": {"1": ["a"]}}', '{"directions": {"-1": [1]}}', "{}"])
def test_a_wrong_svec_is_refused(document: str, tmp_path: Path) -> None:
    (tmp_path / "v.svec").write_text(document)

    with pytest.raises(VectorFileError, match=re.escape(str(tmp_path / "v.svec"))):
        load(tmp_path / "v.svec")


def test_layers_of_a_svec_that_are_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VectorFileError, match="a layer is given twice"):
        load(svec(tmp_path, {"1": [1.0], "01": [2.0]}))


def test_wrong_metadata_of_a_refusal_direction_is_refused(tmp_path: Path) -> None:
    torch.save(ROW, tmp_path / "direction.pt")
    (tmp_path / "direction_metadata.json").write_text('{"layer": "x"}')

    with pytest.raises(VectorFileError, match=r"direction_metadata\.json: .*Expected `int \| null`"):
        load(tmp_path / "direction.pt")


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors", ".pt"])
def test_a_tensor_is_named_where_a_file_does_not_say_what_it_has(suffix: str, tmp_path: Path) -> None:
    path, two = tmp_path / f"v{suffix}", np.stack([ROW.numpy(), 2 * ROW.numpy()])
    if suffix == ".npy":
        np.save(path, ROW.numpy())
    elif suffix == ".npz":
        np.savez(path, **{"model.refusal": ROW.numpy(), "all": two})
    elif suffix == ".pt":
        torch.save({"model.refusal": ROW, "all": torch.from_numpy(two)}, path)
    else:
        safetensors.torch.save_file({"model.refusal": ROW, "all": torch.from_numpy(two)}, path)
    named = f"{path}@layer=13" if suffix == ".npy" else f"{path}@tensor=model.refusal,layer=13"

    found = load(named)

    assert found.vectors == PhaseVectors.from_rows({Site.parse("13.post_mlp"): ROW.numpy()})
    assert (found.metadata["format"], found.metadata["acts_on"]) == ("tensor", "not known: the file does not tell")
    assert load(f"{named},hook=pre_attn").vectors.sites == (Site.parse("13.pre_attn"),)
    if suffix != ".npy":
        assert load(path, tensor="all", concept=1, layer=2).vectors == PhaseVectors.from_rows(
            {Site.parse("2.post_mlp"): 2 * ROW.numpy()}
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor": "other", "layer": 3},
            r"no tensor 'other'; it has i \[6\], a \[6\], b \[2, 6\]. Choose one",
        ),
        ({"layer": 3}, r"layer=3: a file of the format safetensors has no use for it"),
        ({"tensor": "a"}, r"tensor 'a' does not tell the layer; give it: layer=N, or v.safetensors@layer=N"),
        ({"tensor": "b", "layer": 3}, r"tensor 'b' has the shape \[2, 6\]; give the row that is the vector: concept=N"),
        ({"tensor": "b", "layer": 3, "concept": 2}, "there is no row 2; the file has 0 to 1"),
        ({"tensor": "a", "layer": 3, "concept": 0}, "concept=0: tensor 'a' is one vector"),
        ({"tensor": "a", "layer": 3, "hook": "resid"}, "hook 'resid': expected one of pre_attn, "),
        ({"tensor": "i", "layer": 3}, "expected real numbers, got elements of type int64"),
        ({"tensor": "a", "layer": 3, "format": "json"}, "layer=3: a file of the format json has no use for it"),
        ({}, r"tensor 'i': expected TIER/LAYER.HOOK .* v.safetensors@tensor=i,layer=N"),
    ],
)
def test_a_tensor_that_cannot_be_a_vector_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(6), "b": torch.ones(2, 6), "i": torch.ones(6, dtype=torch.int64)}
    safetensors.torch.save_file(tensors, tmp_path / "v.safetensors")

    with pytest.raises(VectorFileError, match=message):
        load(tmp_path / "v.safetensors", **options)


def test_an_array_of_objects_is_not_loaded_and_says_how_it_can_be(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.asarray({1: [2.0]}, object), allow_pickle=True)

    with pytest.raises(VectorFileError, match=r"holds pickled objects, which are not loaded.*vectors converter numpy"):
        load(tmp_path / "v.npy", layer=3)


def test_a_source_is_a_path_with_options(tmp_path: Path) -> None:
    odd = tmp_path / "a@layer=3"
    odd.touch()

    assert VectorSource.parse("a/b@c.pt") == VectorSource(Path("a/b@c.pt"))
    assert VectorSource.parse("b.pt@layer=3,format=caa") == VectorSource(Path("b.pt"), "caa", 3)
    assert VectorSource.parse(f"{odd}") == VectorSource(odd)
    for text, options, message in (
        ("b.pt@layer=x", {}, "@layer=x: expected a whole number"),
        ("b.pt@layer=", {}, "@layer=: expected a whole number"),
        ("b.pt@layer=3", {"layer": 3}, "layer is given twice"),
        ("b.pt@layer=3,layer=4", {}, "layer is given twice, as 3 and as 4"),
        ("b.pt@layer=4096", {}, "to 4095 at most"),
        ("b.pt", {"concept": True}, "concept: expected a whole number from 0, got True"),
    ):
        with pytest.raises(ValueError, match=message):
            VectorSource.parse(text, **options)


def test_formats_of_headgate_name_their_sites_themselves(tmp_path: Path) -> None:
    save(tmp_path / "v.safetensors", at({"1.post_mlp": ROW}))

    with pytest.raises(VectorFileError, match="layer=2: a file of the format safetensors has no use for it"):
        load(tmp_path / "v.safetensors", layer=2)


def test_foreign_files_are_modules_wherever_files_are(tmp_path: Path) -> None:
    path = tmp_path / "DiffMean_weight.pt"
    torch.save(STACKED.float(), path)
    source = f"{path}@layer=1,concept=2"

    spec = load(source).spec(model())

    assert spec.prefill == spec.decode == at({"1.post_mlp": STACKED[2].float()})
