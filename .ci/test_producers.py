"""Readers of SAE files against the classes that write them, and data sets against the trainers that read them.

sae-lens and the others require two hundred packages and another torch. What they import of these is little, so they are
installed without what they require, beside the environment of the tests: in .cache/producers, 250 MB. Their
classes record files and activations anew; the tests of our readers then read those in place of the recorded ones.
``test_producers.py --keep`` replaces the recorded ones. What TransformerLens 4 computes of SmolLM2 is recorded
anew as well, and compared with the record that a test compares an engine with. There, too, trainers are fed with data
sets and exports read, by Ray Data, too, which has processes of its own and takes half a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import setup_env
from safetensors.torch import load_file
from setup_env import ROOT, SetupError, say
from torch import Tensor

PACKAGES = ROOT / ".cache" / "producers"
LENS_PACKAGES = PACKAGES / "transformer-lens-4"
RECORDED = ROOT / "tests" / "producers" / "recorded"
TESTS = "tests/unit/steering/features/test_producers.py"
TRAINERS = "tests/producers/test_trainers.py"
RAY = "tests/unit/consumers/datasets/test_dataset_ray.py"
INSTALLED = (
    *("sae-lens==6.54.12", "dictionary-learning==0.1.0", "eai-sparsify==1.3.3", "circuit-tracer==0.5.0"),
    *("datasets==5.2.0", "torchdata==0.11.0", "webdataset==1.0.2"),
    *("transformer-lens==2.18.0", "jaxtyping==0.3.11", "better-abc==0.0.3", "typeguard==4.6.1", "einops==0.8.2"),
    *("nnsight==0.8.1", "astor==0.8.1", "greenlet==3.5.6", "cloudpickle==3.1.3", "toml==0.10.2", "wandb==0.31.0"),
    *("natsort==8.4.0", "schedulefree==1.4.1", "zstandard==0.25.0", "simple-parsing==0.1.9"),
    *("docstring-parser==0.18.0", "braceexpand==0.1.7", "dill==0.4.1", "multiprocess==0.70.19", "xxhash==4.1.0"),
    *("pandas==3.1.1", "python-dateutil==4.0.0", "pytz==2026.6", "six==1.17.0", "tzdata==2026.6"),
    *("ray==2.60.0", "msgpack==1.2.4"),
)
"""The producers, what they import and the environment of the tests has not; all of it without what it requires."""
LENS_INSTALLED = ("transformer-lens==4.3.0", "beartype==0.23.1", "fancy-einsum==0.0.3")
"""TransformerLens of today, which comes before the older one that sae-lens needs."""
LENS_RECORD = "transformer_lens.safetensors"
MAX_ERROR = 1e-4
ENVIRONMENT = {
    "PYTHONPATH": str(PACKAGES),
    "HF_HUB_OFFLINE": "1",
    "SPARSIFY_DISABLE_TRITON": "1",  # which is installed here, and finds no GPU
}


def main() -> int:
    """Install, record and test; the exit status is 1 if any of this fails."""
    keeps = "--keep" in sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="headgate-producers-") as folder:
        target = RECORDED if keeps else Path(folder)
        try:
            install()
            command: list[str | Path] = [sys.executable, ROOT / "tests" / "producers" / "record.py", target]
            setup_env.run(command, "the producers' classes could not record", env={**os.environ, **ENVIRONMENT})
            record_lens(target / LENS_RECORD)
        except SetupError as error:
            print(f"\ntest-producers failed: {error}", file=sys.stderr)
            return 1
        environment = {**os.environ, "HEADGATE_RECORDED": str(target)}
        readers = subprocess.run([sys.executable, "-m", "pytest", "-q", TESTS], cwd=ROOT, env=environment).returncode
        return readers or test_trainers() or test_ray()


def record_lens(target: Path) -> None:
    """Record what TransformerLens computes, and compare it with the record.

    Raises:
        SetupError: If it fails, or finds something else.
    """
    path = os.pathsep.join([str(LENS_PACKAGES), str(PACKAGES)])
    script = ROOT / "tests" / "producers" / "record_transformer_lens.py"
    made = subprocess.run([sys.executable, ROOT / "examples" / "model.py"], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise SetupError("the model could not be made: its reason is above")
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    command: list[str | Path] = [sys.executable, script, made.stdout.split()[-1], target]
    setup_env.run(command, "TransformerLens could not record", env=environment)
    found, known = load_file(target), load_file(RECORDED / LENS_RECORD)
    if found.keys() != known.keys():
        raise SetupError(f"TransformerLens recorded {sorted(found)}; expected {sorted(known)}")
    off = [name for name, values in known.items() if not is_close(found[name], values)]
    if off:
        raise SetupError(f"TransformerLens finds something else than is recorded: {off}")


def is_close(found: Tensor, known: Tensor) -> bool:
    """Whether ids are equal, and other numbers within 1e-4 of the largest."""
    if found.shape != known.shape or not known.is_floating_point():
        return found.equal(known)
    return bool((found - known).abs().max() <= MAX_ERROR * known.abs().max())


def test_trainers() -> int:
    """Feed data sets to the trainers; fixtures of other tests are not theirs."""
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", TRAINERS]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}).returncode


def test_ray() -> int:
    """Let Ray Data read an export."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "extended", RAY]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}).returncode


def install() -> None:
    """Install the packages, unless they are there."""
    done, wanted = PACKAGES / "done", repr((INSTALLED, LENS_INSTALLED))
    if done.is_file() and done.read_text() == wanted:
        return
    shutil.rmtree(PACKAGES, ignore_errors=True)
    python = Path(sys.executable)
    say("installing sae-lens and the others, about 250 MB")
    for folder, packages in ((PACKAGES, INSTALLED), (LENS_PACKAGES, LENS_INSTALLED)):
        setup_env.install(
            python,
            setup_env.pip_index(python),
            ["--no-deps", "--target", folder, *packages],
            "the producers' packages could not be installed",
        )
    done.write_text(wanted)


if __name__ == "__main__":
    sys.exit(main())
