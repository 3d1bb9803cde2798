"""The pictures: a moment of the pool, its components, a free, and a prompt's identity."""

from collections.abc import Sequence

from scenes import BLOCK_SIZE, BlockView, Scene
from svg import CACHED, EMPTY, HOLDERS, INK, LINE, MUTED, Canvas, Color

from headstart.cache import BlockHasher, TokenSequence
from headstart.cache.identity import Namespace, root_hash

MARGIN, BLOCK, GAP, HEIGHT = 28, 84, 8, 78
WIDTH = 2 * MARGIN + 10 * BLOCK + 9 * GAP


def block_x(block_id: int) -> float:
    """Return the left edge of a block in the pool's row."""
    return MARGIN + block_id * (BLOCK + GAP)


def block_middle(block_id: int) -> float:
    """Return the middle of a block in the pool's row."""
    return block_x(block_id) + BLOCK / 2


def color_of(block: BlockView) -> Color:
    """Return the color of the block's holder, or else of its content."""
    if block.holders:
        return HOLDERS[block.holders[0]]
    return CACHED if block.cached else EMPTY


def heading(canvas: Canvas, title: str, note: str) -> None:
    canvas.text(MARGIN, 38, title, size=19, style="bold")
    canvas.text(MARGIN, 62, note, size=13.5, style="muted")


def draw_block(canvas: Canvas, block: BlockView, y: float) -> None:
    """Draw a block: its id, its tokens in their slots, its holders, and its state."""
    x = block_x(block.block_id)
    place = (x, y, BLOCK, HEIGHT)
    color = color_of(block)
    if len(block.holders) > 1:
        canvas.halves(place, *(HOLDERS[holder] for holder in block.holders[:2]))
    else:
        free_style = "" if block.cached else "dashed"
        canvas.box(place, color, style="thick" if block.holders else free_style)
    canvas.text(x + 10, y + 19, str(block.block_id), size=14, style="bold")
    if block.cached:
        draw_mark(canvas, x + BLOCK - 14, y + 14)
    for at in range(BLOCK_SIZE):
        slot = (x + 8 + at * 17.3, y + 27, 16, 22)
        canvas.box(slot, Color(EMPTY.fill, LINE), style="square")
        letter = block.letters[at : at + 1]
        canvas.text(slot[0] + 8, y + 43, letter, size=14, style="mono middle")
    if block.holders:
        names = " + ".join(str(holder) for holder in block.holders)
        state = f"held by {names}"
    else:
        state = "free, cached" if block.cached else "free, empty"
    canvas.text(x + BLOCK / 2, y + 67, state, size=11, style="middle muted")


def draw_mark(canvas: Canvas, x: float, y: float) -> None:
    """Draw the mark of a block that lookups find."""
    canvas.parts.append(f'<circle cx="{x}" cy="{y}" r="4.5" fill="{CACHED.line}"/>')


def draw_queue(
    canvas: Canvas, scene: Scene, y: float, *, rings: frozenset[int] = frozenset()
) -> None:
    """Draw the free queue, head first; blocks in `rings` are new in it."""
    x = float(MARGIN)
    canvas.text(x, y + 24, "head", size=12, style="muted")
    x += 40
    for block_id in scene.queue:
        block = scene.blocks[block_id]
        canvas.line((x, y + 20), (x + 16, y + 20), MUTED, style="arrow")
        color = CACHED if block.cached else EMPTY
        canvas.box((x + 19, y, 42, 40), color, style="" if block.cached else "dashed")
        if block_id in rings:
            canvas.box((x + 15, y - 4, 50, 48), Color("none", HOLDERS[0].line), style="thick")
        canvas.text(x + 40, y + 25, str(block_id), size=15, style="middle bold")
        if block.cached:
            draw_mark(canvas, x + 54, y + 8)
        x += 66
    canvas.text(
        x + 4, y + 24, "tail" if scene.queue else "no block is free", size=12, style="muted"
    )


def draw_tables(canvas: Canvas, scene: Scene, y: float, x: float) -> None:
    """Draw the block table of each running request."""
    for holder, table in scene.tables.items():
        color = HOLDERS[holder]
        canvas.text(x, y + 21, f"request {holder}", size=13, style=f"bold {color.line}")
        for at, block_id in enumerate(table):
            canvas.box((x + 82 + at * 31, y, 28, 30), color)
            canvas.text(x + 96 + at * 31, y + 20, str(block_id), size=13, style="middle")
        y += 38
    if not scene.tables:
        canvas.text(x, y + 21, "no request is running", size=13, style="muted")


def draw_prefixes(canvas: Canvas, scene: Scene, y: float, x: float) -> None:
    """Draw the cached prefixes, shortest first, and the block that ends each."""
    ordered = sorted(scene.prefixes.items(), key=lambda entry: (len(entry[1]), entry[0]))
    for at, (block_id, prefix) in enumerate(ordered):
        left, top = x + at // 4 * 262, y + at % 4 * 22
        shown = prefix if len(prefix) <= 20 else "…" + prefix[-19:]
        canvas.text(left, top + 14, shown, size=13, style="mono")
        canvas.line((left + 168, top + 10), (left + 190, top + 10), CACHED.line, style="arrow")
        canvas.text(left + 200, top + 15, str(block_id), size=13, style=f"bold {CACHED.line}")
    if not ordered:
        canvas.text(x, y + 14, "none", size=13, style="muted")


