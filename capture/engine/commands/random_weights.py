"""Random weights in files: ``python -m headgate.capture.engine.commands.random_weights MODEL OUT``.

vLLM's dummy weights are so small that the layers hardly move Llama's stream: rows of all layers are alike, and a wrong
one would not show. Where a model is cut over GPUs, each rank fills its own shards with them, and what comes of it is
another model. Files have neither fault. Written from the GPU if there is one; 8 GB, and about 20 s, for Gemma-3-4B.
"""

from __future__ import annotations

import sys
from pathlib import Path


def write_weights(source: str, target: Path) -> None:
    """Write the text model that `source` configures, with random weights in bfloat16 and norms that are not alike.

    Args:
        source: A folder, or a name on the Hugging Face Hub.
        target: The folder that is made.
    """
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
    try:
        transformers.AutoTokenizer.from_pretrained(source).save_pretrained(target)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"no tokenizer of {source} was copied, start vLLM with --skip-tokenizer-init: {error}\n")


if __name__ == "__main__":
    write_weights(sys.argv[1], Path(sys.argv[2]))
