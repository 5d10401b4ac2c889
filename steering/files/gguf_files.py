"""GGUF control vectors: the files of llama.cpp and repeng. Needs the extra ``headgate[gguf]``.

Such a file has the architecture ``controlvector`` and one tensor ``direction.N`` of ``[hidden]`` for each layer. Both
tools add ``direction.N`` to the output of layer N, counted from 0, after its MLP was added: that is our site
``N.post_mlp``, and files are read and written so. Three consequences of how the tools differ:

* llama.cpp refuses ``direction.0`` and types other than float32, so neither is written; repeng may write
  ``direction.0``, so it is read.
* llama.cpp's own ``cvector-generator`` gives the direction at the output of layer N the name ``direction.N+1``.
  llama.cpp adds it at layer N+1 all the same, and so do we: a file acts here as it acts there.
* A strength is no part of the file: the scale of a request or module gives it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.vectors.dtypes import widen
from headgate.steering.vectors.phase_vectors import PhaseVectors

ARCHITECTURE = "controlvector"

_HINT = f"{ARCHITECTURE}.model_hint"
_NOTE = "headgate."
_DIRECTION = re.compile(r"direction\.([0-9]{1,6})")


def write(path: Path, vectors: PhaseVectors, metadata: Mapping[str, str]) -> None:
    """Write a control vector; ``metadata["model"]`` becomes its model hint.

    Raises:
        ValueError: If there are vectors at other sites than ``post_mlp`` of layer 1 and above, or gguf is missing.
    """
    other = [site.name for site in vectors.sites if site.hook is not HookPoint.POST_MLP or site.layer == 0]
    if other:
        raise ValueError(f"a control vector holds post_mlp of layer 1 and above only, not {', '.join(other[:5])}")
    writer = _gguf().GGUFWriter(path, ARCHITECTURE)
    try:
        writer.add_string(_HINT, metadata.get("model", ""))
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(vectors.sites))
        for key, value in metadata.items():
            if key != "model":
                writer.add_string(_NOTE + key, value)
        for site, row in zip(vectors.sites, vectors.float32(), strict=True):
            writer.add_tensor(f"direction.{site.layer}", np.ascontiguousarray(row))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def read(path: Path) -> tuple[PhaseVectors | None, dict[str, str]]:
    """Read the vectors of a control vector, None if all are zero, and its notes, the model hint as ``"model"``.

    Raises:
        ValueError: If the file is damaged or no control vector, or gguf is missing.
        OSError: If it cannot be read.
    """
    gguf = _gguf()
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"the GGUF file is damaged: {error}") from error
    if fields.get("general.architecture") != ARCHITECTURE:
        raise ValueError(f"expected a GGUF file of {ARCHITECTURE}, got {fields.get('general.architecture')!r}")
    rows = {}
    for tensor in reader.tensors:
        match = _DIRECTION.fullmatch(tensor.name)
        if match is None:
            raise ValueError(f"expected tensors direction.N only, got {tensor.name!r}")
        rows[Site(int(match[1]), HookPoint.POST_MLP)] = _row(tensor, gguf)
    if not rows:
        raise ValueError("there is no tensor direction.N in it")
    metadata = {key.removeprefix(_NOTE): str(text) for key, text in fields.items() if key.startswith(_NOTE)}
    if fields.get(_HINT):
        metadata["model"] = str(fields[_HINT])
    return PhaseVectors.from_rows(rows), metadata


def _row(tensor: Any, gguf: Any) -> np.ndarray[Any, Any]:
    kinds = gguf.GGMLQuantizationType
    data = np.array(tensor.data)  # out of the file's mapping
    if tensor.tensor_type == kinds.BF16:
        data = widen(data.view(np.uint16), "bfloat16")
    elif tensor.tensor_type not in (kinds.F32, kinds.F16):
        raise ValueError(f"{tensor.name} is {tensor.tensor_type.name}; expected F32, F16 or BF16")
    if data.ndim != 1:
        raise ValueError(f"{tensor.name} has the shape {list(data.shape)}, expected [hidden]")
    return data


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError("GGUF files need the package gguf: pip install 'headgate[gguf]'") from error
    return gguf
