"""Export to the folder of cached activations that SAELens reads (``use_cached_activations=True``)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headgate.capture.schema.sites import Site
from headgate.consumers.datasets.view import RowView, typed

_HOOKS = {
    "pre_attn": "hook_resid_pre",
    "post_attn": "hook_resid_mid",
    "post_mlp": "hook_resid_post",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
}


def hook_name(site: str) -> str:
    """TransformerLens' name of a site: ``blocks.12.hook_resid_post`` for ``12.post_mlp``.

    Raises:
        ValueError: If it has none with the same values.
    """
    parsed = Site.parse(site)
    if parsed.hook.value not in _HOOKS:
        raise ValueError(f"{site}: TransformerLens has no hook with these values; known: {', '.join(_HOOKS)}")
    return f"blocks.{parsed.layer}.{_HOOKS[parsed.hook.value]}"


def export_saelens(view: RowView, folder: Path, *, context_size: int) -> dict[str, Any]:
    """Write a data set of ``datasets``: float32 ``{hook_name}`` ``[context_size, hidden]``, and ``token_ids``.

    The rows of all requests, one after the other, are cut into contexts, as SAELens does with texts; rows at the end
    that do not fill one are left out and counted in the manifest. Needs the package ``datasets``.

    Args:
        view: The rows.
        folder: Where; an empty folder.
        context_size: Rows in a context; SAELens wants the same number in its configuration.

    Raises:
        ValueError: If the rows do not fill one context.
    """
    from datasets import Array2D, Dataset, Features, Sequence, Value

    num_contexts = len(view) // context_size
    if not num_contexts:
        raise ValueError(f"{len(view)} rows do not fill a context of {context_size}; give a smaller context_size")
    names = {site: hook_name(site) for site in view.sites}
    features: dict[str, Any] = {
        name: Array2D(shape=(context_size, view.hidden_size), dtype="float32") for name in names.values()
    }
    features["token_ids"] = Sequence(Value("int32"), length=context_size)
    cache = folder / ".cache"
    made = Dataset.from_generator(
        _contexts,
        features=Features(features),
        gen_kwargs={"view": view, "names": names, "context_size": context_size, "num_contexts": num_contexts},
        cache_dir=str(cache),
        writer_batch_size=max(1, (64 << 20) // (context_size * view.hidden_size * 4 * len(names))),
    )
    made.save_to_disk(str(folder))
    made.cleanup_cache_files()
    shutil.rmtree(cache)
    return {
        "format": "saelens",
        "rows": num_contexts * context_size,
        "left_out_rows": len(view) - num_contexts * context_size,
        "context_size": context_size,
    }


def _contexts(view: RowView, names: dict[str, str], context_size: int, num_contexts: int) -> Iterator[dict[str, Any]]:
    for number in range(num_contexts):
        start, stop = number * context_size, (number + 1) * context_size
        rows = view.read(start, stop)
        example: dict[str, Any] = {
            name: typed(rows[site], view.dtype).astype(np.float32, copy=False) for site, name in names.items()
        }
        yield example | {"token_ids": view.token_ids(np.arange(start, stop, dtype=np.int64)).astype(np.int32)}
