"""Model folders to measure on: real architectures and sizes, random weights, no download.

``python -m tests.benchmarks.models FOLDER [NAME ...]`` writes them; serve them with ``load_format="dummy"``. Speed does
not depend on what the weights are, so an overhead measured here is that of the real model. The tokenizer is a list of
words (``w0``, ``w1``, ...): send token ids, or words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def _sized(base: Mapping[str, Any], hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int) -> Any:
    return {
        **base,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
    }


MODELS: Mapping[str, Mapping[str, Any]] = {
    "gemma3-4b": {**_sized(_GEMMA3, 2560, 10240, 34, 8, 4, 256), "query_pre_attn_scalar": 256},
    "gemma3-27b": {**_sized(_GEMMA3, 5376, 21504, 62, 32, 16, 128), "query_pre_attn_scalar": 168},
    "llama3-8b": _sized(_LLAMA3, 4096, 14336, 32, 32, 8, 128),
    "llama3-8b-eagle3": _sized(_LLAMA3, 4096, 14336, 1, 32, 8, 128),
    "qwen3-30b-a3b": {**_sized(_QWEN3_MOE, 2048, 6144, 48, 32, 4, 128), "moe_intermediate_size": 768},
    "tiny": {**_sized(_GEMMA3, 128, 256, 6, 4, 2, 32), "query_pre_attn_scalar": 32, "vocab_size": 4096},
}
"""Name -> ``config.json``. ``llama3-8b-eagle3`` drafts for ``llama3-8b``, under the method ``eagle3``; ``tiny`` is for
trying the benchmarks themselves, on any machine."""


class ModelSize(NamedTuple):
    """What vectors for a model must be like.

    Attributes:
        num_layers: Decoder layers.
        hidden: Hidden size.
        vocabulary: Token ids are below it.
    """

    num_layers: int
    hidden: int
    vocabulary: int

    @property
    def four_layers(self) -> list[int]:
        """Four layers, evenly spread."""
        return sorted({self.num_layers * part // 8 for part in (1, 3, 5, 7)})


def size_of(folder: str | Path) -> ModelSize:
    """The size of the model in `folder`, from its ``config.json``."""
    config = json.loads((Path(folder) / "config.json").read_text())
    config = config.get("text_config", config)
    return ModelSize(config["num_hidden_layers"], config["hidden_size"], config["vocab_size"])


def write_model(name: str, folder: Path, **changes: Any) -> None:
    """Write the configuration of one of `MODELS`, with `changes`, and its tokenizer into `folder`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    config = {**MODELS[name], **special, "dtype": "bfloat16", "torch_dtype": "bfloat16", **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "bos_token_id": 2}))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"), pretty=False)
    tokens = {"eos_token": "w1", "bos_token": "w2", "pad_token": "w0", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **tokens}))


def main() -> None:
    """Write the models that are named, or all."""
    root, *names = sys.argv[1:]
    for name in names or MODELS:
        write_model(name, Path(root) / name)
        print(Path(root) / name)


if __name__ == "__main__":
    main()
