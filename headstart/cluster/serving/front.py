"""The half of an engine that the server's process has: it makes requests, and computes none.

Prompts are checked and tokenised here, grammars compiled, tokens turned into text: a replica gets
token ids, and gives token ids back. So the router sees the names of a prompt's blocks, and what
the server keeps of a conversation is in one place whichever replica answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.cache import BlockHash, BlockNames, Shares
from headstart.cluster.prompt_keys import PromptKeys
from headstart.engine.logits.vocabulary import Vocabulary
from headstart.errors import EngineError
from headstart.frontend.inputs import InputProcessor, Prompt, RequestOptions, check_request
from headstart.frontend.request_maker import RequestMaker
from headstart.frontend.text.max_length import TextLimit
from headstart.imports import load_module
from headstart.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from headstart.cluster.serving.adapters import ReplicaAdapters
    from headstart.cluster.serving.images import FrontImages
    from headstart.cluster.serving.messages import EngineFacts
    from headstart.engine.config import EngineConfig
    from headstart.engine.images.transfer import SentImages
    from headstart.engine.params import SamplingParams
    from headstart.engine.request import RequestGroup

__all__ = ["CLOSED", "FrontEngine"]

CLOSED = "the engine is closed"


@dataclass
class _PoolFacts:
    """What the server asks of an engine's cache manager: that of all replicas together."""

    block_size: int
    config: _PoolSize
    names: BlockNames
    shares: Shares = field(default_factory=Shares)


@dataclass(frozen=True)
class _PoolSize:
    num_blocks: int


@dataclass(frozen=True)
class _ModelFacts:
    vocab_size: int


class FrontEngine:
    """What the server, and those who make requests, ask of an `Engine`, without a model."""

    tiers = None

    def __init__(
        self,
        model: str | Path,
        facts: EngineFacts,
        config: EngineConfig,
        most: int,
        adapters: ReplicaAdapters,
        tokenizer: str | Path | None = None,
    ) -> None:
        """`config` is a replica's; there are at `most` so many. Raises ModelError.

        tokenizer: where it is, None for the model's own.
        """
        self.config = replace(config, max_num_seqs=config.max_num_seqs * most)
        self.tokenizer = load_tokenizer(tokenizer or model)
        self.max_model_len = facts.max_model_len
        self.kv_cache_bytes = facts.kv_cache_bytes * most
        self.silence = facts.silence
        names = BlockNames(facts.block_size, facts.model_name)
        self.manager = _PoolFacts(facts.block_size, _PoolSize(facts.num_blocks * most), names)
        self.model = _ModelFacts(facts.vocab_size)
        self.adapters = adapters
        self.images = self._see(model, facts)
        self.text_limit = TextLimit(self.tokenizer, facts.max_model_len)
        self._maker = RequestMaker(
            InputProcessor(self.tokenizer, facts.vocab_size, self.text_limit, self.images),
            Vocabulary(self.tokenizer, facts.vocab_size, facts.eos_token_ids),
            self.adapters,
            max_model_len=facts.max_model_len,
            first_seed=config.seed,
            public=self.manager.names.public,
        )
        self.why_closed: str | None = None

    @property
    def is_closed(self) -> bool:
        """Whether no more requests are made."""
        return self.why_closed is not None

    def _see(self, model: str | Path, facts: EngineFacts) -> FrontImages | None:
        """The image side; None for a model without vision. Image processors take long to import."""
        if facts.vision is None:
            return None
        images = load_module("headstart.cluster.serving.images")
        found: FrontImages = images.FrontImages(model, facts.vision, self.tokenizer, self.config)
        return found

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
    ) -> RequestGroup:
        """As `Engine.prepare`."""
        self.require_open()
        check_request(params, options := RequestOptions(request_id, salt, adapter, priority))
        return self._maker.make(prompt, params, options)

    def unload_adapter(self, name: str) -> None:
        """As `Engine.unload_adapter`."""
        self.adapters.unload(name)

    def names(self, request: RequestGroup) -> list[BlockHash]:
        """The names of the prompt's full blocks, as the replicas tell them in events."""
        sequence = request.requests[0].sequence
        keys = sequence.cut(self.manager.block_size)
        return self.manager.names.of_keys(sequence.root, keys)

    def count_public(self, request: RequestGroup) -> int:
        """Blocks at the prompt's head that lie wholly in a public prefix."""
        sequence = request.requests[0].sequence
        sequence.cut(self.manager.block_size)
        return sequence.num_public

    def keys(self, request: RequestGroup) -> PromptKeys:
        """What the router's index knows these blocks by."""
        return PromptKeys(self.manager.names, request.requests[0].sequence)

    def take_images(self, request: RequestGroup) -> SentImages | None:
        """A request's images for a replica, which it has no more; None if it has none."""
        return None if self.images is None else self.images.take(request)

    def note_encoded(self, request: RequestGroup) -> None:
        """A replica has computed the request's prompt."""
        if self.images is not None:
            self.images.note_encoded(request)

    def require_open(self) -> None:
        """Raise EngineError after `close`."""
        if self.why_closed is not None:
            raise EngineError(self.why_closed)

    def close(self, why: str = CLOSED) -> None:
        """Make no more requests; of several reasons the first counts."""
        self.why_closed = self.why_closed or why
