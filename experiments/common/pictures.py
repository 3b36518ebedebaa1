"""Figures as files."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


def write(figure: Figure, path: Path) -> None:
    """Write `figure` as SVG and PNG beside each other, without a date, and close it."""
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"), dpi=150)
    plt.close(figure)
