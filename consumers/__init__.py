"""Built-in consumers of captured rows, a reader for the files they write, and the contract for consumers of your own.

======================  =============================================================
`filesystem`            safetensors files, shards or raw files
`memory`                rows in RAM, for notebooks and tests
`inline`                small captures in the answer itself
`hidden_states`         the last row of each sample, for ``return_hidden_states``
`logging`               one line per request
`moments`               mean, variance, covariance and norms over all requests
`probe`                 scores of probes for each row
`reward`                a number for each request, from its rows along a direction
`stream`                rows to another process as Arrow over a socket, and its reader
`harvest`               rows of many prompts for training, as files or live
`reader`                ``open_captures(root)``: what `filesystem` wrote, as numpy or torch
`testing`, `feed`       ``ConsumerContract``: the tests that a consumer must pass
======================  =============================================================
"""
