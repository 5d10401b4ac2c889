"""Files of SAEs as their producers write them, with the activations that the producers' own classes compute.

``make test-producers`` runs it where there are sae-lens, dictionary_learning, eai-sparsify and circuit-tracer; it does
not import headgate. It writes one folder for each SAE: its files, and
``expected.safetensors`` with ``rows`` ``[n, D]``, ``activations`` ``[n, F]`` and ``decoded`` ``[n, O]``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WIDTH, FEATURES, NUM_ROWS, K = 8, 24, 6, 4
NORMS = ("none", "layer_norm", "constant_norm_rescale")


def randomize(module: Any) -> Any:
    """Give every parameter of a module random values; thresholds positive ones."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = 0.4 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values.abs() if "threshold" in name and "log" not in name else values)
    return module


def record(folder: Path, coder: Any, activations: torch.Tensor, decoded: torch.Tensor, rows: torch.Tensor) -> None:
    """Write what is expected beside the files of a coder."""
    tensors = {"rows": rows, "activations": activations, "decoded": decoded}
    save_file(
        {name: values.detach().float().contiguous() for name, values in tensors.items()},
        folder / "expected.safetensors",
    )
    print(folder.name, type(coder).__name__)


def some_rows() -> torch.Tensor:
    """Rows that are not centred."""
    return 0.3 + torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def saelens(root: Path) -> None:
    """SAEs and transcoders of SAELens, each kind with each norm, as `save_model` writes them."""
    for name, coder in saelens_coders():
        folder = root / f"saelens-{name}"
        randomize(coder)
        if name == "topk-rescaled":
            coder.fold_W_dec_norm()
            coder.cfg.rescale_acts_by_decoder_norm = True  # as training leaves it in the files
        coder.cfg.metadata.hook_name = "blocks.3.mlp.hook_in" if "transcoder" in name else "blocks.3.hook_resid_post"
        coder.cfg.metadata.model_name = "gpt2"
        if "transcoder" in name:
            coder.cfg.metadata.hook_name_out = "blocks.3.hook_mlp_out"
        coder.save_model(folder)
        from sae_lens import SAE

        loaded, rows = SAE.load_from_disk(folder), some_rows()
        with torch.no_grad():
            activations = loaded.encode(rows)
            decoded = loaded.decode(activations)
            if "skip" in name:
                decoded = loaded(rows)
        record(folder, loaded, activations, decoded, rows)


def saelens_coders() -> Iterator[tuple[str, Any]]:
    """Names and coders with parameters that are not yet random."""
    from sae_lens.saes import gated_sae, jumprelu_sae, standard_sae, topk_sae, transcoder

    kinds = {
        "standard": (standard_sae.StandardSAE, standard_sae.StandardSAEConfig, {}),
        "jumprelu": (jumprelu_sae.JumpReLUSAE, jumprelu_sae.JumpReLUSAEConfig, {}),
        "gated": (gated_sae.GatedSAE, gated_sae.GatedSAEConfig, {}),
        "topk": (topk_sae.TopKSAE, topk_sae.TopKSAEConfig, {"k": K}),
    }
    for kind, (make, config, extra) in kinds.items():
        for norm in NORMS:
            for subtracts in (False, True):
                settings = {"d_in": WIDTH, "d_sae": FEATURES, "normalize_activations": norm, **extra}
                name = f"{kind}-{norm}" + ("-subtracts" if subtracts else "")
                yield name, make(config(**settings, apply_b_dec_to_input=subtracts))
    settings = {"d_in": WIDTH, "d_sae": FEATURES}
    rescaled = topk_sae.TopKSAEConfig(**settings, k=K, rescale_acts_by_decoder_norm=True)
    yield "topk-rescaled", topk_sae.TopKSAE(rescaled)
    settings |= {"d_out": WIDTH, "apply_b_dec_to_input": False}
    yield "transcoder", transcoder.Transcoder(transcoder.TranscoderConfig(**settings))
    yield "skip_transcoder", transcoder.SkipTranscoder(transcoder.SkipTranscoderConfig(**settings))
    yield "jumprelu_transcoder", transcoder.JumpReLUTranscoder(transcoder.JumpReLUTranscoderConfig(**settings))


def saelens_trained(root: Path) -> None:
    """Batch top-k SAEs, which SAELens saves for inference as JumpReLU."""
    from sae_lens import SAE
    from sae_lens.saes import batchtopk_sae, matryoshka_batchtopk_sae

    settings = {"d_in": WIDTH, "d_sae": FEATURES, "k": K}
    batch = batchtopk_sae.BatchTopKTrainingSAE(batchtopk_sae.BatchTopKTrainingSAEConfig(**settings))
    config = matryoshka_batchtopk_sae.MatryoshkaBatchTopKTrainingSAEConfig(**settings, matryoshka_widths=[8, FEATURES])
    matryoshka = matryoshka_batchtopk_sae.MatryoshkaBatchTopKTrainingSAE(config)
    for name, coder in (("batchtopk", batch), ("matryoshka", matryoshka)):
        folder = root / f"saelens-{name}"
        randomize(coder)
        coder.topk_threshold.fill_(0.4)
        coder.cfg.metadata.hook_name = "blocks.3.hook_resid_post"
        coder.save_inference_model(folder)
        loaded, rows = SAE.load_from_disk(folder), some_rows()
        with torch.no_grad():
            activations = loaded.encode(rows)
            record(folder, loaded, activations, loaded.decode(activations), rows)


def dictionary_learning(root: Path) -> None:
    """Each class, as its trainer writes it and as `load_dictionary` loads it."""
    from dictionary_learning import dictionary
    from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
    from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKSAE
    from dictionary_learning.trainers.top_k import AutoEncoderTopK
    from dictionary_learning.utils import load_dictionary

    size = (WIDTH, FEATURES)
    coders = (
        *(dictionary.AutoEncoder(*size), dictionary.AutoEncoderNew(*size), dictionary.GatedAutoEncoder(*size)),
        *(dictionary.JumpReluAutoEncoder(*size), AutoEncoderTopK(*size, K), BatchTopKSAE(*size, K)),
        MatryoshkaBatchTopKSAE(*size, K, [8, FEATURES - 8]),
    )
    for coder in map(randomize, coders):
        name = type(coder).__name__
        if name in ("AutoEncoderTopK", "BatchTopKSAE", "MatryoshkaBatchTopKSAE"):
            coder.threshold.fill_(0.4)
        folder = root / f"dictionary_learning-{name}" / "resid_post_layer_3"
        folder.mkdir(parents=True)
        torch.save(coder.state_dict(), folder / "ae.pt")
        trainer = {
            "dict_class": name,
            "activation_dim": WIDTH,
            "dict_size": FEATURES,
            "k": K,
            "layer": 3,
            "lm_name": "m",
        }
        (folder / "config.json").write_text(json.dumps({"trainer": trainer, "buffer": {"ctx_len": 128}}))
        (loaded, _), rows = load_dictionary(str(folder), "cpu"), some_rows()
        with torch.no_grad():
            activations = loaded.encode(rows)
            record(folder, loaded, activations, loaded.decode(activations), rows)


def sparsify(root: Path) -> None:
    """Top-k and groupmax, and a transcoder with a skip connection, as `save_to_disk` writes them."""
    from sparsify import SparseCoder, SparseCoderConfig

    for name, module, extra in (
        ("topk", "layers.3", {}),
        ("groupmax", "layers.3", {"activation": "groupmax"}),
        ("transcoder", "layers.3.mlp", {"transcode": True, "skip_connection": True}),
    ):
        folder = root / f"sparsify-{name}" / module
        config = SparseCoderConfig(expansion_factor=FEATURES // WIDTH, k=K, **extra)
        randomize(SparseCoder(WIDTH, config)).save_to_disk(folder)
        loaded, rows = SparseCoder.load_from_disk(folder), some_rows()
        with torch.no_grad():
            found = loaded.encode(rows)
            activations = torch.zeros(NUM_ROWS, FEATURES).scatter(1, found.top_indices, found.top_acts)
            record(folder, loaded, activations, loaded(rows).sae_out, rows)


def circuit_tracer(root: Path) -> None:
    """A transcoder of one layer with a skip connection, and one of five layers, as `to_safetensors` writes them."""
    from circuit_tracer.transcoder.activation_functions import JumpReLU
    from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
    from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder, load_relu_transcoder

    layer, num_layers, rows = 3, 5, some_rows()
    hooks = "feature_input_hook: mlp.hook_in\nfeature_output_hook: hook_mlp_out\n"
    for name, activation in (("relu", torch.nn.functional.relu), ("jumprelu", JumpReLU(torch.zeros(FEATURES)))):
        folder = root / f"circuit_tracer-{name}"
        folder.mkdir(parents=True)
        settings = {"skip_connection": True, "device": torch.device("cpu"), "dtype": torch.float32}
        coder = SingleLayerTranscoder(WIDTH, FEATURES, activation, layer, **settings)
        randomize(coder).to_safetensors(str(folder / f"layer_{layer}.safetensors"))
        (folder / "config.yaml").write_text("model_kind: transcoder_set\n" + hooks)
        loaded = load_relu_transcoder(str(folder / f"layer_{layer}.safetensors"), layer, torch.device("cpu"))
        with torch.no_grad():
            activations = loaded.encode(rows)
            record(folder, loaded, activations, loaded.decode(activations, rows), rows)
    folder = root / "circuit_tracer-clt"
    settings = {"activation_function": "jump_relu", "lazy_decoder": False}
    coder = CrossLayerTranscoder(
        num_layers, FEATURES, WIDTH, device=torch.device("cpu"), dtype=torch.float32, **settings
    )
    randomize(coder).to_safetensors(str(folder))
    (folder / "config.yaml").write_text("model_kind: cross_layer_transcoder\n" + hooks)
    with torch.no_grad():
        activations = coder.encode(rows.expand(num_layers, -1, -1))
        alone = torch.zeros_like(activations)
        alone[layer] = activations[layer]
        record(folder, coder, activations[layer], coder.decode(alone)[layer], rows)


def main() -> None:
    """Write the folders anew: ``record.py FOLDER [PRODUCER...]``."""
    root, *wanted = sys.argv[1:]
    producers = {"saelens": saelens, "saelens_trained": saelens_trained}
    producers |= {"dictionary_learning": dictionary_learning, "sparsify": sparsify, "circuit_tracer": circuit_tracer}
    for old in [] if wanted else Path(root).glob("*-*"):
        shutil.rmtree(old)
    for name in wanted or producers:
        producers[name](Path(root))


if __name__ == "__main__":
    main()
