"""Damages files of every format that headgate reads, and reads them: only errors of headgate may come out.

``python -m tests.fuzz.files FOLDER SECONDS SEED`` runs until time is up, in a process of its own, so that a crash, a
hang or memory without bound ends it and not its caller. Each case follows from the seed and its number alone:
``--only NUMBER`` repeats one. A file that failed once belongs into a test of its reader.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import re
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import safetensors.numpy
import torch

from headgate.capture import probe as probe_files
from headgate.capture.engine.access.caller import Usage
from headgate.capture.engine.access.key_ring import read_keys
from headgate.capture.probe import Probe
from headgate.capture.schema.consumer import ConsumerContext, SpecContext
from headgate.capture.schema.errors import HeadgateError
from headgate.capture.schema.sites import Site
from headgate.consumers.datasets import open_dataset
from headgate.consumers.feed import EXAMPLE_MODEL, TIMEOUT_S, ExampleRequest, Feed
from headgate.consumers.harvest.prompts import open_prompts
from headgate.consumers.moments import MomentsConsumer, open_moments
from headgate.consumers.reader import open_captures
from headgate.consumers.reward import read_direction
from headgate.steering import load
from headgate.steering.features.canonical import write_coder
from headgate.steering.features.importing import open_coder, read_source
from headgate.steering.features.source_coder import Hints
from headgate.steering.files.commands import describe
from headgate.steering.files.foreign_files import VectorSource
from headgate.steering.files.vector_files import save
from headgate.steering.probes.examples import read_labels
from headgate.steering.vectors.phase_vectors import PhaseVectors
from tests.fakes.capturing import capturing
from tests.source_tree import ROOT

LONGEST_S = 20.0
"""Seconds for one file on a machine that is busy."""
MEMORY_BYTES = 1 << 30
"""Bytes that reading a file of some kilobytes may take."""
SITE = Site.parse("1.post_mlp")
SITES = "3.post_mlp"
SIZE = 8
WORDS = [b"\0" * 8, b"\xff" * 8, b"\xff" * 4, (1 << 60).to_bytes(8, "little"), (1 << 31).to_bytes(4, "little")]
WORDS += [
    b"{",
    b"}",
    b"[" * 300,
    b'"',
    b"-1",
    b"1e999",
    b"null",
    b"NaN",
    b"9" * 30,
    b"\xef\xbb\xbf",
    b"\xe9",
    b"\\ud800",
]


TOKEN = re.compile(rb'"[^"\n]{0,60}"|-?\d+(?:\.\d+)?|true|false|null')
HEAD_BYTES = 4096
VALUES = (b"-1", b"0", b"[]", b"{}", b"null", b'""', b"true", b"9" * 20, b"1.5")


class Format(NamedTuple):
    """Files of one format, in a folder of their own, and how they are read."""

    folder: Path
    read: Callable[[Path], object]


def corpus(folder: Path) -> Iterator[Format]:
    """Write small files of all formats, and name their readers."""
    for path in sorted((ROOT / "tests" / "producers" / "recorded").rglob("expected.safetensors")):
        target = folder / path.parent.relative_to(ROOT / "tests" / "producers" / "recorded")
        shutil.copytree(path.parent, target, ignore=shutil.ignore_patterns("expected*"))
        yield Format(target, read_sae)
    makers = [saes, vectors, probes, labels, prompts, captures, moments, directions, keys]
    for make in makers:
        for name, read in make(folder):
            yield Format(folder / name, read)


def saes(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Gemma Scope packed and not, one of PyTorch, and headgate's own."""
    tensors = {"W_enc": (SIZE, 16), "W_dec": (16, SIZE), "b_enc": (16,), "b_dec": (SIZE,), "threshold": (16,)}
    values = {name: np.ones(shape, np.float32) for name, shape in tensors.items()}
    for name, write in (("npz", np.savez), ("packed", np.savez_compressed)):
        (folder / name).mkdir()
        write(folder / name / "params.npz", **values)
        yield name, read_sae
    (folder / "openai/resid_post_mlp").mkdir(parents=True)
    linear = {"encoder.weight": torch.ones(16, SIZE), "decoder.weight": torch.ones(SIZE, 16)}
    linear |= {"latent_bias": torch.ones(16), "pre_bias": torch.ones(SIZE)}
    torch.save(
        {**linear, "activation": "TopK", "activation_state_dict": {"k": 4, "postact_fn": "ReLU"}},
        folder / "openai/resid_post_mlp/1.pt",
    )
    yield "openai", lambda path: read_sae(path / "resid_post_mlp/1.pt")
    (folder / "own").mkdir()
    write_coder(folder / "own/x.safetensors", read_source(folder / "npz", Hints()), name="x", path="x")
    yield "own", lambda path: read_sae(path / "x.safetensors")


