"""Loads from a store into the pool: a request's lookup goes on where the pool's chain ends.

A load is a sequence of the cache that nobody computes: it takes blocks, they get their rows from
the store, and when all are there it gives them back, cached. So a request that begins the same
waits for a load as it waits for another request that computes its prefix, and hits what was loaded
as it hits all else. A load takes blocks only if those suffice for the request that it is for.

    queue     a request comes: look for what the pool lacks, in the loader's thread
    take_in   between two steps: put what has arrived into the pool
    reach     as a limit, the request waits meanwhile; others run. While the pool has no room for it
              they go past it a few times, as with all that waits for blocks. One that was preempted
              looks for what the pool lost of it, once there is room for it again

What does not come is computed. Nothing here fails a request.
"""

import itertools
from collections import Counter
from collections.abc import Callable

from headstart.cache import BlockHash, KVCacheManager, TokenSequence
from headstart.engine.request import Request, RequestGroup
from headstart.engine.tiering.offers import BlockPayload
from headstart.tiers import LoadedBlock, Loader, LoadJob

__all__ = ["Load", "Loads"]


class Load:
    """One prefix on its way from the store.

    first: the block of the prompt that the job begins with. next: the block that is taken in next.
    written: the tiers of the blocks before that which it has put into the pool. sequence: what
    holds the blocks; None before the first has arrived. requests: who waits.
    lacks_room: the free blocks do not suffice for its request.
    """

    def __init__(self, request: Request, first: int, job: LoadJob) -> None:
        self.request = request
        self.first = self.next = first
        self.job = job
        self.sequence: TokenSequence | None = None
        self.lacks_room = False
        self.requests = {request}
        self.written: list[str] = []

    @property
    def is_wanted(self) -> bool:
        """True while somebody waits for it."""
        return any(request.finish_reason is None for request in self.requests)

    def segments(self, block_size: int) -> list[tuple[str, range]]:
        """Return the tokens that it has put into the pool, by tier."""
        found, start = [], self.next - len(self.written)
        for tier, blocks in itertools.groupby(self.written):
            stop = start + len(list(blocks))
            found.append((tier, range(start * block_size, stop * block_size)))
            start = stop
        return found

    @property
    def has_all(self) -> bool:
        """True if nothing more arrives."""
        return self.job.done and not self.job.arrived


