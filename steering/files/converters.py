"""Programs that turn pickles into files that can be read safely, to be run where the pickle was made.

Unpickling runs code that the file names, so headgate does not do it. Whoever made a file can, and knows its classes.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

CONVERTERS: dict[str, str] = {
    "steering-vectors": """\
# A steering_vectors.SteeringVector that was pickled or torch.saved: each layer's output.
import torch
from safetensors.torch import save_file

vector = torch.load("OLD.pt", map_location="cpu", weights_only=False)  # of a plain pickle: pickle.load
assert vector.layer_type == "decoder_block", vector.layer_type
rows = {f"{layer}.post_mlp": row.flatten().contiguous() for layer, row in vector.layer_activations.items()}
save_file(rows, "NEW.safetensors")
""",
    "numpy": """\
# Numpy arrays by layer, pickled in .npy, .pkl or .pt (angular steering, vLLM-Hook). Each names its layers in its own
# way, and may act elsewhere than at the layers' outputs: put the right hook point in place of post_mlp.
import numpy as np
from safetensors.numpy import save_file

vectors = np.load("OLD.npy", allow_pickle=True).item()  # of .pt: torch.load(..., weights_only=False)
rows = {f"{int(layer)}.post_mlp": np.asarray(row, np.float32).ravel() for layer, row in vectors.items()}
save_file(rows, "NEW.safetensors")
""",
    "legacy-torch": """\
# A file of torch.save from before PyTorch 1.6, or of plain pickle: the same tensors in today's format.
import torch

torch.save(torch.load("OLD.pt", map_location="cpu", weights_only=False), "NEW.pt")
""",
    "objects": """\
# Any object: take its vectors, of [hidden], and name the site of each.
import torch
from safetensors.torch import save_file

made = torch.load("OLD.pt", map_location="cpu", weights_only=False)  # of a plain pickle: pickle.load
vectors = {12: made}  # the layer of each vector
rows = {f"{layer}.post_mlp": row.float().flatten().contiguous() for layer, row in vectors.items()}
save_file(rows, "NEW.safetensors")
""",
}
"""The programs by name."""

PICKLE_SUFFIXES = (".npy", ".pkl", ".pickle")
_SCANNED = 1 << 20


def advice(path: Path) -> str:
    """Say which program of `CONVERTERS` fits a file, by the classes that its pickle names; nothing of it is run."""
    name = _converter(path)
    return (
        f"Convert it where it was made: `headgate vectors converter {name}` prints the program, and "
        "docs/reference/steering.md has them all"
    )


def _converter(path: Path) -> str:
    if path.suffix == ".npy":
        return "numpy"
    names = _named_classes(path)
    if any(name.startswith("steering_vectors.") for name in names):
        return "steering-vectors"
    if any(name.partition(".")[0] in ("numpy", "_codecs") for name in names):
        return "numpy"
    is_old = path.suffix not in PICKLE_SUFFIXES and not zipfile.is_zipfile(path)
    return "legacy-torch" if is_old and all(_is_plain(name) for name in names) else "objects"


def _is_plain(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "collections")


def _named_classes(path: Path) -> set[str]:
    """Return ``module.name`` of the classes and functions in a pickle, as far as it can be read."""
    names: set[str] = set()
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(_pickle_of(path)):
            if opcode.name == "GLOBAL":
                names.add(str(argument).replace(" ", "."))
            elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
                names.add(".".join(texts[-2:]))
            elif isinstance(argument, str):
                texts.append(argument)
    except Exception:  # noqa: BLE001  (a damaged pickle: what was found so far is all that can be said of it)
        return names
    return names


def _pickle_of(path: Path) -> bytes:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = next((name for name in archive.namelist() if name.endswith("data.pkl")), None)
            if found is None:
                return b""
            with archive.open(found) as member:
                return member.read(_SCANNED)
    with path.open("rb") as file:
        return file.read(_SCANNED)
