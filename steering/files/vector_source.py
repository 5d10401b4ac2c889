"""Which vectors of which file: a path, and how to read it where the file does not tell by itself."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

MAX_LAYERS = 4096
"""Layers of a model that a file is read for, at most."""

_PAIR = r"(?:(?:format|layer|concept|hook)=[^@,=/]*|tensor=[^@,=]*)"
_OPTIONS = re.compile(rf"(?s:(.+))@({_PAIR}(?:,{_PAIR})*)")


class VectorSource(NamedTuple):
    """A file of vectors, as a caller or a configuration names it.

    Attributes:
        path: The file.
        format: The name of its format; None to recognise it by the file's name and content.
        layer: The layer of the site that the vector acts at, of a file that does not tell it; of a file with a vector
            for each layer, the one to take. None takes them all.
        concept: The number of the vector in a file of several for one site, or in a tensor of several.
        tensor: The name of the tensor to take, of a file whose names of tensors headgate does not know.
        hook: Of such a tensor, the hook point that it acts at; None stands for ``post_mlp``, the layer's output.
    """

    path: Path
    format: str | None = None
    layer: int | None = None
    concept: int | None = None
    tensor: str | None = None
    hook: str | None = None

    @classmethod
    def parse(
        cls,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        layer: int | None = None,
        concept: int | None = None,
        tensor: str | None = None,
        hook: str | None = None,
    ) -> VectorSource:
        """Read ``PATH`` or ``PATH@KEY=VALUE,...``, whose keys are the arguments below.

        Args:
            path: The text or path; one that is there as it stands, with its ``@``, is taken so.
            format: As the key; like the others, not to be given twice.
            layer: As the key.
            concept: As the key.
            tensor: As the key; here it may hold ``@``, ``,`` and ``=``, too.
            hook: As the key.

        Raises:
            ValueError: If a value is no number of its kind, or a key is given twice.
        """
        given: dict[str, Any] = {"format": format, "layer": layer, "concept": concept, "tensor": tensor, "hook": hook}
        text = os.fspath(path)
        found = _OPTIONS.fullmatch(text)
        if found is not None and not Path(text).exists():
            text = found[1]
            for pair in found[2].split(","):
                key, _, value = pair.partition("=")
                if given[key] is not None:
                    raise ValueError(f"{key} is given twice, as {given[key]} and as {value}")
                given[key] = value if key in ("format", "tensor", "hook") else _number(key, value)
        for key in ("layer", "concept"):
            _check(key, given[key])
        return cls(Path(text), **given)


def _number(key: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal():
        raise ValueError(f"@{key}={value}: expected a whole number from 0")
    return int(value)


def _check(key: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key}: expected a whole number from 0, got {value!r}")
    if key == "layer" and value >= MAX_LAYERS:
        raise ValueError(f"layer {value}: a file counts layers from 0, and to {MAX_LAYERS - 1} at most")