class Loads:
    """The loads under way; a `Limit` of the engine's scheduler.

    before_writing: called when blocks were taken, before anything is written over their rows.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        payload: BlockPayload,
        loader: Loader,
        choose: Callable[[int], int],
        before_writing: Callable[[Request, list[LoadedBlock]], None],
    ) -> None:
        self._manager = manager
        self._payload = payload
        self._loader = loader
        self._choose = choose
        self._before_writing = before_writing
        self._loads: dict[BlockHash, Load] = {}
        self._waiting: dict[Request, Load] = {}
        self._tried: dict[Request, int] = {}  # preempted, and how many blocks it hit at its load

    @property
    def are_under_way(self) -> bool:
        """True if somebody waits for blocks."""
        return bool(self._waiting)

    def queue(self, group: RequestGroup) -> None:
        """Look for what the pool lacks of a new request's prompt."""
        request = group.requests[0]
        load = self._begin(request, len(request.sequence.token_ids) - 1)
        if load is not None:
            for request in group.requests:
                self._await(request, load)

    def _begin(self, request: Request, num_tokens: int) -> Load | None:
        """Have what the pool lacks of a request's first tokens looked for; None if it has all."""
        sequence, size = request.sequence, self._manager.block_size
        most = num_tokens // size
        if not request.reads_cache or most == 0:
            return None
        found = self._manager.get_computed_blocks(sequence)
        first = len(found.blocks)
        if first >= most or found.writer is not None:
            return None
        names = self._manager.block_hashes(sequence)[first:most]
        load = self._loads.get(names[0])
        if load is None or len(load.job.names) < len(names):
            load = self._loads[names[0]] = Load(
                request, first, self._loader.start(names, self._choose)
            )
        return load

    def _await(self, request: Request, load: Load) -> None:
        load.requests.add(request)
        self._waiting[request] = load

    # As a limit

    def applies(self, request: Request) -> bool:
        """A request is limited while its prefix is being loaded, and once it was preempted."""
        return request in self._waiting or request.num_preemptions > 0

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """All of it, or nothing yet."""
        load = self._waiting.get(request)
        if load is not None:
            return start if load.lacks_room else None
        if request.num_preemptions and start < request.num_read and self._load_again(request):
            return None
        return stop

    def _load_again(self, request: Request) -> bool:
        """Look for what the pool lost of a preempted request; True if it waits for that.

        Not before there is room for it, or others would take the blocks again; and once for what is
        lost, or a request whose blocks the store does not have would wait for ever.
        """
        manager, sequence = self._manager, request.sequence
        if manager.is_known(sequence):
            return False  # it runs
        found = manager.get_computed_blocks(sequence)
        hit = len(found.blocks)
        if self._tried.get(request, hit + 1) <= hit or not manager.can_admit(found):
            return False
        known = min(request.num_read, len(sequence.token_ids) - 1)
        load = self._begin(request, known)
        if load is None:
            return False
        self._tried = {one: n for one, n in self._tried.items() if one.finish_reason is None}
        self._tried[request] = hit
        self._await(request, load)
        return True

    def enter(self, request: Request, start: int, stop: int) -> None:
        """It runs again: after another preemption it looks for its blocks anew."""
        self._tried.pop(request, None)

    def leave(self, request: Request) -> None:
        """It waits for no load any more; one that nobody waits for gives its blocks back."""
        load = self._waiting.get(request)
        if load is None:
            return
        if any(self._waiting.get(other) is load for other in load.requests - {request}):
            del self._waiting[request]
        else:
            self._end(load)

    # Between two steps

    def take_in(self) -> Counter[str]:
        """Put what has arrived into the pool; the blocks, by their tiers, are to be committed."""
        written: Counter[str] = Counter()
        preferred: LoadJob | None = None
        for load in list(dict.fromkeys(self._waiting.values())):
            if load.is_wanted and self._has_room(load):
                written.update(block.tier for block in self._insert(load))
                preferred = preferred or load.job
        self._loader.prefer(preferred)
        return written

    def end_those_done(self) -> list[Load]:
        """Give back the blocks of loads that have all, or that nobody wants any more.

        What they hold is committed.
        """
        ended = [
            load
            for load in dict.fromkeys(self._waiting.values())
            if load.has_all or not load.is_wanted
        ]
        for load in ended:
            self._end(load)
        return ended

    def _insert(self, load: Load) -> list[LoadedBlock]:
        """Take blocks for what has arrived of a load, and write it; what was written."""
        if not load.job.arrived:
            return []
        blocks = self._take_slots(load, self._loader.take(load.job, len(load.job.names)))
        if not blocks:
            return []
        assert load.sequence is not None
        self._before_writing(load.request, blocks)
        ids = load.sequence.block_table()[load.next : load.next + len(blocks)]
        payloads = [block.payload for block in blocks]
        self._payload.write(load.sequence, load.next, ids, payloads)
        load.next += len(blocks)
        load.written += [block.tier for block in blocks]
        return blocks

    def _has_room(self, load: Load) -> bool:
        """True if what has arrived, or arrives once it is preferred, can be taken in.

        That is if the request could be admitted. One load takes blocks at a time, or two could each
        hold what the other needs.
        """
        if load.sequence is not None:
            return True
        if not (load.job.arrived or load.job.count):
            return False
        if any(other.sequence is not None for other in self._waiting.values()):
            return False
        found = self._manager.get_computed_blocks(load.request.sequence)
        load.lacks_room = not self._manager.can_admit(found)
        return not load.lacks_room

    def _take_slots(self, load: Load, blocks: list[LoadedBlock]) -> list[LoadedBlock]:
        """Have the load hold blocks for these; those that the pool lacks, none if it is full."""
        size = self._manager.block_size
        if load.sequence is None:
            wanted = load.request.sequence
            known = len(wanted.token_ids)
            # First, so that an interruption leaves nothing that nobody knows of.
            load.sequence = sequence = TokenSequence(
                f"{load.request.group.request_id}/load",
                wanted.token_ids,
                adapter=wanted.namespace.adapter,
                salt=wanted.namespace.salt,
                # Of tokens yet to come, too, in a stage whose inputs arrive one by one.
                items=[item for item in wanted.items if item.offset + item.length <= known],
                public=wanted.public,
            )
            sequence.is_counted = False  # the request that waits is
            found = self._manager.get_computed_blocks(sequence)
            load.next = len(found.blocks)
            blocks = blocks[load.next - load.first :] if load.next >= load.first else []
            found = found.cut(load.next, size)
            is_new = found.writer is None and blocks
            if is_new and self._manager.allocate_slots(sequence, len(blocks) * size, found):
                return blocks
        elif self._manager.append_slots(load.sequence, len(blocks) * size):
            return blocks
        self._loader.cancel(load.job)
        return []

    def _end(self, load: Load) -> None:
        """Nobody waits for the load any more, and it holds nothing."""
        self._loader.cancel(load.job)
        if load.sequence is not None and self._manager.is_known(load.sequence):
            self._manager.free(load.sequence)
        if self._loads.get(load.job.names[0]) is load:
            del self._loads[load.job.names[0]]
        for request in load.requests:
            if self._waiting.get(request) is load:
                del self._waiting[request]

    def end_all(self) -> None:
        """End every load; what is in the pool stays."""
        self._tried.clear()
        for load in {*self._loads.values(), *self._waiting.values()}:
            self._end(load)
