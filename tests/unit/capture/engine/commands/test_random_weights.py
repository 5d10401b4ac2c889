"""Random weights in files: a model of the configuration that it was asked for, whose norms are not alike."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from headgate.capture.engine.commands.verify import RANDOM_WEIGHTS
from tests.fresh_python import run_python

CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16},
    **{"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
}


def test_the_model_is_written_as_configured(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))

    done = run_python(["-m", RANDOM_WEIGHTS, str(source), str(target)], environment={}, may_fork=True)

    assert done.returncode == 0, done.stderr
    assert "no tokenizer" in done.stderr
    weights = load_file(target / "model.safetensors")
    written = json.loads((target / "config.json").read_text())
    assert {name: written[name] for name in CONFIG} == CONFIG
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (16, 32)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    norms = [weight for weight in weights.values() if weight.ndim == 1]
    assert len(norms) == 5
    assert all(norm.unique().numel() > 1 for norm in norms)
    assert not torch.equal(norms[0], norms[1])
