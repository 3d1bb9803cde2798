"""Makes requests: checks and tokenises what a user asked for; nothing is allocated."""

import itertools
import secrets
import time
from typing import Protocol

import torch

from headstart.cache import PublicBlocks, TokenSequence
from headstart.engine.adapters.request import Adapter
from headstart.engine.logits.factory import ProcessorFactory
from headstart.engine.logits.protocol import LogitsProcessor
from headstart.engine.logits.vocabulary import Vocabulary
from headstart.engine.params import SamplingParams
from headstart.engine.request import Request, RequestGroup
from headstart.engine.sampling.sampler import SamplingState
from headstart.frontend.images.reading import Tenant
from headstart.frontend.inputs import InputProcessor, Prompt, RequestOptions, choose_salt
from headstart.frontend.text.detokenizer import Detokenizer, TokenTexts
from headstart.frontend.text.output import OutputText

__all__ = ["NamedAdapters", "RequestMaker"]


class NamedAdapters(Protocol):
    """The adapters that requests may ask for."""

    def find(self, name: str) -> Adapter:
        """The adapter of this name. Raises RequestError."""
        ...


class RequestMaker:
    """Requests for one model. May be used from several threads.

    `first_seed` is the seed of the first answer drawn without one of its own; each further such
    answer has the next. `public` has the blocks that tenants share.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        vocabulary: Vocabulary,
        adapters: NamedAdapters,
        *,
        max_model_len: int,
        first_seed: int,
        public: PublicBlocks,
    ) -> None:
        self._inputs = inputs
        self._vocabulary = vocabulary
        self._adapters = adapters
        self._processors = ProcessorFactory(vocabulary)
        self._max_model_len = max_model_len
        self._public = public
        # Ids for those who give none, which nobody can have given.
        self._names = map(f"request-{secrets.token_hex(8)}-{{}}".format, itertools.count())
        self._seeds = itertools.count(first_seed)
        self._token_text = (
            TokenTexts(vocabulary.tokenizer) if vocabulary.tokenizer is not None else None
        )

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
    ) -> RequestGroup:
        """A request for the adapter of this name, if one is given. Raises RequestError."""
        request_id, _, adapter, priority = options
        salt = choose_salt(prompt, options.salt)
        params = params.clone()  # the caller's may change, and may have
        params.check()
        name = request_id if request_id is not None else next(self._names)
        tenant = Tenant(salt, params.similar_images and params.is_stored)
        ready = self._inputs.process(prompt, tenant)
        group = RequestGroup(
            name,
            ready.text,
            list(ready.token_ids),
            params,
            time.perf_counter(),
            ready.extras,
            ready.images,
            priority,
            self._token_text if params.detokenize else None,
        )
        if adapter is not None:
            group.adapter = self._adapters.find(adapter)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None]
        group.requests = [
            self._answer(group, index, salt, processors)
            for index, processors in enumerate(
                self._processors.make(params, group.prompt_token_ids)
            )
        ]
        return group

    def _answer(
        self,
        group: RequestGroup,
        index: int,
        salt: str | None,
        processors: tuple[LogitsProcessor, ...],
    ) -> Request:
        params, vocabulary = group.params, self._vocabulary
        sequence = TokenSequence(
            f"{group.request_id}/{index}",
            group.prompt_token_ids,
            adapter=group.adapter.digest if group.adapter is not None else None,
            salt=salt,
            items=group.extras.items if group.extras is not None else (),
            public=self._public,
        )
        sequence.is_stored = params.is_stored
        sampling = SamplingState(
            params,
            group.prompt_token_ids,
            [],
            self._generator(params, index),
            vocabulary.eos_token_ids,
            processors,
        )
        text = OutputText(
            Detokenizer(
                vocabulary.tokenizer if params.detokenize else None,
                params.skip_special_tokens,
                group.prompt_token_ids,
            ),
            params,
            vocabulary.eos_token_ids,
            self._max_model_len,
        )
        request = Request(group, index, sequence, sampling, text)
        if params.logprobs is not None:
            request.logprobs = []
        return request

    def _generator(self, params: SamplingParams, index: int) -> torch.Generator | None:
        """One for each answer: answer i of a request with a seed has the i-th after it."""
        if params.temperature == 0:
            return None
        seed = next(self._seeds) % 2**64 if params.seed is None else params.seed + index
        return torch.Generator().manual_seed(seed)