def draw_legend(canvas: Canvas, scene: Scene, y: float) -> None:
    x = float(MARGIN)
    entries = [(HOLDERS[at], "thick", f"held by request {at}") for at in scene.tables]
    entries += [(CACHED, "", "free, its content cached"), (EMPTY, "dashed", "free and empty")]
    for color, style, words in entries:
        canvas.box((x, y, 18, 14), color, style=style)
        canvas.text(x + 25, y + 12, words, size=12, style="muted")
        x += 44 + 6.4 * len(words)
    draw_mark(canvas, x + 6, y + 7)
    canvas.text(x + 18, y + 12, "found by lookups", size=12, style="muted")


def draw_moment(scene: Scene) -> Canvas:
    """Draw one time of the worked example: pool, free queue, block tables, cached prefixes."""
    canvas = Canvas(WIDTH, 446, scene.title)
    heading(canvas, scene.title, scene.note)
    canvas.text(MARGIN, 100, "Block pool", size=13, style="bold")
    for block in scene.blocks:
        draw_block(canvas, block, 110)
        if block.block_id in scene.changed:
            x = block_x(block.block_id)
            canvas.line((x + 6, 195), (x + BLOCK - 6, 195), INK, style="thick")
    canvas.text(WIDTH - MARGIN, 100, "underlined: changed just now", size=12, style="end muted")
    canvas.text(MARGIN, 228, "Free queue, next to be reused first", size=13, style="bold")
    draw_queue(canvas, scene, 240)
    canvas.text(MARGIN, 312, "Block tables", size=13, style="bold")
    draw_tables(canvas, scene, 322, MARGIN)
    canvas.text(MARGIN + 420, 312, "Cached prefixes", size=13, style="bold")
    draw_prefixes(canvas, scene, 322, MARGIN + 420)
    draw_legend(canvas, scene, 421)
    return canvas


def draw_overview(scene: Scene) -> Canvas:
    """Draw the four components, which refer to the same blocks."""
    title = "The four components, all about the same blocks"
    canvas = Canvas(WIDTH, 530, title)
    heading(canvas, title, "Two requests are running; they share the blocks that they agree in.")
    _overview_tables(canvas, scene)
    pool_y = 218
    canvas.text(WIDTH - MARGIN, pool_y - 12, "Block pool", size=13, style="bold end")
    for block in scene.blocks:
        draw_block(canvas, block, pool_y)
    _overview_queue(canvas, scene, pool_y + HEIGHT)
    _overview_index(canvas, scene, pool_y + HEIGHT)
    draw_legend(canvas, scene, 504)
    return canvas


def _overview_tables(canvas: Canvas, scene: Scene) -> None:
    canvas.text(MARGIN, 100, "Request blocks: one table a request", size=13, style="bold")
    x = float(MARGIN)
    for holder, table in scene.tables.items():
        color = HOLDERS[holder]
        canvas.text(x, 131, f"request {holder}", size=13, style=f"bold {color.line}")
        for at, block_id in enumerate(table):
            left = x + 82 + at * 34
            canvas.box((left, 112, 30, 30), color)
            canvas.text(left + 15, 132, str(block_id), size=13, style="middle")
            end = (block_middle(block_id) + (12 if holder else -12), 214)
            canvas.line((left + 15, 144), end, color.line, style="arrow faint")
        x += 440


def _overview_queue(canvas: Canvas, scene: Scene, y: float) -> None:
    """Draw arcs below the pool from each free block to the next."""
    x = block_x(len(scene.blocks) - len(scene.queue) - 1) - 32
    canvas.text(x, y + 62, "Free block queue", size=13, style="bold")
    canvas.text(x, y + 80, "linked through the blocks themselves", size=12, style="muted")
    first, last = scene.queue[0], scene.queue[-1]
    canvas.text(block_middle(first), y + 62, "head", size=12, style="middle muted")
    canvas.line((block_middle(first), y + 49), (block_middle(first), y + 6), MUTED, style="arrow")
    canvas.text(block_middle(last), y + 62, "tail", size=12, style="middle muted")
    canvas.line((block_middle(last), y + 49), (block_middle(last), y + 6), MUTED, style="arrow")
    for left, right in zip(scene.queue, scene.queue[1:], strict=False):
        start, end = block_middle(left) + 14, block_middle(right) - 14
        middle = (start + end) / 2
        outline = f"M {start} {y + 4} Q {middle} {y + 34} {end} {y + 6}"
        canvas.path(outline, INK, style="arrow")


