"""Renders passages of held-out text, each token coloured by the layer that predicted the next one.

The text is escaped; its blanks and newlines are kept.
"""

from collections.abc import Sequence

from tide_export.calibration.assessment import Example
from tide_export.report.theme import DARK, LIGHT, Theme, text_on
from tide_export.report.wording import escaped, made_visible


def colours_css(checkpoints: int) -> str:
    """Returns style rules for the classes c0, c1, ... of the checkpoints, in both looks."""

    def rules(theme: Theme) -> str:
        colours = enumerate(theme.checkpoints(checkpoints))
        return " ".join(f".c{k} {{ background: {c}; color: {text_on(c)}; }}" for k, c in colours)

    return f"{rules(LIGHT)}\n@media (prefers-color-scheme: dark) {{ {rules(DARK)} }}\n"


def legend(checkpoints: Sequence[int], depth: int) -> str:
    """Returns the legend of the colours and the mark as HTML."""
    parts = [f'<span class="c{k}">{layers} layers</span>' for k, layers in enumerate(checkpoints)]
    parts.append(f'<span class="full">all {depth} layers</span>')
    parts.append('<span class="wrong">not the full model\'s choice</span>')
    return f'<p class="legend">{"".join(parts)}</p>'


def passage(example: Example, checkpoints: Sequence[int], depth: int) -> str:
    """Returns one passage as HTML."""
    tokens = zip(example.pieces, example.predicted, example.exit_layers, example.unchanged, strict=True)
    parts = [_token(*token, checkpoints, depth) for token in tokens]
    return f'<div class="passage">{"".join(parts)}</div>'


def _token(piece: str, predicted: str, layers: int, unchanged: bool, checkpoints: Sequence[int], depth: int) -> str:
    exited = layers in checkpoints
    classes = [f"c{checkpoints.index(layers)}" if exited else "full"]
    if not unchanged:
        classes.append("wrong")
    if piece.startswith("\n"):
        classes.append("br")  # an empty line would show no colour
    where = f"layer {layers} of {depth}" if exited else f"all {depth} layers"
    whose = "the full model's choice" if unchanged else "not the full model's choice"
    title = escaped(f"next: {made_visible(predicted)} from {where}, {whose}")
    return f'<span class="{" ".join(classes)}" title="{title}">{escaped(piece)}</span>'
