"""Built-in consumers of captured rows, a reader for the files they write, and the contract for consumers of your own.

======================  =============================================================
`filesystem`            safetensors files, shards or raw files
`memory`                rows in RAM, for notebooks and tests
`logging`               one line per request
`reader`                ``open_captures(root)``: what `filesystem` wrote, as numpy or torch
`testing`, `feed`       ``ConsumerContract``: the tests that a consumer must pass
======================  =============================================================
"""
