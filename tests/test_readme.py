"""README's own blocks, word by word, in an empty folder: only the model's path, and the port, are others.

What is compared with the ``text`` block behind each: the answers that a model is sure of, exactly; of longer answers
the first `SURE` characters, since processors and GPUs round bf16 in their own ways and a greedy answer forks where two
tokens are about as likely. Paths and numbers of bytes are those of this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from headgate.steering import load
from tests.fakes.server import serving

pytestmark = pytest.mark.engine

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
SURE = 20
NOT_OURS = 10
"""Lines that a script of README's may print beside its own."""
START_S = 900.0
QUICKLY = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""What follows on the first script starts vLLM's processes with what is imported already: 13 s of a core each."""


def block(after: str, language: str) -> str:
    """The first block in `language` behind the heading or the words `after`."""
    found = re.search(rf"```{language}\n(.*?)```", README[README.index(after) :], re.DOTALL)
    assert found, f"README has no {language} block behind {after!r}"
    return found.group(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """A newcomer's, with what README exports; nothing of the settings of our tests."""
    ours = ("VLLM_", "HEADGATE_", "PYTHON", "OMP_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    exports = dict(word.split("=") for word in block("## Try it", "sh").split()[1:])
    bin_folder = Path(sys.executable).parent
    return {**env, **exports, "PATH": f"{bin_folder}:{env['PATH']}", "HF_HUB_OFFLINE": "1"}


def run_python(name: str, text: str, folder: Path, environment: dict[str, str]) -> CompletedProcess[str]:
    (folder / name).write_text(text)
    done = subprocess.run(
        ["python", name], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=START_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    noise = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(noise) <= NOT_OURS, done.stderr
    return done


def test_the_export_of_readme_is_one_line() -> None:
    assert block("## Try it", "sh").startswith("export VLLM_LOGGING_LEVEL=ERROR ")


def test_capture(model_dir: Path, folder: Path, environment: dict[str, str]) -> None:
    text = block("### Capture", "python").replace("my/model", str(model_dir))

    done = run_python("capture.py", text, folder, environment)

    assert done.stdout == block("### Capture", "text")


def test_steer(model_dir: Path, folder: Path, environment: dict[str, str]) -> None:
    text = block("### Steer", "python").replace("my/model", str(model_dir))

    done = run_python("steer.py", text, folder, environment | QUICKLY)

    printed, promised = done.stdout.splitlines(), block("### Steer", "text").splitlines()
    assert [line[:SURE] for line in printed] == [line[:SURE] for line in promised], done.stdout
    assert load(folder / "joy.safetensors").vectors is not None


def test_serve_and_curl(model_dir: Path, folder: Path, environment: dict[str, str]) -> None:
    """Stands on the ``joy.safetensors`` of `test_steer`, as README does."""
    section = README[README.index("### Serve") :]
    command, curl = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[:2]
    in_bash = run_by_bash(command.replace("my/model", str(model_dir)), folder, QUICKLY)
    with serving(in_bash, PATH=environment["PATH"], HF_HUB_OFFLINE="1") as server:
        curl = curl.replace("my/model", str(model_dir)).replace("http://localhost:8000", server.url)
        done = subprocess.run(
            ["bash", "-c", curl], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )

    assert done.returncode == 0, done.stdout + done.stderr
    (answer, result), (promised, its_result) = (text.splitlines() for text in (done.stdout, block("### Serve", "text")))
    assert answer[:SURE] == promised[:SURE]
    assert result == f"ok {folder / 'run1' / 'default' / 'day.safetensors'}"
    assert re.fullmatch(r"ok /\S+/run1/default/day.safetensors", its_result)


def run_by_bash(command: str, folder: Path, exported: Mapping[str, str]) -> list[str]:
    """What `tests.fakes.server.serving` runs as a newcomer would in `folder`: without the settings of our tests."""
    exports = "".join(f"export {name}={value}; " for name, value in exported.items())
    forget = "unset ${!VLLM_*} ${!HEADGATE_*} ${!PYTHON*} ${!OMP_*}"
    begin = f"{forget}; {exports}{block('## Try it', 'sh').strip()}; cd {shlex.quote(str(folder))}"
    shell = f'{begin} && exec {command.strip()} "$@"'
    return ["-c", "import os, sys; os.execvp('bash', ['bash', '-c', sys.argv[1], *sys.argv[1:]])", shell]
