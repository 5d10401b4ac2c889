"""The names that other tools give to places in a model, as sites.

TransformerLens has ``blocks.12.hook_resid_post``, Hugging Face ``model.layers.12.output``, sparsify ``layers.12.mlp``.
"""

from __future__ import annotations

import re

from headgate.capture.schema.sites import HookPoint, Site
from headgate.steering.features.tensors import FeatureFileError

_NAMES: dict[str, HookPoint] = {  # in addition to the names that `Site.parse` reads
    "ln1.hook_in": HookPoint.PRE_ATTN,
    "input": HookPoint.PRE_ATTN,
    "attn.hook_in": HookPoint.ATTN_IN,
    "ln2.hook_in": HookPoint.POST_ATTN,
    "mlp.hook_in": HookPoint.MLP_IN,
    "pre_feedforward_layernorm.output": HookPoint.MLP_IN,
    "mlp.hook_out": HookPoint.MLP_OUT,
    "mlp": HookPoint.MLP_OUT,
    "mlp.output": HookPoint.MLP_OUT,
    "post_feedforward_layernorm.output": HookPoint.MLP_OUT,
    "": HookPoint.POST_MLP,
    "output": HookPoint.POST_MLP,
}
_PATTERN = re.compile(r"(?:blocks|model\.layers|model\.language_model\.layers|layers)\.(\d+)(?:\.(.+))?")
_EMBEDDING = ("hook_embed", "blocks.0.hook_embed", "embed_tokens", "model.embed_tokens.output")
_REFUSED = {
    "hook_mlp_in": "before the MLP's norm in TransformerLens and behind it in Gemma Scope 2's entries of SAELens; name "
    "the site: --site LAYER.post_attn (before the norm) or LAYER.mlp_in (behind it)",
    "hook_attn_in": "before the attention's norm; name the site: --site LAYER.pre_attn",
    "ln1.hook_normalized": "the norm's output before its gain, which no hook point has, and attn_in is another value",
    "ln2.hook_normalized": "the norm's output before its gain, which no hook point has, and mlp_in is another value; "
    "of transcoders of Gemma Scope 1 and circuit-tracer give the model's folder, which has the gain: --model FOLDER",
    "post_attention_layernorm.output": "the attention's branch in Gemma and the MLP's input in Llama; name the site: "
    "--site LAYER.attn_out or LAYER.mlp_in",
}


def site_of(hook: str, where: str) -> Site:
    """Return the site that another tool's name stands for.

    Args:
        hook: The name.
        where: The file that says so, for errors.

    Raises:
        FeatureFileError: If there is no such site here; the message gives the reason.
    """
    if hook in _EMBEDDING:
        return Site(0, HookPoint.PRE_ATTN)
    try:
        return Site.parse(hook)
    except ValueError:
        found = _PATTERN.fullmatch(hook)
    rest = (found[2] or "") if found else ""
    if found and rest in _REFUSED:
        raise FeatureFileError(f"{where}: the SAE is of {hook!r}: {_REFUSED[rest]}")
    point = _NAMES.get(rest) if found else None
    if found is None or point is None:
        raise FeatureFileError(f"{where}: the SAE is of {hook!r}, which is no known place; name it: --site LAYER.HOOK")
    return Site(int(found[1]), point)
