"""Sparse autoencoders and transcoders as files: every format is read into one form, from which requests take features.

::

    coder = open_coder(Path("saes/gs2-17.safetensors"))   # imported, or a folder as it was downloaded
    coder.name, coder.format, coder.source_sha256           # "gs2-17", "gemma_scope", 64 hex digits
    coder.read_site, coder.write_sites                      # Site or None; an SAE: (read_site,), a CLT: several
    coder.width, coder.write_width, coder.num_features      # D, O, F
    coder.kind, coder.k, coder.norm                         # CoderKind.JUMPRELU, None, Norm.NONE
    coder.decision                                          # "exact", or for top-k "threshold" or "none"
    rows = coder.rows([3124, 77])                           # FeatureRows, float32: encoder [n, D], decoders [S, n, O],
                                                            # bias, threshold, magnitude_scale, magnitude_bias [n]
    coder.max_activations([3124, 77])                       # float32 [n], or None if the source has no such figures
    coder.encode(x), coder.decode(a, x), coder.delta(x, {3124: 38.5})   # numpy: the definition for kernels

With ``p = norm(x) . encoder`` an activation is ``relu(p * magnitude_scale + magnitude_bias)`` where
``p + bias > threshold``, else 0; a change of activations adds ``gain * change . decoder``. That is exact for every kind
whose `SparseCoder.decision` is ``exact``; see `sparse_coder` for norms and gains. Errors are `FeatureFileError`, and
IndexError for features that do not exist.

* ``tensors``: tensors of safetensors, NPZ and PyTorch files, mapped and never executed.
* ``formats/``: one module for each family of formats; each returns a `source_coder.SourceCoder`.
* ``sparse_coder``: `SparseCoder`, with norms, scales and biases folded in, and the reference for encoding and decoding.
* ``canonical``: our own file, in which each feature's rows are one contiguous read.
* ``importing``: `open_coder`, for every format.
* ``measuring`` and ``check``: figures of a coder on captured rows.
* ``commands``: ``headgate sae``, with the tokens that activate a feature most.
"""
