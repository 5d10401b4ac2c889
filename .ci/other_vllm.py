"""Fetches the Python files of a release of vLLM, without its compiled parts: enough for the model-free worker.

``python .ci/other_vllm.py 0.26.0`` prints a folder for PYTHONPATH, which then comes before the installed vLLM. Of the
wheel on the package index, which is hundreds of megabytes, only the parts that hold text are read; the checksums in it
are compared. What was fetched is kept in ``HEADGATE_CACHE``, else ``.cache``.
"""

from __future__ import annotations

import compileall
import io
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".json", ".jinja", ".yaml", ".txt"}
BLOCK = 1 << 20

NEEDS = {"0.26.0": ["openai-harmony==0.0.8"], "0.33.0": ["orjson==3.11.6"]}
"""What a release's server imports and the pinned one does not; packages for GPUs are never imported here."""


class FetchError(Exception):
    """A release cannot be had; the message says why."""


class RemoteFile(io.RawIOBase):
    """A file on a server, read in blocks of a megabyte as they are needed."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        self._block = (-1, b"")
        with fetch(url, "bytes=0-0") as answer:
            found = re.fullmatch(r"bytes 0-0/(\d+)", answer.headers.get("Content-Range", ""))
        if found is None:
            raise FetchError(f"{url}: the server does not send parts of a file")
        self._size = int(found[1])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        parts = []
        while self._at < end:
            number, start = divmod(self._at, BLOCK)
            part = self._read_block(number)[start : start + end - self._at]
            parts.append(part)
            self._at += len(part)
        return b"".join(parts)

    def _read_block(self, number: int) -> bytes:
        if self._block[0] != number:
            last = min((number + 1) * BLOCK, self._size) - 1
            with fetch(self._url, f"bytes={number * BLOCK}-{last}") as answer:
                self._block = (number, answer.read())
        return self._block[1]


def main() -> int:
    """Print the folder of the release that is named; the exit status is 1, with a reason, if there is none."""
    (version,) = sys.argv[1:]
    folder = Path(os.environ.get("HEADGATE_CACHE") or ROOT / ".cache") / "vllm" / version
    try:
        if not folder.exists():
            make(folder, version)
        check(folder, version)
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        print(f"vLLM {version} cannot be had: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def wheel_url(version: str) -> str:
    """Address of the release's wheel for this machine on the indexes that pip is configured with."""
    machine = re.escape(platform.machine())
    link = re.compile(rf'href="([^"#]*/vllm-{re.escape(version)}-[^"#/]*{machine}\.whl)')
    indexes = [pip_setting("index-url") or "https://pypi.org/simple", *pip_setting("extra-index-url").split()]
    for index in indexes:
        page = f"{index.rstrip('/')}/vllm/"
        try:
            with fetch(page) as answer:
                found = link.search(answer.read().decode())
        except urllib.error.URLError:
            continue
        if found is not None:
            return str(urllib.parse.urljoin(page, found[1]))
    raise FetchError(f"no wheel for {platform.machine()} on {', '.join(indexes)}")


def pip_setting(key: str) -> str:
    """What pip is told about `key` by its environment variable or its configuration files; empty if nothing."""
    from_environment = os.environ.get("PIP_" + key.upper().replace("-", "_"))
    if from_environment:
        return from_environment
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{key}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def fetch(url: str, part: str | None = None) -> urllib.response.addinfourl:
    """GET an address, or a part of it, trusting the certificates that pip trusts."""
    headers = {"Accept": "text/html, application/octet-stream", **({"Range": part} if part else {})}
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60, context=context)  # type: ignore[no-any-return]  # noqa: S310


def make(folder: Path, version: str) -> None:
    """Fetch a release into `folder`, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        extract(wheel_url(version), version, unfinished)
        if version in NEEDS:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(unfinished)]
            if subprocess.run([*install, *NEEDS[version]], stdout=sys.stderr, check=False).returncode:
                raise FetchError(f"pip could not install {', '.join(NEEDS[version])}; its reason is above")
        # A server is several processes of thousands of imports, and they may have been told to write no bytecode.
        compileall.compile_dir(unfinished, quiet=2)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def extract(url: str, version: str, folder: Path) -> None:
    """Write the text files of a wheel, and metadata under which vLLM takes itself for its CPU build."""
    print(f"reading the Python files of {url.rpartition('/')[2]}", file=sys.stderr)
    with zipfile.ZipFile(RemoteFile(url)) as wheel:
        wanted = [m for m in wheel.infolist() if m.filename.startswith("vllm/") and Path(m.filename).suffix in SUFFIXES]
        for member in sorted(wanted, key=lambda member: member.header_offset):
            wheel.extract(member, folder)
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def check(folder: Path, version: str) -> None:
    """Make sure that this release is what is imported with the folder on PYTHONPATH."""
    program = "import vllm; from importlib.metadata import version; print(vllm.__file__, version('vllm'))"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    if done.stdout.split()[-2:] != [str(folder / "vllm" / "__init__.py"), f"{version}+cpu"]:
        raise FetchError(f"it is not what is imported: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
