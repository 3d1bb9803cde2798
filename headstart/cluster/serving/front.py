"""The frontend of replicas: it makes requests in the server's process, and computes none.

A replica gets token ids, and gives token ids back. So the router sees the names of a prompt's
blocks, and what the server remembers of a conversation is in one place whichever replica answers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.cache import BlockHash, BlockHasher, Shares
from headstart.cluster.index import PromptKeys
from headstart.errors import EngineError
from headstart.frontend.frontend import Frontend, ModelFacts
from headstart.imports import load_module
from headstart.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from headstart.cluster.serving.adapters import ReplicaAdapters
    from headstart.cluster.serving.images import FrontImages
    from headstart.cluster.serving.messages import EngineFacts
    from headstart.engine.config import EngineConfig
    from headstart.engine.image_cache import SentImages
    from headstart.engine.request import RequestGroup

__all__ = ["CLOSED", "ReplicaFrontend"]

CLOSED = "the engine is closed"


class ReplicaFrontend(Frontend):
    """Makes requests for replicas of one model."""

    def __init__(
        self,
        model: str | Path,
        facts: EngineFacts,
        config: EngineConfig,
        most: int,
        adapters: ReplicaAdapters,
        tokenizer_folder: str | Path | None = None,
    ) -> None:
        """`config` is a replica's; there are at `most` so many. Raises ModelError.

        tokenizer_folder: None for the model's own tokenizer.
        """
        config = replace(config, max_num_seqs=config.max_num_seqs * most)
        tokenizer = load_tokenizer(tokenizer_folder or model)
        self._images: FrontImages | None = None
        if facts.vision is not None:  # image processors take long to import
            images = load_module("headstart.cluster.serving.images")
            self._images = images.FrontImages(model, facts.vision, tokenizer, config)
        model_facts = ModelFacts(
            facts.vocab_size,
            facts.eos_token_ids,
            facts.max_model_len,
            facts.num_blocks * most,
            facts.kv_cache_bytes * most,
            BlockHasher(facts.block_size, facts.model_name),
            Shares(),
        )
        super().__init__(tokenizer, model_facts, config, adapters, self._images, self._require_open)
        self.silence = facts.silence
        self.why_closed: str | None = None

    @property
    def is_closed(self) -> bool:
        """True if no more requests are made."""
        return self.why_closed is not None

    def names(self, request: RequestGroup) -> list[BlockHash]:
        """Return the names of the prompt's full blocks, as replicas report them in events."""
        hasher, sequence = self.facts.names, request.requests[0].sequence
        keys = sequence.cut(hasher.block_size)  # which may change the root
        return hasher.of_keys(sequence.root, keys)

    def count_public(self, request: RequestGroup) -> int:
        """Return the number of blocks at the prompt's head that lie wholly in a public prefix."""
        sequence = request.requests[0].sequence
        sequence.cut(self.facts.names.block_size)
        return sequence.num_public

    def keys(self, request: RequestGroup) -> PromptKeys:
        """Return the keys of these blocks in the router's index."""
        return PromptKeys(self.facts.names, request.requests[0].sequence)

    def take_images(self, request: RequestGroup) -> SentImages | None:
        """Move a request's images into a message to a replica; None if it has none."""
        return None if self._images is None else self._images.take(request)

    def note_encoded(self, request: RequestGroup) -> None:
        """Note that a replica has computed the request's prompt."""
        if self._images is not None:
            self._images.note_encoded(request)

    def _require_open(self) -> None:
        if self.why_closed is not None:
            raise EngineError(self.why_closed)

    def close(self, why: str = CLOSED) -> None:
        """Make no more requests; of several reasons the first counts."""
        self.why_closed = self.why_closed or why
