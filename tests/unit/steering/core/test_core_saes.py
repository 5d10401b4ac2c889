"""SAEs in an engine core: what workers get of a request's features, block keys, and what operators register."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headgate.capture.engine.contracts.core_part import CoreFacts
from headgate.capture.schema.consumer import ModelInfo
from headgate.capture.schema.errors import ConfigError, RequestError
from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.config import parse_config
from headgate.steering.control.status import SaeStatus
from headgate.steering.core.steering_core import SteeringCore, open_core
from headgate.steering.documents.request import read_module, read_steering
from headgate.steering.programs.codes import CODE, CODE_MASK, Code
from headgate.steering.programs.program import Program
from headgate.steering.spec import from_wire, to_wire
from headgate.steering.vectors.phase_vectors import Steerable
from tests.fakes.programs import run
from tests.fakes.saes import TinySae
from tests.fakes.transcoders import TinyTranscoder

WIDTH = 32
SITE = Site(1, HookPoint.POST_MLP)
MODEL = ModelInfo(name="tiny", num_layers=2, hidden_size=WIDTH, dtype="float32", sites=())
SAE = TinySae(architecture="jumprelu", width=WIDTH)
OTHER = TinySae(architecture="gated", width=WIDTH)
EDIT = {"sae": "a", "feature": 3, "set": 2.5}
ABLATION = {"at": SITE.name, "method": "ablate", "vector": [1.0] * WIDTH}
ROW = np.random.default_rng(5).standard_normal(WIDTH)


class Nobody:
    """Services of an engine core without workers."""

    def __init__(self, *workers: list[str]) -> None:
        self._op_sites = list(workers)

    def call_workers(self, method: str, args: Any) -> list[Any]:
        return self._op_sites if method == "op_sites" else []

    def prepare_change(self, field: str) -> None:
        return

    def rekey_running(self) -> dict[str, int]:
        return {}

    def restart_running(self) -> None:
        return

    def fail(self, reason: str) -> None:
        raise AssertionError(reason)


class Opened:
    """A core with an SAE ``a`` at `SITE`."""

    def __init__(self, folder: Path, *workers: list[str], num_stages: int = 1, **section: Any) -> None:
        self.folder = folder
        section = {"saes": {"a": f"{SAE.save(folder / 'a')}@{SITE.name}"}, **section}
        self.steerable: Steerable = parse_config(section).steerable(num_layers=2, hidden_size=WIDTH, dtype="float32")
        self.core: SteeringCore = open_core(CoreFacts(model=MODEL, num_stages=num_stages), section, Nobody(*workers))

    def accept(self, req_id: str, **fields: Any) -> dict[str, Any]:
        spec, _ = read_steering(fields, self.steerable)
        assert spec is not None
        taken = self.core.accept(req_id, to_wire(spec), 10)
        assert taken is not None
        return taken

    def names(self) -> dict[str, Any]:
        return {one["name"]: one for one in self.core.call("names", {})}

    def register(self, path: Path, name: str = "b", site: str | None = SITE.name) -> Any:
        args = {"name": name, "path": str(path), "site": site, "sha256": None}
        return self.core.call("register_sae", args)


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(tmp_path)


def test_the_site_of_an_sae_is_an_op_site_by_itself(opened: Opened) -> None:
    assert opened.steerable.op_sites == (SITE,)
    assert opened.steerable.max_sae_features == 64


def test_workers_get_the_rows_of_features_as_a_program(opened: Opened) -> None:
    taken = opened.accept("r", steering_features=[EDIT])

    spec = from_wire(taken)
    assert isinstance(spec.prefill_program, Program)
    assert spec.decode_program is spec.prefill_program
    assert not spec.is_to_lower
    np.testing.assert_allclose(run(spec.prefill_program, SITE, ROW), SAE.edited(ROW[None], [EDIT])[0], atol=1e-6)


def test_rows_of_configured_saes_lie_together_in_memory_and_those_of_others_as_in_their_files(opened: Opened) -> None:
    opened.register(opened.folder / "a")

    scattered = {sae.name: sae.coder.weights.source.encoder.is_scattered for sae in opened.core.state.saes.all()}
    assert scattered == {"a": False, "b": True}


def test_features_act_behind_operations_and_read_what_these_left(opened: Opened) -> None:
    taken = opened.accept("r", steering_ops=[ABLATION], steering_features=[EDIT], decode_steering_ops=[ABLATION])

    spec = from_wire(taken)
    assert spec.prefill_program is not None
    assert spec.decode_program is not None
    assert len(spec.decode_program.codes) == 3
    ablated = ROW - ROW.mean()
    found = run(spec.prefill_program, SITE, ROW)
    np.testing.assert_allclose(found, SAE.edited(ablated[None], [EDIT])[0], atol=1e-6)


def test_features_of_one_phase_leave_the_other_as_it_was(opened: Opened) -> None:
    spec = from_wire(opened.accept("r", steering_ops=[ABLATION], decode_steering_features=[EDIT]))

    assert spec.prefill_program is not None
    assert spec.decode_program is not None
    assert (len(spec.prefill_program.codes), len(spec.decode_program.codes)) == (1, 2)


def test_blocks_are_keyed_by_the_content_of_the_rows(opened: Opened) -> None:
    def key(req_id: str, **fields: Any) -> Any:
        opened.accept(req_id, **fields)
        return opened.core.block_keys(req_id)

    first = key("1", steering_features=[EDIT])
    assert first == key("2", steering_features=[EDIT])
    assert first != key("3", steering_features=[{**EDIT, "set": 2.25}])
    assert key("4", decode_steering_features=[EDIT]).prefill is None
    opened.register(opened.folder / "a", "same")
    assert first == key("5", steering_features=[{**EDIT, "sae": "same"}])
    opened.register(OTHER.save(opened.folder / "b"), "a")
    assert first != key("6", steering_features=[EDIT])


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        ({**EDIT, "sae": "none"}, "steering_features[0].sae"),
        ({**EDIT, "feature": 12}, "steering_features[0].feature"),
        ({**EDIT, "set": 3e38}, "steering_features[0]"),
        ({**EDIT, "unit": "max_act"}, "steering_features[0].unit"),
    ],
)
def test_what_the_front_end_could_not_know_is_refused_with_the_same_field(
    opened: Opened, edit: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        opened.accept("r", steering_features=[edit])
    assert caught.value.field == field

    spec, _ = read_steering({"steering_features": [edit]}, opened.steerable)
    assert spec is not None
    with pytest.raises(RequestError) as caught:
        opened.core.call("check", {"spec": to_wire(spec), "field": "steering_features"})
    assert caught.value.field == field
    opened.accept("r", steering_features=[EDIT])


def test_a_file_that_is_cut_off_is_the_error_of_the_request_that_reads_it(opened: Opened) -> None:
    opened.register(opened.folder / "a")
    path = next(path for path in sorted((opened.folder / "a").rglob("*")) if path.suffix in (".safetensors", ".npz"))
    os.truncate(path, 256)

    with pytest.raises(RequestError, match="the file has changed since it was opened; register it again") as caught:
        opened.accept("r", steering_features=[{**EDIT, "sae": "b", "feature": 3}])

    assert caught.value.field == "steering_features[0].sae"


def test_modules_may_hold_features(opened: Opened) -> None:
    spec = read_module({"features": [EDIT], "decode_features": [{**EDIT, "feature": 4}]}, opened.steerable)
    opened.core.call("register", {"name": "m", "spec": to_wire(spec)})

    taken = opened.accept("r", steering_name="m", steering_features=[{**EDIT, "feature": 5}])

    assert [len(taken[f"{phase}_programs"]) for phase in ("prefill", "decode")] == [1, 1]
    exported = from_wire(opened.core.call("export_module", {"name": "m"}))
    assert exported.decode_program is not None
    assert len(exported.decode_program.codes) == 2


def test_a_feature_is_not_changed_twice_by_a_module_and_the_request(opened: Opened) -> None:
    spec = read_module({"features": [EDIT]}, opened.steerable)
    opened.core.call("register", {"name": "m", "spec": to_wire(spec)})

    with pytest.raises(RequestError, match=r"a feature of an SAE is changed twice at 1\.post_mlp"):
        opened.accept("r", steering_name="m", steering_features=[{**EDIT, "set": 1.0}])


def test_modules_count_towards_the_features_of_a_site(tmp_path: Path) -> None:
    opened = Opened(tmp_path, max_sae_features=2)
    spec = read_module({"features": [EDIT]}, opened.steerable)
    opened.core.call("register", {"name": "m", "spec": to_wire(spec)})
    two = [{**EDIT, "feature": 5}, {**EDIT, "feature": 6}]

    opened.accept("alone", steering_features=two)
    with pytest.raises(RequestError, match=r"make 3 entries, at most 2 fit; .*--max-sae-features"):
        opened.accept("both", steering_name="m", steering_features=two)


ACROSS = TinyTranscoder(layer=0, num_layers=2, width=WIDTH)


def with_transcoder(folder: Path, *workers: list[str], **section: Any) -> Opened:
    """A core that serves `ACROSS` as ``t``, with workers that have these op sites."""
    return Opened(folder, *workers, saes={"t": str(ACROSS.save(folder / "t"))}, **section)


def test_workers_get_the_rows_of_a_transcoder_at_all_its_sites(tmp_path: Path) -> None:
    opened = with_transcoder(tmp_path)

    taken = opened.accept("r", steering_features=[{**EDIT, "sae": "t"}])

    program = from_wire(taken).prefill_program
    assert program is not None
    assert [site.name for site in program.sites] == ["0.mlp_in", "0.mlp_out", "1.mlp_out"]
    assert opened.core.block_keys("r") is not None
    assert opened.names()["sae\nt"]["write_sites"] == ["0.mlp_out", "1.mlp_out"]


def test_modules_count_towards_the_features_of_transcoders(tmp_path: Path) -> None:
    opened = with_transcoder(tmp_path, max_sae_features=2)
    features = [{"sae": "t", "feature": feature, "set": 1.0} for feature in range(4)]
    spec = read_module({"features": features[:1]}, opened.steerable)
    opened.core.call("register", {"name": "m", "spec": to_wire(spec)})

    opened.accept("two", steering_name="m", steering_features=features[1:2])
    with pytest.raises(RequestError, match=r"modules, 3 features of transcoders are changed; 2 can be changed in one"):
        opened.accept("three", steering_name="m", steering_features=features[1:3])
    with pytest.raises(RequestError, match=r"a feature of an SAE is changed twice at 0\.mlp_out"):
        opened.accept("twice", steering_name="m", steering_features=features[:1])


def test_a_transcoder_across_pipeline_stages_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    workers = [["0.mlp_in", "0.mlp_out"], ["1.mlp_out"]]
    opened = with_transcoder(tmp_path, *workers, num_stages=2)

    with pytest.raises(RequestError, match=r"path: a transcoder that reads at 0.mlp_in and writes at 0.mlp_out, 1.mlp"):
        opened.register(tmp_path / "t" / "W_enc_0.safetensors", "u", None)
    assert set(opened.names()) == {"sae\nt"}


def test_an_sae_is_registered_listed_and_noted(opened: Opened) -> None:
    opened.register(OTHER.save(opened.folder / "b"))

    listed = opened.core.call("saes", {})
    assert [(one["name"], one["activation"]) for one in listed] == [("a", "jumprelu"), ("b", "gated")]
    assert msgspec.convert(listed[1], SaeStatus).site == SITE.name
    assert set(opened.names()) == {"sae\na", "sae\nb"}
    (entry,) = opened.core.call("audit", {})
    assert (entry["action"], entry["name"], entry["prefill"]) == ("register_sae", "b", listed[1]["sha256"])
    assert opened.core.call("status", {})["saes"]["b"] == listed[1]["sha256"]
    opened.core.call("unregister_sae", {"name": "b"})
    assert set(opened.names()) == {"sae\na"}


@pytest.mark.parametrize(
    ("sae", "site", "message"),
    [
        (TinySae(width=16), SITE.name, "an SAE of width 16; rows of 1.post_mlp have 32"),
        (TinySae(width=WIDTH), "0.pre_attn", "no operations at 0.pre_attn"),
        (TinySae(width=WIDTH), None, "has no site"),
        (None, SITE.name, "no such file"),
    ],
)
def test_an_sae_that_does_not_fit_is_refused_and_changes_nothing(
    opened: Opened, sae: TinySae | None, site: str | None, message: str
) -> None:
    path = opened.folder / "missing" if sae is None else sae.save(opened.folder / "b")

    with pytest.raises(RequestError, match=f"path: .*{message}"):
        opened.register(path, "a", site)
    assert opened.core.call("saes", {})[0]["activation"] == "jumprelu"


def test_a_configured_sae_that_cannot_be_read_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"saes.b \(--saes\): .*no such file"):
        Opened(tmp_path, saes={"b": str(tmp_path / "b")})


def test_an_sae_whose_layer_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--saes.*7.post_mlp: the model has 2 layers"):
        Opened(tmp_path, saes={"b": f"{tmp_path / 'a'}@7.post_mlp"})


def test_an_sae_of_another_model_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = SAE.save(tmp_path / "b")
    text = (path / "cfg.json").read_text().replace('"metadata": {}', '"metadata": {"model_name": "gemma-2-2b"}')
    (path / "cfg.json").write_text(text)

    with caplog.at_level(logging.WARNING, "headgate"):  # an engine of another test may have set its level
        Opened(tmp_path, saes={"b": f"{path}@{SITE.name}"})

    assert "SAE b was trained on gemma-2-2b, and tiny is served" in caplog.text


@pytest.fixture
def encoded(tmp_path: Path) -> Opened:
    return Opened(tmp_path, sae_encode=["a"])


def codes(program: Program | None) -> list[int]:
    return [] if program is None else (program.codes[:, CODE] & CODE_MASK).tolist()


def test_a_reconstruction_is_an_entry_between_operations_and_features(encoded: Opened) -> None:
    fields = {"decode_sae_reconstruction": ["a"], "steering_features": [EDIT], "steering_ops": [ABLATION]}
    spec = from_wire(encoded.accept("r", **fields))

    assert codes(spec.prefill_program) == [Code.LINEAR, Code.FEATURE]
    assert codes(spec.decode_program) == [Code.LINEAR, Code.RECONSTRUCT, Code.FEATURE]
    assert codes(from_wire(encoded.accept("s", sae_reconstruction=["a"])).prefill_program) == [Code.RECONSTRUCT]


def test_blocks_are_keyed_by_reconstructions(encoded: Opened) -> None:
    def key(req_id: str, **fields: Any) -> Any:
        encoded.accept(req_id, **fields)
        return encoded.core.block_keys(req_id)

    alone, edits = key("1", sae_reconstruction=["a"]), key("2", steering_features=[EDIT])
    both = key("3", sae_reconstruction=["a"], steering_features=[EDIT])

    assert len({alone, edits, both}) == 3
    assert alone == key("4", sae_full_reconstruction_specs=[{"module_name": "a"}])
    assert key("5", decode_sae_reconstruction=["a"]) == (None, alone.decode, False)


def test_an_sae_that_is_not_encoded_reconstructs_nothing(opened: Opened) -> None:
    with pytest.raises(RequestError, match=r"sae_reconstruction\[0\]: SAE 'a' is not encoded in full .*--sae-encode"):
        opened.accept("r", sae_reconstruction=["a"])
    assert [one["is_encoded"] for one in opened.core.call("saes", {})] == [False]


def test_the_list_says_what_is_encoded_and_the_name_stays(encoded: Opened) -> None:
    other = OTHER.save(encoded.folder / "b")

    with pytest.raises(RequestError, match=r"name: SAE 'a' is encoded in full \(--sae-encode\), .*at start"):
        encoded.register(other, "a")
    encoded.register(other, "b")

    listed = encoded.core.call("saes", {})
    assert [(msgspec.convert(one, SaeStatus).is_encoded, one["activation"]) for one in listed] == [
        (True, "jumprelu"),
        (False, "gated"),
    ]


def test_modules_reconstruct_in_full_or_not_at_all_and_once(encoded: Opened) -> None:
    spec = read_module({"sae_reconstruction": ["a"], "features": [EDIT]}, encoded.steerable)
    encoded.core.call("register", {"name": "m", "spec": to_wire(spec)})

    assert len(encoded.accept("1", steering_name="m")["prefill_programs"]) == 1
    assert not encoded.accept("2", steering_module_ref=["m", 0.0]).get("prefill_programs")
    with pytest.raises(RequestError, match=r"an SAE reconstruct rows, so its scale is 1 or 0, not 0\.5"):
        encoded.accept("3", steering_module_ref=["m", 0.5])
    with pytest.raises(RequestError, match=r"rows are reconstructed twice at 1\.post_mlp"):
        encoded.accept("4", steering_name="m", sae_reconstruction=["a"])
