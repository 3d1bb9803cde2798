"""A minimal SVG writer: boxes, text, lines and arrows on an opaque card.

Attributes have the colors for a light page. A style sheet in the file replaces them in dark mode; a
viewer without style sheets shows the light card. Numbers are formatted in only one way, so that
equal drawings are equal files.
"""

from dataclasses import dataclass, field
from html import escape

SANS = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
MONO = "'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"

PAPER, INK, MUTED, LINE = "#fcfbf8", "#20242b", "#6b7280", "#c9ccd3"


@dataclass(frozen=True)
class Color:
    """A hue in two strengths: `fill` under text, `line` for borders and arrows."""

    fill: str
    line: str


EMPTY = Color("#ffffff", "#b4b8c0")
CACHED = Color("#e9e4f7", "#7558b5")
HOLDERS = (
    Color("#d7e7fb", "#2f6db5"),
    Color("#fde3c8", "#c26a15"),
    Color("#d5efdc", "#2c8651"),
)

# The color on a dark page for each color.
DARK = {
    PAPER: "#16191f",
    INK: "#e7e9ed",
    MUTED: "#9aa3b2",
    LINE: "#454b57",
    EMPTY.fill: "#21262e",
    EMPTY.line: "#5b6270",
    CACHED.fill: "#32294a",
    CACHED.line: "#a98ee6",
    HOLDERS[0].fill: "#1d3557",
    HOLDERS[0].line: "#7fb2ee",
    HOLDERS[1].fill: "#4a2f14",
    HOLDERS[1].line: "#eea55c",
    HOLDERS[2].fill: "#183d26",
    HOLDERS[2].line: "#6cc692",
}


def number(value: float) -> str:
    """Format a number with at most one decimal, and none if it is zero."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass
class Canvas:
    """A card of `width` by `height` pixels; later parts cover earlier ones."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(
        self, place: tuple[float, float, float, float], color: Color, *, style: str = ""
    ) -> None:
        """Draw a rounded box at (x, y, width, height). style: dashed, thick, square."""
        x, y, width, height = place
        stroke = 2.2 if "thick" in style else 1.3
        corner = 2 if "square" in style else 6
        dashed = ' stroke-dasharray="4 3"' if "dashed" in style else ""
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}" rx="{corner}" fill="{color.fill}" stroke="{color.line}" '
            f'stroke-width="{number(stroke)}"{dashed}/>'
        )

    def halves(self, place: tuple[float, float, float, float], left: Color, right: Color) -> None:
        """Draw a box whose halves have two colors, including the border."""
        x, y, width, height = place
        middle, bottom, corner = x + width / 2, y + height, 6
        for edge, turn, color in ((x, corner, left), (x + width, -corner, right)):
            outline = (
                f"M {number(middle)} {number(y)} H {number(edge + turn)} "
                f"Q {number(edge)} {number(y)} {number(edge)} {number(y + corner)} "
                f"V {number(bottom - corner)} "
                f"Q {number(edge)} {number(bottom)} {number(edge + turn)} {number(bottom)} "
                f"H {number(middle)}"
            )
            self.parts.append(
                f'<path d="{outline}" fill="{color.fill}" stroke="{color.line}" '
                f'stroke-width="2.2"/>'
            )

    def text(self, x: float, y: float, words: str, *, size: float = 13, style: str = "") -> None:
        """Draw words with their baseline at y. style: mono, bold, muted, middle, end, or #color."""
        look = style.split()
        colors = [word for word in look if word.startswith("#")]
        fill = colors[0] if colors else MUTED if "muted" in look else INK
        anchor = "middle" if "middle" in look else "end" if "end" in look else "start"
        weight = ' font-weight="600"' if "bold" in look else ""
        family = MONO if "mono" in look else SANS
        self.parts.append(
            f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" '
            f'font-family="{family}" fill="{fill}" text-anchor="{anchor}"{weight} '
            f'xml:space="preserve">{escape(words)}</text>'
        )

    def path(self, outline: str, color: str, *, style: str = "") -> None:
        """Draw a line along an SVG path. style: arrow, dashed, faint, thick."""
        marker = f' marker-end="url(#tip-{color[1:]})"' if "arrow" in style else ""
        dashed = ' stroke-dasharray="4 3"' if "dashed" in style else ""
        faint = ' opacity="0.55"' if "faint" in style else ""
        width = "2" if "thick" in style else "1.4"
        self.parts.append(
            f'<path d="{outline}" fill="none" stroke="{color}" stroke-width="{width}"'
            f"{dashed}{faint}{marker}/>"
        )

    def line(
        self, start: tuple[float, float], end: tuple[float, float], color: str, *, style: str = ""
    ) -> None:
        """Draw a straight line."""
        (x, y), (to_x, to_y) = start, end
        outline = f"M {number(x)} {number(y)} L {number(to_x)} {number(to_y)}"
        self.path(outline, color, style=style)

    def render(self) -> str:
        """Return the whole file."""
        tips = "".join(
            f'<marker id="tip-{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6.5" '
            f'markerHeight="6.5" orient="auto-start-reverse">'
            f'<path d="M 0 0.6 L 7.4 4 L 0 7.4 z" fill="{color}"/></marker>'
            for color in (INK, MUTED, CACHED.line, EMPTY.line, *(c.line for c in HOLDERS))
        )
        rules = "".join(
            f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}'
            for light, dark in DARK.items()
        )
        size = f'width="{self.width}" height="{self.height}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {self.width} {self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n"
            f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>\n"
            f"<defs>{tips}</defs>\n"
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="12" '
            f'fill="{PAPER}" stroke="{LINE}"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"
