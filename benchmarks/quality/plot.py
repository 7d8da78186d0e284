"""What forms cost as a picture: rise of perplexity and KL against the bits of a weight, both on scales of powers of ten."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks import pictures

OURS, PLAIN, WITH_MATRIX = "#2a7f62", "#c98a2b", "#4f6db0"
MATRIX = ", imatrix"  # the end of the names of such forms
LEAST_RISE = 0.1  # %; what is less, or below zero within its error, is drawn here


class Form(Protocol):
    """A form against the reference, as judge.py has it."""

    form: str
    bits: float
    rise: float
    rise_error: float
    kl: float
    kl_error: float


def plot(forms: Sequence[Form], path: Path, title: str) -> None:
    """Ours are a line; forms of llama.cpp's are points, with an importance matrix or without."""
    pyplot = pictures.pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 5.0), layout="constrained")
    groups = {
        "everbatch": (OURS, "o-", [each for each in forms if not each.form.startswith("llama.cpp")]),
        "llama.cpp": (PLAIN, "s", [each for each in forms if _is_foreign(each) and not each.form.endswith(MATRIX)]),
        "llama.cpp with an importance matrix": (
            WITH_MATRIX,
            "D",
            [each for each in forms if each.form.endswith(MATRIX)],
        ),
    }
    for name, (colour, style, members) in groups.items():
        members = sorted(members, key=lambda each: each.bits)
        bits = [each.bits for each in members]
        rises = [max(100 * each.rise, LEAST_RISE) for each in members]
        errors = [100 * each.rise_error for each in members]
        _draw(left, bits, rises, errors, colour, style, name)
        _draw(right, bits, [each.kl for each in members], [each.kl_error for each in members], colour, style, name)
        for axes, heights in ((left, rises), (right, [each.kl for each in members])):
            for each, x, y in zip(members, bits, heights):
                _label(axes, each, x, y, colour)
    left.set_ylabel("rise of perplexity, %")
    left.axhline(LEAST_RISE, color="black", linewidth=0.6, linestyle=":")
    right.set_ylabel("KL(float32 || form), nats")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xlabel("bits a weight of the decoder layers, scales included")
        axes.grid(alpha=0.3, which="both")
        axes.margins(x=0.15, y=0.12)
    left.set_ylim(bottom=LEAST_RISE / 2)
    right.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _is_foreign(each: Form) -> bool:
    return each.form.startswith("llama.cpp")


def _draw(
    axes: Any,
    bits: Sequence[float],
    heights: Sequence[float],
    errors: Sequence[float],
    colour: str,
    style: str,
    name: str,
) -> None:
    below = [min(error, 0.9 * height) for error, height in zip(errors, heights)]  # an axis of logarithms has no zero
    axes.errorbar(
        bits,
        heights,
        yerr=(below, errors),
        fmt=style,
        color=colour,
        markersize=5,
        linewidth=1,
        elinewidth=0.8,
        label=name,
    )


def _label(axes: Any, each: Form, x: float, y: float, colour: str) -> None:
    """Ours on the left, choices lower; llama.cpp's above their points, and on the right those with a matrix."""
    text = each.form.removeprefix("llama.cpp ").removesuffix(MATRIX)
    place, side = (-7.0, -12.0 if text.startswith("auto") else -5.0), "right"
    if each.form.endswith(MATRIX):
        place, side = (7.0, -3.0), "left"
    elif _is_foreign(each):
        place, side = (0.0, 6.0), "center"
    axes.annotate(text, (x, y), xytext=place, textcoords="offset points", ha=side, fontsize=7, color=colour)
