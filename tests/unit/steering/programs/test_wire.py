"""What content becomes between processes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from headgate.steering.programs.wire import content_from_wire, content_to_wire


class Scalars(msgspec.Struct):
    """Content with numbers and a name, which callers in Python may bring as NumPy's."""

    count: int
    share: float
    name: str
    row: npt.NDArray[np.float32]


def sent(content: object) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(content_to_wire(content)))


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

    found = content_from_wire(kind, sent(given)).row

    assert found.dtype == dtype
    np.testing.assert_array_equal(found, given.row)


def test_numpys_scalars_are_values_and_no_arrays() -> None:
    given = Scalars(np.int64(7), np.float64(0.25), np.str_("anger"), np.ones(2, np.float32))  # type: ignore[arg-type]

    found = content_from_wire(Scalars, sent(given))

    assert (found.count, found.share, found.name) == (7, 0.25, "anger")
    np.testing.assert_array_equal(found.row, given.row)


def test_what_is_no_content_is_not_written() -> None:
    with pytest.raises(NotImplementedError, match="unknown type: object"):
        content_to_wire([object()])


@pytest.mark.parametrize("index", [-1, 1])
def test_an_array_that_was_not_sent_is_refused(index: int) -> None:
    wire = {**sent(Annotated(np.ones(2, np.float32))), "content": {"row": index}}

    with pytest.raises(msgspec.ValidationError, match="array"):
        content_from_wire(Annotated, wire)
