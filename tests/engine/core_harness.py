"""An engine core with a fake model, without a frontend."""

import random
import time
from collections.abc import Callable
from typing import Any

from headstart.cache import TokenSequence
from headstart.engine.config import make_config
from headstart.engine.engine import EngineCore
from headstart.engine.params import SamplingParams
from headstart.engine.request import Request, RequestGroup
from headstart.engine.sampling import SamplingState
from headstart.frontend.text import Detokenizer, OutputText
from headstart.models.decoder import DecoderModel
from tests.engine.internals import kv_memory


class CoreHarness:
    """Send requests to an engine core; compare their answers with those of `expected`."""

    def __init__(
        self,
        model: DecoderModel,
        expected: Callable[[list[int], int], list[int]],
        **options: Any,
    ) -> None:
        config = make_config({"debug": True, "block_size": 4, **options})
        self.core = EngineCore(model, None, config)
        self.memory = kv_memory(self.core)
        self.groups: list[RequestGroup] = []
        self._expected = expected

    def submit(self, prompt: list[int], count: int = 5, salt: str | None = None) -> RequestGroup:
        name = f"r{len(self.groups)}"
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        group = RequestGroup(name, None, prompt, params, time.perf_counter())
        group.requests = [
            Request(
                group,
                0,
                TokenSequence(name, prompt, salt=salt),
                SamplingState(params, prompt, [], None, frozenset()),
                OutputText(Detokenizer(None), params, frozenset(), 10**6),
            )
        ]
        self.groups.append(group)
        self.core.submit(group)
        return group

    def finish(self) -> None:
        while self.core.has_unfinished:
            self.core.step()

    def answer(self, group: RequestGroup) -> list[int]:
        return list(group.output().outputs[0].token_ids)

    def run(self, prompt: list[int], count: int = 5) -> int:
        """Check an answer; return how many tokens of the prompt were hit."""
        group = self.submit(prompt, count)
        self.finish()
        assert self.answer(group) == self._expected(prompt, count)
        return group.output().num_cached_tokens or 0

    def run_random(self, draw: random.Random, length: int, most_tokens: int) -> None:
        """Run, abort and preempt requests at random, and check all answers.

        length: of the two texts whose beginnings are prompts. most_tokens: of answers.
        """
        texts = [[draw.randrange(50) for _ in range(length)] for _ in range(2)]
        counts: dict[str, int] = {}
        for _ in range(60):
            for _ in range(draw.randrange(4)):
                text = draw.choice(texts)
                ended = [g for g in self.groups if g.finished]
                turns = [g for g in ended if len(g.prompt_token_ids) < length - 20]
                if turns and draw.random() < 0.4:  # the next turn of a conversation
                    turn = draw.choice(turns)
                    prompt = turn.prompt_token_ids + self.answer(turn)
                else:
                    prompt = text[: draw.randrange(1, length)]
                prompt = [*prompt, *(draw.randrange(50) for _ in range(draw.randrange(3)))]
                count = draw.randrange(1, most_tokens)
                group = self.submit(prompt, count, salt=draw.choice([None, None, "s"]))
                counts[group.request_id] = count
            for _ in range(draw.randrange(6)):
                if self.core.has_unfinished:
                    self.core.step()
            if draw.random() < 0.1 and self.groups:
                self.core.abort(draw.choice(self.groups).request_id)
            if draw.random() < 0.03:
                self.core.reset_prefix_cache(reset_running_requests=True)
        self.finish()
        for group in self.groups:
            expected = self._expected(group.prompt_token_ids, counts[group.request_id])
            answer, reason = self.answer(group), group.requests[0].finish_reason
            assert answer == expected[: len(answer)]
            assert reason == "abort" or len(answer) == len(expected), reason
        assert not self.core.manager.sequences