def read_sae(path: Path) -> object:
    """Open an SAE, read features and encode a row."""
    coder = open_coder(next(path.glob("*_3.safetensors"), path))
    coder.rows([0, coder.num_features - 1])
    return coder.encode(np.ones((1, coder.width), np.float32))


def vectors(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Steering vectors of all formats."""
    row, matrix = np.arange(1, SIZE + 1, dtype=np.float32), torch.ones(4, SIZE)
    own = PhaseVectors.from_rows({SITE: row, Site.parse("2.post_mlp"): 2 * row})
    for name in ("v.safetensors", "v.json", "v.gguf"):
        (folder / f"own-{name}").mkdir()
        save(folder / f"own-{name}" / name, own)
        yield f"own-{name}", lambda path, name=name: read_vectors(path / name)
    content = {
        "vec_layer_3_m.pt": torch.ones(SIZE),
        "evil_response_avg_diff.pt": matrix,
        "assistant_axis.pt": {"axis": matrix},
        "a_weight.pt": matrix,
        "a.pt": {"a": matrix, "b": torch.ones(SIZE, dtype=torch.bfloat16)},
    }
    options = {"a_weight.pt": {"layer": 1, "concept": 2}, "a.pt": {"tensor": "b", "layer": 3}}
    for name, value in content.items():
        (folder / f"torch-{name}").mkdir()
        torch.save(value, folder / f"torch-{name}" / name)
        given = options.get(name, {})
        yield f"torch-{name}", lambda path, name=name, given=given: read_vectors(path / name, **given)
    (folder / "arrays").mkdir()
    np.save(folder / "arrays/v.npy", row)
    yield "arrays", lambda path: read_vectors(path / "v.npy", layer=2)
    (folder / "svec").mkdir()
    (folder / "svec/v.svec").write_text('{"model_type": "m", "directions": {"1": [1.0, 2.0], "2": [3.0, 4.0]}}')
    yield "svec", lambda path: read_vectors(path / "v.svec")


def read_vectors(path: Path, **options: Any) -> object:
    """Load vectors and describe them."""
    load(path, **options)
    return describe(VectorSource.parse(path, **options))


def probes(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """A probe."""
    (folder / "probe").mkdir()
    probe_files.save(folder / "probe/p.safetensors", Probe(site=SITE, weight=np.ones((1, SIZE), np.float32)))
    yield "probe", lambda path: probe_files.load(path / "p.safetensors")


def labels(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Labels in all formats."""
    texts = {
        "l.json": '[{"request_id": "a", "label": 1}, {"tag": "b", "label": "no"}]',
        "l.jsonl": '{"request_id": "a", "label": 1}\n{"tag": "b", "label": "no"}\n',
        "l.csv": "request_id,label\na,1\nb,no\n",
    }
    for name, text in texts.items():
        (folder / f"labels-{name}").mkdir()
        (folder / f"labels-{name}" / name).write_text(text)
        yield f"labels-{name}", lambda path, name=name: read_labels(path / name)


def prompts(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Prompts in all formats."""
    for name in ("p.txt", "p.jsonl", "p.parquet"):
        (folder / f"prompts-{name}").mkdir()
        yield f"prompts-{name}", lambda path, name=name: read_prompts(path / name)
    (folder / "prompts-p.txt/p.txt").write_text("one\ntwo\n")
    chat = '{"messages": [{"role": "user", "content": "hi"}]}\n'
    (folder / "prompts-p.jsonl/p.jsonl").write_text(chat * 3)
    table = pa.table({"text": ["a", "b"], "n": [1, 2]})
    pyarrow.parquet.write_table(table, folder / "prompts-p.parquet/p.parquet")


def read_prompts(path: Path) -> object:
    """Go through prompts; a record that is none is an error of headgate, and the next ones go on."""
    for record in open_prompts(str(path)).records():
        try:
            record.prompt()
        except HeadgateError:
            continue
    return None


def captures(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Roots of all layouts, one with an index."""
    for layout in ("request", "raw", "shards"):
        root = folder / f"captures-{layout}"
        with capturing(root) as files:
            for client in ("one", "two"):
                files.feed.whole(files.request({"layout": layout}, client_id=client))
        yield root.name, read_captures
    shutil.copytree(folder / "captures-request", folder / "captures-index")
    open_dataset(folder / "captures-index", sites=SITES)
    yield "captures-index", read_data_set


def read_captures(path: Path) -> object:
    """Open a root, and read all rows."""
    return [(one.positions, one.token_ids, [one[site] for site in one.sites]) for one in open_captures(path)]


def read_data_set(path: Path) -> object:
    """Open a root as a data set."""
    data = open_dataset(path, sites=SITES)
    return [(batch.positions, batch.torch(SITES)) for batch in data.batches(batch_size=4)]


def moments(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """A root of moments."""
    root = folder / "moments"
    context = ConsumerContext(instance_name="moments", model=EXAMPLE_MODEL)
    feed = Feed(MomentsConsumer({"root": str(root), "flush_s": 0}, context))
    asked = SpecContext(instance_name="moments", model=EXAMPLE_MODEL, params={"root": "x"}, client_request_id="r")
    feed.whole(ExampleRequest(MomentsConsumer.validate_client_spec({"hooks": {"post_mlp": [1]}}, asked), "r"))
    feed.consumer.close(TIMEOUT_S)
    yield "moments", lambda path: read_moments(path)


def read_moments(path: Path) -> object:
    """Read all moments."""
    found = open_moments(path)
    sites = [found.select(key.site, phase=key.phase, tag=key.tag) for key in found]
    return [(one.mean, one.variance, one.mean_norm, one.norm_quantile(0.5)) for one in sites]


def directions(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Directions of the reward consumer."""
    (folder / "direction").mkdir()
    np.save(folder / "direction/d.npy", np.ones(SIZE))
    yield "direction", lambda path: read_direction(path / "d.npy", SITE, SIZE)
    (folder / "direction-vectors").mkdir()
    row = {f"vectors/{SITE.name}": np.ones(SIZE, np.float32)}
    safetensors.numpy.save_file(row, folder / "direction-vectors/d.safetensors")
    yield "direction-vectors", lambda path: read_direction(path / "d.safetensors", SITE, SIZE)


def keys(folder: Path) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """The operator's files: keys, and what they used."""
    (folder / "keys").mkdir()
    text = '{"keys": [{"name": "a", "sha256": "%s", "roles": ["capture"], "tags": ["a-*"]}]}'
    (folder / "keys/keys.json").write_text(text % ("0" * 64))
    (folder / "keys/keys.json").chmod(0o600)
    yield "keys", lambda path: read_keys(path / "keys.json", lambda: ["capture"])
    (folder / "usage").mkdir()
    Usage(folder / "usage/usage.db").close()
    yield "usage", lambda path: Usage(path / "usage.db").close()


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Change a few places of a file."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        # Half of all changes are in headers, which most formats have in front.
        place = chance.randrange(max(1, min(len(data), 400) if chance.random() < 0.5 else len(data)))
        length = chance.choice((1, 2, 8, 40))
        match chance.randrange(10):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[place : place + length]
            case 2:
                del data[place:]
            case 3:
                data[place:place] = data[place : place + length]
            case 4:
                word = chance.choice(WORDS)
                data[place : place + len(word)] = word
            case 5:
                data[place:place] = chance.choice(WORDS)
            case _:  # what leaves JSON and YAML whole
                _swap_tokens(data, chance)
    return bytes(data)


def _swap_tokens(data: bytearray, chance: random.Random) -> None:
    """Put one number or text of a document in the place of another, with blanks behind it where it is shorter."""
    tokens = [match.span() for match in TOKEN.finditer(bytes(data[:HEAD_BYTES]))]
    if not tokens:
        return
    start, stop = chance.choice(tokens)
    first, last = chance.choice(tokens)
    new = chance.choice(
        (bytes(data[first:last]), b"-1", b"0", b"[]", b"{}", b"null", b'""', b"true", b"9" * 20, b"1.5")
    )
    data[start:stop] = new.ljust(stop - start) if chance.random() < 0.7 else new


def run(formats: list[Format], work: Path, seed: int, number: int) -> str:
    """Damage one file of one format, and read it; return what came of it.

    Raises:
        Exception: That is no error of headgate, nor one of the system that names a file.
    """
    chance = random.Random(f"{seed}/{number}")
    form = formats[number % len(formats)]
    copy = work / form.folder.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(form.folder, copy)
    path = chance.choice(sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size))
    path.write_bytes(damaged(path.read_bytes(), chance))
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    try:
        form.read(copy)
    except HeadgateError:
        return "refused"
    except OSError as error:
        if error.filename is None:
            raise
        return "refused"
    finally:
        faulthandler.cancel_dump_traceback_later()
    return "read"


def main() -> int:
    """Run cases until time is up; 1 if one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("seed", type=int)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    options.folder.mkdir(parents=True, exist_ok=True)
    made, work = options.folder / "made", options.folder / "work"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    formats = list(corpus(made))
    for form in formats:
        form.read(form.folder)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES, -1))
    found, end, number = Counter[str](), time.monotonic() + options.seconds, options.only or 0
    while time.monotonic() < end or not number:
        sys.stderr.write(f"\rcase {number} of seed {options.seed}: {formats[number % len(formats)].folder.name} ")
        try:
            found[run(formats, work, options.seed, number)] += 1
        except Exception:  # noqa: BLE001  (each is a failure, and the others are still looked for)
            found["failed"] += 1
            sys.stdout.write(f"case {number} of seed {options.seed}: {formats[number % len(formats)].folder.name}\n")
            sys.stdout.write(traceback.format_exc() + "\n")
        number += 1
        if options.only is not None:
            break
    sys.stdout.write(f"{number} cases: {dict(found)}\n")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
