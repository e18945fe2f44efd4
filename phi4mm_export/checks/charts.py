"""Inline SVG for the report: colours and fonts come from the page's style, numbers are rounded to whole tenths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from phi4mm_export.checks.layers import LayerError

WIDTH, HEIGHT = 340, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 34
"""Margins of a plot, for the labels of its axes."""
LEAST_SHOWN = 1e-6
"""Errors at and below this fill nothing of a logarithmic meter; 1 fills it."""
BAR_PITCH = 10


def log_share(value: float | None) -> float:
    """0 for LEAST_SHOWN and less, 1 for 1 and more, logarithmic between."""
    if not value or value <= LEAST_SHOWN:
        return 0.0
    return min(1.0, 1.0 - math.log10(value) / math.log10(LEAST_SHOWN))


def meter(share: float) -> str:
    """A small horizontal bar filled to `share` (0 to 1)."""
    filled = _tenths(100 * max(0.0, min(1.0, share)))
    return (
        '<svg class="meter" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="bed" width="100" height="10"/><rect class="fill" width="{filled}" height="10"/></svg>'
    )


def component_plot(points: Sequence[tuple[str, float, float]]) -> str:
    """Points (name, size as a share of float, relative L2)."""
    right = max([1.0, *(share for _, share, _ in points)])
    top = nice(max([0.0, *(error for _, _, error in points)]))
    parts = [_frame(top, "size", [(0.0, "0 %"), (0.5 / right, "50 %"), (1.0 / right, "100 %")])]
    taken: list[tuple[float, float]] = []
    for name, share, error in sorted(points, key=lambda p: (-p[2], p[1], p[0])):
        x, y = _x(share / right), _y(error / top)
        side = -1 if share / right > 0.6 else 1
        label = min(y, _y(0.0) - 8)
        while any(abs(label - other) < 13 and abs(x - where) < 90 for where, other in taken):
            label -= 13
        taken.append((x, label))
        anchor = "end" if side < 0 else "start"
        parts.append(
            f'<circle class="pt" cx="{_tenths(x)}" cy="{_tenths(y)}" r="5"/>'
            f'<text class="name" x="{_tenths(x + 9 * side)}" y="{_tenths(label + 4)}" text-anchor="{anchor}">'
            f"{escape(name)}</text>"
        )
    return _plot("Size of each component against its relative L2", parts)


def layer_plot(layers: Sequence[LayerError]) -> str:
    """One point a layer: bytes across (logarithmic), the error it makes up."""
    shown = [layer for layer in layers if layer.made is not None and layer.nbytes > 0]
    least = math.floor(math.log10(min((layer.nbytes for layer in shown), default=1)))
    most = max(least + 1, math.ceil(math.log10(max((layer.nbytes for layer in shown), default=10))))
    top = nice(max((layer.made or 0.0 for layer in shown), default=0.0))
    step = max(1, round((most - least) / 4))
    marks = [((power - least) / (most - least), _bytes(power)) for power in range(least, most + 1, step)]
    parts = [_frame(top, "bytes", marks)]
    for layer in shown:
        x, y = _x((math.log10(layer.nbytes) - least) / (most - least)), _y((layer.made or 0.0) / top)
        parts.append(f'<circle class="lp b{layer.bits}" cx="{_tenths(x)}" cy="{_tenths(y)}" r="4"/>')
    return _plot("Bytes of each layer against the error it makes", parts)


def layer_bars(layers: Sequence[LayerError], titles: Sequence[str], top: float) -> str:
    """Made and accumulated error of each layer side by side in one bar, stretched to the width of its place."""
    parts: list[str] = []
    for index, layer in enumerate(layers):
        title = f"<title>{escape(titles[index])}</title>" if titles else ""
        x = index * BAR_PITCH
        bars = ""
        for kind, value, left, width in (("acc", layer.accumulated, 1, 8), ("made", layer.made, 3, 4)):
            height = round(100 * (value or 0.0) / top, 1) if top else 0.0
            place = f'x="{x + left}" y="{_tenths(100 - height)}" width="{width}" height="{_tenths(height)}"'
            bars += f'<rect class="{kind}" {place}/>'
        parts.append(f"<g>{title}{bars}</g>")
    width = max(1, len(layers)) * BAR_PITCH
    return (
        f'<svg viewBox="0 0 {width} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="Error of {len(layers)} layers">{"".join(parts)}</svg>'
    )


def nice(value: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `value`; 1 for nothing."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def _frame(top: float, unit: str, marks: Sequence[tuple[float, str]]) -> str:
    lines: list[str] = []
    for share in (0.0, 0.5, 1.0):
        y = _tenths(_y(share))
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{_tenths(float(y) + 4)}" text-anchor="end">{top * share:.3g}</text>')
    for share, label in marks:
        anchor = "start" if share == 0 else "end" if share >= 1 else "middle"
        lines.append(f'<text x="{_tenths(_x(share))}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{label}</text>')
    middle = _tenths(_x(0.5))
    lines.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{unit}</text>')
    return "".join(lines)


def _plot(label: str, parts: Sequence[str]) -> str:
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)


def _bytes(power: int) -> str:
    unit = ("B", "kB", "MB", "GB", "TB")[power // 3]
    return f"{10 ** (power % 3)} {unit}"


def _tenths(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
