"""One feature of an SAE held at several values, beside the plain request.

Usage: ``.venv/bin/python examples/sae_feature.py MODEL_FOLDER SAE_FOLDER[@SITE] FEATURE [VALUE ...]``

The folder is an SAE as SAELens saves it (``cfg.json`` and ``sae_weights.safetensors``), or of another format that
``headgate sae import`` reads. Name the site, such as ``@12.post_mlp``, if its files do not. 0 switches the feature off;
typical values are a few times those that it has where it is active.
"""

import sys

from headgate.steering import LLM, SamplingParams

PROMPT = "Tell me about your day."

if __name__ == "__main__":  # vLLM starts its engine in a process of its own
    model, sae, feature = sys.argv[1], sys.argv[2], int(sys.argv[3])
    values = [float(value) for value in sys.argv[4:]] or [0.0, 20.0, 60.0]
    # block_size is what vLLM's CPU attention needs; eager starts sooner.
    saes = {"saes": {"sae": sae}}
    llm = LLM(model, steering=saes, max_model_len=1024, block_size=32, enforce_eager=True, dtype="float32")
    about = llm.steering.saes()["sae"]
    print(f"{about.num_features} features at {about.site}, {about.activation}: {about.decision}")

    edits = [{"sae": "sae", "feature": feature, "set": value} for value in values]
    params = [SamplingParams(temperature=0.0, max_tokens=32)]
    params += [SamplingParams(temperature=0.0, max_tokens=32, steering_features=[edit]) for edit in edits]
    outputs = llm.chat([[{"role": "user", "content": PROMPT}]] * len(params), params, use_tqdm=False)
    for label, output in zip(["as it is", *(f"{value:g}" for value in values)], outputs, strict=True):
        print(f"{label:>8}  {output.outputs[0].text!r}")
