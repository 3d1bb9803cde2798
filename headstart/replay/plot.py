"""A picture of replays: panels of horizontal bars, as an SVG that needs no library."""

from collections.abc import Mapping
from html import escape

_WIDTH, _LABEL, _BAR, _ROW, _HEAD = 720, 180, 440, 22, 34
_STYLE = (
    "text{font:13px sans-serif;fill:#20242b}.bar{fill:#7558b5}.card{fill:#fcfbf8}"
    "@media (prefers-color-scheme:dark){text{fill:#e7e9ed}.bar{fill:#a98ee6}.card{fill:#16191f}}"
)


def draw_bars(title: str, panels: Mapping[str, Mapping[str, float]]) -> str:
    """Return an SVG: a panel for each heading, a bar for each name, from 0 to the largest."""
    parts, y = [_text(16, 24, title, bold=True)], _HEAD
    for heading, values in panels.items():
        y += _HEAD
        parts.append(_text(16, y - 10, heading, bold=True))
        largest = max(values.values(), default=0) or 1
        for name, value in values.items():
            length = _BAR * value / largest
            parts.append(_text(16, y + 14, name))
            parts.append(
                f'<rect class="bar" x="{_LABEL}" y="{y + 3}" width="{length:.1f}" height="14"/>'
            )
            parts.append(_text(_LABEL + length + 6, y + 14, f"{value:,.4g}"))
            y += _ROW
    height = y + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" role="img">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        f'<rect class="card" width="{_WIDTH}" height="{height}" rx="12"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{weight}>{escape(words)}</text>'
