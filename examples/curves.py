"""A picture of what ``train_sae.py`` or ``reward.py`` printed.

Usage: ``.venv/bin/python examples/curves.py LOG PNG``, behind ``.venv/bin/python examples/train_sae.py ... | tee LOG``
"""

import re
import sys
from pathlib import Path

import matplotlib.pyplot as plt

SAE = re.compile(r"^ *([\d,]+) rows: ([\d.]+) unexplained, (\d+) active", re.MULTILINE)
REWARD = re.compile(r"^step (\d+): mean reward ([+-][\d.]+)", re.MULTILINE)


def draw(text: str, path: str) -> None:
    """Curves of an SAE, or of rewards, as a PNG.

    Raises:
        ValueError: If the text has neither.
    """
    figure, axes = plt.subplots(figsize=(7, 3))
    if found := SAE.findall(text):
        rows = [int(seen.replace(",", "")) for seen, _, _ in found]
        axes.plot(rows, [float(part) for _, part, _ in found], color="tab:blue")
        axes.set(xlabel="rows", ylabel="part of the variance unexplained", ylim=(0, 1))
        active = axes.twinx()
        active.plot(rows, [int(number) for _, _, number in found], color="tab:orange")
        active.set(ylabel="active features of a row (orange)", ylim=(0, None))
    elif steps := REWARD.findall(text):
        axes.plot([int(step) for step, _ in steps], [float(reward) for _, reward in steps], marker=".")
        axes.set(xlabel="step", ylabel="mean reward")
    else:
        raise ValueError("no line of train_sae.py or reward.py in the text")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]).read_text(encoding="utf-8"), sys.argv[2])
