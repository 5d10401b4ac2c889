"""What content becomes between processes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from headgate.steering.programs.wire import content_from_wire, content_to_wire


class Annotated(msgspec.Struct):
    """Content with an array, annotated as most are."""

    row: npt.NDArray[np.float32]


class Bare(msgspec.Struct):
    """The same, annotated without its dtype: that of NumPy 2.5's ``NDArray`` cannot be read from the annotation."""

    row: np.ndarray  # type: ignore[type-arg]


@pytest.mark.parametrize("kind", [Annotated, Bare])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16])
def test_arrays_come_back_as_they_were_however_they_are_annotated(kind: Any, dtype: type[np.generic]) -> None:
    given = kind(np.arange(6).reshape(2, 3).astype(dtype))

    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(content_to_wire(given)))
    found = content_from_wire(kind, sent).row

    assert found.dtype == dtype
    np.testing.assert_array_equal(found, given.row)
