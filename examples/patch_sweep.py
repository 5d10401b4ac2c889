"""Activation patching: where in a model is the fact that the Eiffel Tower stands in Paris?

The rows of a prompt about the Eiffel Tower are put, one site and position at a time, into the same prompt about the
Colosseum. Where the answer turns from Rome to Paris, the fact is stored or passes by.

Usage, beside a server:
``headgate serve MODEL --block-size 32 --capture-consumers memory --capture-sites '{"post_mlp": "all"}'
--enable-steering --steering-op-sites '{"post_mlp": "all"}'``, then
``.venv/bin/python examples/patch_sweep.py [http://localhost:8000 [heatmap.png]]``. ``HEADGATE_KEY`` is sent as a key.
"""

import os
import sys

from headgate.steering.client import Client

CLEAN = "The Eiffel Tower is in the city of"
CORRUPT = "The Colosseum is in the city of"


def main(url: str = "http://localhost:8000", picture: str | None = None) -> None:
    with Client(url, capture_key=os.environ.get("HEADGATE_KEY")) as client:
        sweep = client.patch_sweep(CLEAN, CORRUPT, " Paris", foil=" Rome")
    grid = sweep.grid
    print(f"logit of Paris less that of Rome: clean {grid.clean:+.2f}, corrupted {grid.corrupt:+.2f}")
    print(sweep.text())
    for position, token, column in zip(grid.positions, grid.tokens, sweep.values.T, strict=True):
        best = int(column.argmax())
        print(f"position {position:2} {token!r:10} recovers most at {grid.sites[best]:11}: {column[best]:6.1%}")
    if picture is not None:
        sweep.plot().savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
