"""Frontend of replicas: makes requests in the server's process and computes none.

A replica gets token ids and returns token ids. So the router sees the names of a prompt's blocks,
and a conversation's earlier turns are stored in one place whichever replica answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.cache import BlockHasher, Shares
from headstart.engine.adapter_names import Adapter, AdapterNames, InEngine, adapter_folder
from headstart.errors import ConfigError, EngineError
from headstart.frontend.frontend import Frontend, ModelFacts
from headstart.imports import load_module
from headstart.models.tokenizer import load_tokenizer
from headstart.validation import check_name

if TYPE_CHECKING:
    from headstart.cluster.serving.images import FrontImages
    from headstart.cluster.serving.messages import EngineFacts
    from headstart.engine.config import EngineConfig

CLOSED = "the engine is closed"


class ReplicaAdapters(AdapterNames):
    """LoRA adapters of replicas, by name. For any thread.

        load        a replica reads the folder and returns the adapter's digest
        a request   has name, folder and digest, which is part of its prefix's identity
        a replica   without an adapter of this name and digest reads the folder before it answers

    So the folder must have the same files on every machine with replicas.
    """

    def __init__(self, read: Callable[[str, Path], Adapter]) -> None:
        """`read` has a replica read an adapter of a name, in a folder."""
        super().__init__()
        self._read = read
        self._changing = threading.Lock()  # an engine changes its names in one thread

    def load(self, name: str, path: str | Path, in_engine: InEngine) -> Adapter:
        """Have a replica read the adapter in a folder and give it a name: `AdapterNames.load`."""
        check_name("an adapter's name", name, ConfigError, required=True)
        adapter = self._read(name, adapter_folder(path))

        def add() -> Adapter:
            with self._changing:
                self._named = {**self._named, adapter.name: adapter}
            return adapter

        return in_engine(add)

    def unload(self, name: str) -> None:
        """Remove a name: `AdapterNames.unload`."""
        with self._changing:
            super().unload(name)


class ReplicaFrontend(Frontend):
    """Makes requests for replicas of one model."""

    images: FrontImages | None

    def __init__(
        self,
        model: str | Path,
        facts: EngineFacts,
        config: EngineConfig,
        most: int,
        adapters: ReplicaAdapters,
        tokenizer_folder: str | Path | None = None,
    ) -> None:
        """`config` is a replica's; at `most` this many run. Raises ModelError.

        tokenizer_folder: None for the model's own tokenizer.
        """
        config = replace(config, max_num_seqs=config.max_num_seqs * most)
        tokenizer = load_tokenizer(tokenizer_folder or model)
        images: FrontImages | None = None
        if facts.vision is not None:  # image processors take long to import
            module = load_module("headstart.cluster.serving.images")
            images = module.FrontImages(model, facts.vision, tokenizer, config)
        model_facts = ModelFacts(
            facts.vocab_size,
            facts.eos_token_ids,
            facts.max_model_len,
            facts.num_blocks * most,
            facts.kv_cache_bytes * most,
            BlockHasher(facts.block_size, facts.model_name),
            Shares(),
        )
        super().__init__(tokenizer, model_facts, config, adapters, images, self._require_open)
        self.silence = facts.silence
        self.why_closed: str | None = None

    def _require_open(self) -> None:
        if self.why_closed is not None:
            raise EngineError(self.why_closed)

    def close(self, why: str = CLOSED) -> None:
        """Make no more requests; the first of several reasons counts."""
        self.why_closed = self.why_closed or why
