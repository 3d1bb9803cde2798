"""The picture of a prompt with an image: its blocks and their keys."""

from pool import MARGIN, WIDTH, heading
from svg import CACHED, EMPTY, HOLDERS, LINE, Canvas, Color

from headstart.cache import BlockHasher, MultiModalItem, TokenSequence

BLOCK_SIZE = 16
TEXT, PLACEHOLDERS = [1, 3, 7493, 1681, 1294, 1593, 3937, 9551], 41
IMAGE_TOKEN, END = 32000, 4
DIGEST = bytes.fromhex("9c1185a5c5e9fc54612808977ee8f548b2258d31")
LEFT, STEP, WIDE = MARGIN + 132, 64, 46


def draw_items() -> Canvas:
    """Draw the reference's example: 8 tokens, 41 placeholders of one image, 1 token."""
    title = "A prompt with an image, cut into blocks, and the key of each"
    item = MultiModalItem(DIGEST, len(TEXT), PLACEHOLDERS)
    token_ids = [*TEXT, *[IMAGE_TOKEN] * PLACEHOLDERS, END]
    sequence = TokenSequence("prompt", token_ids, items=[item])
    keys = sequence.cut(BLOCK_SIZE)
    names = BlockHasher(BLOCK_SIZE, "model").of_keys(sequence.namespace, keys)
    canvas = Canvas(WIDTH, 424, title)
    heading(
        canvas,
        title,
        "All placeholders are the same token. What tells images apart is the digest and the "
        "offset in the key of each block.",
    )
    for block, start in enumerate(range(0, len(token_ids), BLOCK_SIZE)):
        y = 92 + block * 76
        end = min(start + BLOCK_SIZE, len(token_ids))
        full = block < len(names)
        canvas.box((MARGIN, y, 112, 58), CACHED if full else EMPTY, style="" if full else "dashed")
        canvas.text(MARGIN + 12, y + 22, f"block {block}", size=13, style="bold")
        name = f"{names[block].hex()[:8]}…" if full else "no name yet"
        canvas.text(MARGIN + 12, y + 44, name, size=12, style="mono muted")
        if block:
            canvas.line((MARGIN + 56, y - 18), (MARGIN + 56, y - 2), CACHED.line, style="arrow")
        _draw_tokens(canvas, y, token_ids[start:end], start)
        offset = start - item.offset
        where = (
            f"begins {-offset} tokens into the block"
            if offset < 0
            else f"the block begins at placeholder {offset}"
        )
        words = f"extra key: image {DIGEST.hex()[:8]}…, {where}"
        canvas.text(LEFT, y + 52, words, size=12.5, style=HOLDERS[1].line)
    canvas.text(
        MARGIN,
        406,
        "Another image of the same size: the first 8 tokens are found, and nothing after them.",
        size=13,
    )
    return canvas


def _draw_tokens(canvas: Canvas, y: float, token_ids: list[int], start: int) -> None:
    for at, token_id in enumerate(token_ids):
        shown = "<p>" if token_id == IMAGE_TOKEN else str(token_id)
        color = HOLDERS[1] if token_id == IMAGE_TOKEN else HOLDERS[0]
        x = LEFT + at * (WIDE + 2)
        canvas.box((x, y, WIDE, 34), Color(color.fill, LINE), style="square")
        canvas.text(x + WIDE / 2, y + 22, shown, size=12, style="mono middle")