def _overview_index(canvas: Canvas, scene: Scene, y: float) -> None:
    """Draw the prefix index, with each cached prefix below its block."""
    x = block_x(len(scene.blocks) - len(scene.queue) - 1) + 20
    canvas.text(x, y + 144, "Prefix index", size=13, style="bold")
    canvas.text(x, y + 162, "one step compares one block's tokens;", size=12, style="muted")
    canvas.text(x, y + 178, "its place says what came before it", size=12, style="muted")
    rows = dict.fromkeys(scene.prefixes, 0)
    for block_id, prefix in sorted(scene.prefixes.items(), key=lambda entry: len(entry[1])):
        parent = scene.parents[block_id]
        siblings = [b for b, p in scene.parents.items() if p == parent and b < block_id]
        rows[block_id] = (rows[parent] if parent is not None else 0) + len(siblings)
        x, top = block_x(block_id), y + 128 + rows[block_id] * 42
        canvas.line((block_middle(block_id), top), (block_middle(block_id), y + 5), CACHED.line)
        canvas.box((x + 6, top, BLOCK - 12, 30), CACHED)
        letters = prefix[-BLOCK_SIZE:]
        canvas.text(block_middle(block_id), top + 20, letters, size=14, style="mono middle")
        if parent is not None:
            above = y + 143 + rows[parent] * 42
            start = block_x(parent) + BLOCK - 6
            if above == top + 15:
                canvas.line((start, above), (x + 3, above), CACHED.line, style="arrow")
            else:
                bend = block_middle(parent)
                outline = f"M {bend} {above + 15} V {top + 15} H {x + 3}"
                canvas.path(outline, CACHED.line, style="arrow")


def draw_free(before: Scene, after: Scene, after_empty_first: Scene) -> Canvas:
    """Draw the free queue before and after request 0 ends, under both policies."""
    title = "The free queue after request 0 is freed"
    canvas = Canvas(700, 330, title)
    freed = frozenset(after.queue) - frozenset(before.queue)
    table = ", ".join(str(at) for at in before.tables[0])
    heading(
        canvas,
        title,
        f"It held blocks {table}; request 1 holds 0 and 1 as well, so they are not free.",
    )
    for at, (name, scene) in enumerate(
        [
            ("Before", before),
            ("After, lru: to the tail, the last block first", after),
            ("After, empty-first-lru: what holds nothing goes to the head", after_empty_first),
        ]
    ):
        y = 92 + at * 76
        canvas.text(MARGIN, y + 2, name, size=13, style="bold")
        draw_queue(canvas, scene, y + 14, rings=freed if at else frozenset())
    return canvas


def draw_identity(words: Sequence[str], block_size: int) -> Canvas:
    """Draw a prompt cut into blocks, and the parts of each identity."""
    title = "A prompt cut into blocks, and the identity of each"
    sequence = TokenSequence("prompt", range(len(words)), salt="tenant 7")
    names = BlockHasher(block_size, "model").of_keys(sequence.namespace, sequence.cut(block_size))
    root = root_hash(Namespace(None, "tenant 7"), block_size, "model")
    full = len(names)
    canvas = Canvas(WIDTH, 330, title)
    note = (
        "An identity is the parent's identity and the block's own tokens, so it covers all before."
    )
    heading(canvas, title, note)
    wide, step, left = 218, 240, MARGIN + 168
    _identity_box(canvas, (MARGIN, 150, 146, 92), ("root", "salt: tenant 7"), root.hex()[:8])
    for at in range(full):
        x = left + at * step
        own = words[at * block_size : (at + 1) * block_size]
        start = MARGIN + 146 if at == 0 else x - step + wide
        canvas.line((start + 2, 196), (x - 3, 196), CACHED.line, style="arrow thick")
        _identity_box(
            canvas, (x, 150, wide, 92), (f"block {at}", " ".join(own)), names[at].hex()[:8]
        )
        y = 102 + at * 14
        canvas.line((left, y), (x + wide, y), HOLDERS[at].line, style="thick")
        canvas.text(left - 8, y + 4, f"block {at} stands for", size=11.5, style="end muted")
    rest = " ".join(words[full * block_size :])
    x = left
    canvas.box((x, 262, wide, 40), EMPTY, style="dashed")
    canvas.text(x + 12, 287, rest, size=13)
    canvas.text(
        x + wide + 14, 281, "The rest is not full: no identity yet, and no name.", size=12.5
    )
    canvas.text(
        x + wide + 14, 299, "Its rows can still be copied, once its request has ended.", size=12.5
    )
    return canvas


def _identity_box(
    canvas: Canvas, place: tuple[float, float, float, float], words: tuple[str, str], name: str
) -> None:
    x, y, width, _ = place
    canvas.box(place, CACHED)
    canvas.text(x + 12, y + 21, words[0], size=12.5, style=f"bold {CACHED.line}")
    canvas.text(x + 12, y + 46, words[1], size=14)
    canvas.line((x + 12, y + 58), (x + width - 12, y + 58), LINE)
    canvas.text(x + 12, y + 78, f"name {name}…", size=12, style="mono muted")
