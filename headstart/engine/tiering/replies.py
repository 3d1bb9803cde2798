"""Replies in tiers: the source of drafts for prompts that are repeated after a restart.

A reply is the finished answer to a prompt. In memory, the tree of cached prefixes has the tokens
that followed a prompt. The stores have no tree and look up blocks by hashes. So a reply is stored
as a separate object, under a hash of its whole prompt: the model, the namespace, the tokens and the
images. Its bytes are masked by another part of that hash. So only a request with the same prompt
and salt can find or read the reply.

A stored reply is not replaced; it stays until it is evicted.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from headstart.cache import TokenSequence
from headstart.engine.drafts.drafters import StoredReply
from headstart.engine.request import Request, RequestGroup
from headstart.tiers.transfers import ObjectStore
from headstart.tiers.worker import Worker

_MIN_TOKENS = 16  # tokens; a shorter reply gains little
_MAX_TOKENS = 2048  # tokens
_TOKEN = np.dtype("<u4")


@dataclass(eq=False)
class Replies:
    """The lookups and saves of replies.

    worker: the thread of lookups; no request waits for it. model: the model's fingerprint.
    vocab_size: a stored reply with a token id beyond it is ignored.
    """

    objects: ObjectStore
    worker: Worker
    model: str
    block_size: int
    vocab_size: int

    def queue(self, group: RequestGroup) -> None:
        """Look up the stored reply to a new request's prompt, in the worker's thread."""
        request, longest = group.requests[0], group.params.max_tokens
        if longest is not None and longest < _MIN_TOKENS:
            return
        identity = _identify(request.sequence, self.model, self.block_size)
        group.reply = StoredReply(self._load, identity=identity)
        if request.reads_cache:
            self.worker.submit(group.reply)

    def _load(self, reply: StoredReply) -> bool:
        data = self.objects.load(reply.identity[:32], reply)
        if data is not None:
            tokens = np.frombuffer(_mask(data, reply.identity), dtype=_TOKEN)
            if tokens.max(initial=0) < self.vocab_size:
                reply.tokens += tokens.tolist()
        return False

    def save(self, request: Request, seconds: float) -> None:
        """Save a finished reply. seconds: the time to compute a prompt of the reply's length."""
        reply, tokens = request.group.reply, request.sampling.output_token_ids
        if reply is None or reply.tokens or request.index or not request.group.params.is_stored:
            return
        if request.finish_reason in ("stop", "length") and len(tokens) >= _MIN_TOKENS:
            data = np.array(tokens[:_MAX_TOKENS], dtype=_TOKEN).tobytes()
            self.objects.save(reply.identity[:32], _mask(data, reply.identity), seconds)


def _identify(sequence: TokenSequence, model: str, block_size: int) -> bytes:
    """Return 64 bytes that identify a prompt: a key of 32 bytes, and the seed of a mask."""
    keys, length = sequence.cut(block_size), len(sequence.token_ids)
    tail = sequence.cut_partial(length, block_size) if length % block_size else b""
    head = repr(("headstart/reply/1", model, *sequence.namespace)).encode()
    return hashlib.sha512(b"".join([head, *keys, tail])).digest()


def _mask(data: bytes | memoryview, identity: bytes) -> bytes:
    """Mask or unmask bytes."""
    mask = hashlib.shake_256(identity[32:]).digest(len(data))
    return (np.frombuffer(data, np.uint8) ^ np.frombuffer(mask, np.uint8)).tobytes()
