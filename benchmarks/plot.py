"""Two plots as SVG, with nothing but the standard library: bars against marks, and lines on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

OURS, PEER, INK, FAINT = "#0072b2", "#d55e00", "#222222", "#bbbbbb"
Points = Sequence[tuple[float, float]]


def svg(width: int, height: int, parts: Sequence[str], title: str) -> str:
    """Return a picture; it has its own white ground, so that it can be read on dark pages too."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="sans-serif" font-size="12" fill="{INK}">'
    )
    ground = f'<title>{escape(title)}</title><rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, *, anchor: str = "start", more: str = "") -> str:
    """Return words."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    """Return a line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'


def bars(rows: Sequence[tuple[str, float, float]], title: str) -> str:
    """Return a bar for each (label, ratio, at least), with a mark where it should at least be."""
    left, right, top, step = 330, 70, 50, 24
    width, height = 860, top + step * len(rows) + 40
    largest = max([max(ratio, wanted) for _, ratio, wanted in rows] or [1.0]) * 1.05
    scale = (width - left - right) / largest
    parts = [text(16, 24, title, more='font-size="15" font-weight="bold"')]
    parts.append(line(left + scale, top - 6, left + scale, height - 34, FAINT))
    parts.append(text(left + scale, height - 18, "1x", anchor="middle"))
    for number, (label, ratio, wanted) in enumerate(rows):
        y = top + number * step
        parts.append(text(left - 8, y + 13, label, anchor="end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{ratio * scale:.1f}" height="16" fill="{OURS}"/>')
        parts.append(line(left + wanted * scale, y - 3, left + wanted * scale, y + 19, PEER, 'stroke-width="3"'))
        parts.append(text(left + max(ratio, wanted) * scale + 6, y + 13, f"{ratio:.1f}x"))
    parts.append(text(left, height - 4, "bar: measured; orange mark: at least", more='font-size="11"'))
    return svg(width, height, parts, title)


def lines(panels: Sequence[tuple[str, str, Mapping[str, Points]]], title: str) -> str:
    """Return a panel for each (title, unit of x, points by side); both axes are logarithmic, y is CPU seconds."""
    size, gap, top = 300, 90, 90
    width, height = gap + len(panels) * (size + gap), top + size + 60
    parts = [text(16, 24, title, more='font-size="15" font-weight="bold"')]
    for number, (name, unit, series) in enumerate(panels):
        left = gap + number * (size + gap)
        everything = [point for points in series.values() for point in points]
        x_range, y_range = (_range([point[axis] for point in everything]) for axis in (0, 1))

        def place(
            point: tuple[float, float],
            left: float = left,
            x_range: tuple[float, float] = x_range,
            y_range: tuple[float, float] = y_range,
        ) -> tuple[float, float]:
            across = (math.log10(point[0]) - x_range[0]) / (x_range[1] - x_range[0])
            up = (math.log10(point[1]) - y_range[0]) / (y_range[1] - y_range[0])
            return left + across * size, top + (1 - up) * size

        parts.append(text(left, top - 16, name, more='font-weight="bold"'))
        parts.append(f'<rect x="{left}" y="{top}" width="{size}" height="{size}" fill="none" stroke="{FAINT}"/>')
        for value in sorted({point[0] for point in everything}):
            x, _ = place((value, 10 ** y_range[0]))
            parts.append(line(x, top, x, top + size, "#eeeeee"))
            parts.append(text(x, top + size + 18, f"{value:,.0f}", anchor="middle", more='font-size="11"'))
        parts.append(text(left + size / 2, top + size + 40, unit, anchor="middle"))
        for value in _ticks(y_range):
            _, y = place((10 ** x_range[0], value))
            parts.append(line(left, y, left + size, y, "#eeeeee"))
            parts.append(text(left - 6, y + 4, f"{value:g}", anchor="end", more='font-size="11"'))
        for who, points in series.items():
            colour = OURS if who == "ours" else PEER
            placed = [place(point) for point in points]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in placed]
            x, y = placed[-1]
            parts.append(text(x - 8, y - 10, who, anchor="end", more=f'fill="{colour}" font-weight="bold"'))
    parts.append(text(16, 44, "CPU seconds (user + system); both axes logarithmic: parallel to the diagonal is linear"))
    return svg(width, height, parts, title)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.08, 0.06 * (high - low))
    return low - room, high + room


def _ticks(limits: tuple[float, float]) -> list[float]:
    steps = [factor * 10.0**power for power in range(-4, 5) for factor in (1, 2, 5)]
    return [value for value in steps if limits[0] <= math.log10(value) <= limits[1]]
