"""The training curves as SVG, for a page that may be light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from truetap.pipeline.run_records import Metric

# Stand-ins that matplotlib draws with and that are then replaced by the page's own variables. None
# is black, which matplotlib leaves out of its SVG.
_INK, _RULE = "#010203", "#010204"
_SERIES = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216")
_VARIABLES = {
    _INK: "var(--soft)",
    _RULE: "var(--rule)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(_SERIES, start=1)},
}
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "truetap",  # without one, ids are random
    "font.size": 9,
    "axes.titlesize": 9,
    "text.color": _INK,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _RULE,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
_LOOKS: dict[str, dict[str, Any]] = {
    "step": {"alpha": 0.45, "linewidth": 1.0},
    "validation": {"marker": "o", "markersize": 3.5, "linewidth": 1.8},
}


def training_curves(metrics: Sequence[Metric]) -> Markup | None:
    """Draw loss and accuracy over the training step; None if matplotlib is not installed.

    Training is faint, validation dotted. The same metrics give the same text.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError:
        return None
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=(6, 5.4), layout="constrained")
        loss, accuracy = figure.subplots(2, sharex=True)
        for kind, look in _LOOKS.items():
            rows = [row for row in metrics if row.kind == kind]
            steps = [row.step for row in rows]
            loss.plot(steps, [row.loss for row in rows], color=_SERIES[0], **look)
            by_draft_step = zip(*(row.accuracy for row in rows), strict=True)
            for number, shares in enumerate(by_draft_step):
                colour = _SERIES[number % len(_SERIES)]
                label = f"draft step {number + 1}" if kind == "step" else None
                accuracy.plot(steps, shares, color=colour, label=label, **look)
        loss.set_title("Loss")
        accuracy.set_title("Accuracy")
        accuracy.set_xlabel("training step")
        accuracy.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        accuracy.legend(
            loc="upper left", labelcolor="linecolor", handlelength=0, frameon=False, ncols=3
        )
        for axes in (loss, accuracy):
            axes.set_ylim(bottom=0)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
    return Markup(_inline(drawn.getvalue()))


def _inline(svg: str) -> str:
    """Take an SVG file's element, with the page's colours and with no address in it."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg
