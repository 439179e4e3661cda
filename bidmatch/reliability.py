"""The reliability plot of a bundle's calibration: one page of HTML that needs nothing else."""

from __future__ import annotations

from html import escape

from export.bundle.format import Manifest
from export.bundle.relevance import CalibrationRecord

_SIDE = 360
_MARGIN = 46

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>bidmatch calibration of bundle {bundle}</title>
<style>
  :root {{ color-scheme: light; font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; }}
  body {{ max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
  h1 {{ font-size: 1.5rem; }}
  .plots {{ display: flex; flex-wrap: wrap; gap: 1.5rem; }}
  figure {{ margin: 0; }} svg {{ max-width: 100%; height: auto; }}
  svg text {{ font: 12px system-ui, sans-serif; fill: #1c2430; }}
  .axis {{ stroke: #8a94a3; fill: none; }} .even {{ stroke: #8a94a3; stroke-dasharray: 4 4; }}
  .line {{ stroke: #1f6feb; stroke-width: 2; fill: none; }} .dot {{ fill: #1f6feb; }}
  table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
  th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #dde3ea; }}
</style>
</head>
<body>
<h1>Calibration of bundle <code>{bundle}</code></h1>
<p>{summary}</p>
<div class="plots">
<figure>{reliability}<figcaption>Share of clicked phrases by predicted relevance, cross-fitted;
the larger a dot, the more phrases</figcaption></figure>
<figure>{curve}<figcaption>Relevance by score, as it is served</figcaption></figure>
</div>
<table>
<tr><th>relevance</th><th>phrases</th><th>predicted</th><th>clicked</th></tr>
{rows}
</table>
</body>
</html>
"""


def summary_of(record: CalibrationRecord) -> str:
    """The figures of a calibration in a sentence."""
    return (
        f"{record.pairs:,} answered phrases of {record.queries:,} validation queries, {record.clicked:,} "
        f"clicked: Brier score {record.brier:.4f} (a constant: {record.brier_constant:.4f}), expected "
        f"calibration error {record.ece:.4f}, both cross-fitted; {len(record.scores)} knots"
    )


def reliability_page(manifest: Manifest, record: CalibrationRecord) -> str:
    """The page of a bundle's calibration."""
    most = max(one.pairs for one in record.bins)
    dots = [
        (one.predicted, one.clicked, 3 + 7 * (one.pairs / most) ** 0.5) for one in record.bins if one.pairs
    ]
    low, high = record.scores[0], record.scores[-1]
    span = max(high - low, 1e-9)
    line = [
        ((score - low) / span, relevance)
        for score, relevance in zip(record.scores, record.relevance, strict=True)
    ]
    rows = "\n".join(
        f"<tr><td>{one.low:g} to {one.high:g}</td><td>{one.pairs:,}</td>"
        + (
            f"<td>{one.predicted:.3f}</td><td>{one.clicked:.3f}</td></tr>"
            if one.pairs
            else "<td></td><td></td></tr>"
        )
        for one in record.bins
    )
    return _PAGE.format(
        bundle=escape(manifest.bundle_id),
        summary=escape(summary_of(record)),
        reliability=_plot(dots, [one[:2] for one in dots], ("0", "1"), "predicted relevance", even=True),
        curve=_plot([], line, (f"{low:.2f}", f"{high:.2f}"), "score", even=False),
        rows=rows,
    )


def _plot(
    dots: list[tuple[float, float, float]],
    line: list[tuple[float, float]],
    ends: tuple[str, str],
    label: str,
    *,
    even: bool,
) -> str:
    """A square plot of points in 0..1 on both axes; dots have a radius, too."""

    def at(x: float, y: float) -> tuple[str, str]:
        return f"{_MARGIN + x * _SIDE:.1f}", f"{10 + (1 - y) * _SIDE:.1f}"

    points = " ".join(",".join(at(*point)) for point in line)
    left, bottom = at(0, 0)
    right, top = at(1, 1)
    parts = [f'<path class="axis" d="M{left} {top}V{bottom}H{right}"/>']
    if even:
        parts.append(f'<line class="even" x1="{left}" y1="{bottom}" x2="{right}" y2="{top}"/>')
    parts.append(f'<polyline class="line" points="{points}"/>')
    for x, y, radius in dots:
        cx, cy = at(x, y)
        parts.append(f'<circle class="dot" cx="{cx}" cy="{cy}" r="{radius:.1f}"/>')
    below = 10 + _SIDE + 18
    parts += [
        f'<text x="{_MARGIN - 8}" y="{10 + (1 - share) * _SIDE + 4:.0f}" text-anchor="end">{share:g}</text>'
        for share in (0, 0.5, 1)
    ]
    parts += [
        f'<text x="{left}" y="{below}">{escape(ends[0])}</text>',
        f'<text x="{right}" y="{below}" text-anchor="end">{escape(ends[1])}</text>',
        f'<text x="{_MARGIN + _SIDE / 2}" y="{below}" text-anchor="middle">{escape(label)}</text>',
    ]
    width = _MARGIN + _SIDE + 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}"'
    return f'{head} viewBox="0 0 {width} {below + 8}" width="{width}">{"".join(parts)}</svg>'
