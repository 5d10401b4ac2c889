"""Random weights on the disk: ``python weights.py FOLDER OUT`` makes a model of the configuration in FOLDER.

vLLM's dummy weights will not do where a model is cut over GPUs: each rank fills its own shards, and what comes of it is
another model. Written from the GPU if there is one; 8 GB, and about 20 s, for Gemma-3-4B.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def write_weights(source: Path, target: Path) -> None:
    """Write the model that `source` configures, with random weights in bfloat16 and norms that are not alike."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(source)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(target)
    for path in source.glob("*token*.json"):
        shutil.copy(path, target)


if __name__ == "__main__":
    write_weights(Path(sys.argv[1]), Path(sys.argv[2]))
