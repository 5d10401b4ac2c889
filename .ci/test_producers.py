"""Readers of SAE files against the classes that write them, and data sets against the trainers that read them.

sae-lens and the others bring two hundred packages, so they get an environment of their own, in .cache/producers. Their
classes record files and activations anew; the tests of our readers then read those in place of the recorded ones.
``test_producers.py --keep`` replaces the recorded ones. There, too, trainers are fed with data sets and exports read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import setup_env
from setup_env import ROOT, SetupError, say

ENVIRONMENT = ROOT / ".cache" / "producers"
RECORDED = ROOT / "tests" / "producers" / "recorded"
TESTS = "tests/unit/steering/features/test_producers.py"
TRAINERS = "tests/producers/test_trainers.py"
WITH_ALL = (
    *("sae-lens==6.54.12", "nnsight", "natsort", "schedulefree", "zstandard"),
    *("datasets", "pyarrow", "scikit-learn", "torchdata", "webdataset", "pytest"),
)
ALONE = ("dictionary-learning==0.1.0", "eai-sparsify==1.3.3", "circuit-tracer==0.5.0")
"""Installed without what they require, of which the others bring all that their SAE classes import."""


def main() -> int:
    """Install, record and test; the exit status is 1 if any of this fails."""
    keeps = "--keep" in sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="headgate-producers-") as folder:
        target = RECORDED if keeps else Path(folder)
        try:
            install()
            command = [ENVIRONMENT / "bin" / "python", ROOT / "tests" / "producers" / "record.py", target]
            setup_env.run(command, "the producers' classes could not record", env=dict(os.environ))
        except SetupError as error:
            print(f"\ntest-producers failed: {error}", file=sys.stderr)
            return 1
        environment = {**os.environ, "HEADGATE_RECORDED": str(target)}
        readers = subprocess.run([sys.executable, "-m", "pytest", "-q", TESTS], cwd=ROOT, env=environment).returncode
        return readers or test_trainers()


def test_trainers() -> int:
    """Feed data sets to the trainers, in their environment, which has no vLLM and not all that the fixtures need."""
    command = [str(ENVIRONMENT / "bin" / "python"), "-m", "pytest", "-q", "--noconftest", TRAINERS]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}).returncode


def install() -> None:
    """Make the environment, unless it is there."""
    done = ENVIRONMENT / "done"
    if done.is_file() and done.read_text() == repr((WITH_ALL, ALONE)):
        return
    uv = Path(sys.executable).parent / "uv"
    python = ENVIRONMENT / "bin" / "python"
    index = {**os.environ, **setup_env.pip_index(Path(sys.executable))}
    say("installing sae-lens and the others, about 2 GB")
    setup_env.run(
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, ENVIRONMENT], "no environment", env=index
    )
    setup_env.install_torch(python, index)
    into: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", python]
    why = "the producers' packages could not be installed"
    setup_env.run([*into, setup_env.TORCH, *WITH_ALL], why, env=index)
    setup_env.run([*into, "--no-deps", *ALONE], why, env=index)
    setup_env.run([*into, "-e", ROOT], why, env=index)
    done.write_text(repr((WITH_ALL, ALONE)))


if __name__ == "__main__":
    sys.exit(main())
