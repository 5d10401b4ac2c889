"""Random values for the fields of requests: Hypothesis strategies."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from headgate.capture.schema.sites import HOOK_NAMES
from headgate.steering.documents.request import FIELD_DOCS
from tests.fakes.steering_forms import ROW, listed, packed

words = st.sampled_from(
    [
        *HOOK_NAMES,
        *("0", "3", "-1", "29", "30", "vector", "scale", "scales", "data", "dtype", "shape", "layer_indices"),
        *("hooks", "positions", "rows", "name"),
    ]
)
"""Names that mean something somewhere."""

leaves: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    words,
    st.sampled_from([listed(ROW), packed([3]), [576], "float32", "all"]),
)
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)

fields_of_requests = st.dictionaries(
    st.sampled_from([*FIELD_DOCS, "capture", "capture_wait", "capture_messages"]), values, min_size=1, max_size=3
)
