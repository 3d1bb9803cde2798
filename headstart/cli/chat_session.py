"""One chat with a model: its questions, its replies, and the turns that no longer fit."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rich.text import Text

from headstart.cli.conversation import Content, Conversation, Turn
from headstart.cli.pool_picture import PoolPicture
from headstart.cli.progress import count
from headstart.cli.reply import print_reply
from headstart.cli.streams import columns_of, handling, keeping_typed, note, tell_error
from headstart.engine.params import SamplingParams
from headstart.errors import EngineError, RequestError
from headstart.validation import in_one_line

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.frontend.llm import LLM
    from headstart.frontend.streams import RequestStream

_ROOM = 256  # tokens of a reply that a prompt must leave room for; a longer one ends at the limit


class Chat:
    """A conversation with a model, printed in a terminal.

    plain: show replies as they are, not as Markdown. adapter: the name of the adapter that answers,
    None for the model itself. `last` is the last turn's output, and `changed` the command that has
    changed the conversation since.
    """

    def __init__(
        self,
        llm: LLM,
        model: str,
        params: SamplingParams,
        conversation: Conversation,
        *,
        plain: bool = False,
        adapter: str | None = None,
    ) -> None:
        self.llm = llm
        self.model = model
        self.params = params
        self.picture = PoolPicture(llm.manager)
        self.last: RequestOutput | None = None
        self.changed = ""
        self._plain = plain
        self._adapter = adapter
        self._asked = 0
        self.take_up(conversation)

    def take_up(self, conversation: Conversation) -> None:
        """Continue this conversation; replies stay the tokens that they were generated as."""
        self.conversation = conversation
        if replies := conversation.reply_token_ids():
            with suppress(RequestError):  # the next turn reports what is wrong
                self.llm.recall_chat(conversation.messages("", 0)[:-1], replies)

    def tell_taken_up(self, name: str) -> None:
        """Show how long the conversation is, the last question, and its reply."""
        size = count(len(self.conversation.turns), "turn")
        if messages := self.conversation.messages("", 0)[:-1]:
            try:
                stream = self.llm.stream_chat(messages, self.params, add_generation_prompt=False)
                size += f", {len(stream.prompt_token_ids):,} tokens"
            except RequestError as error:  # the next turn leaves out what does not fit
                size += f", of which not all fit: {error}"
        note(f"{name}: {size}; the line below the next reply says how many of them are cached")
        if self.conversation.turns:
            columns = columns_of(sys.stderr) or 80
            for line in filter(None, self.conversation.turns[-1].lines()):
                shown = Text(in_one_line(line))
                shown.truncate(columns, overflow="ellipsis")
                note(shown.plain)

    def say(self, text: str) -> None:
        """Answer a message."""
        is_answered = False
        try:
            shown = tuple(self.conversation.waiting)
            is_answered = self._answer(self.conversation.ask(text), shown)
        finally:
            if is_answered:
                self.conversation.drop_waiting()
            elif self.conversation.waiting:
                names = ", ".join(self.conversation.waiting)
                note(f"still with your next message: {names}; /undo takes it back")

    def retry(self) -> None:
        """Answer the last question again. Raises RequestError if there is none."""
        turn = self.conversation.take_back()
        if not self._answer(turn.question, turn.shown):
            self.conversation.turns.append(turn)

    def set(self, **values: Any) -> None:
        """Change sampling parameters. Raises RequestError; nothing is changed then."""
        self.params = replace(self.params, **values)

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text. Raises RequestError if no prompt has room for them."""
        self.llm.check_length("the document", text)
        tokenizer = self.llm.get_tokenizer()
        assert tokenizer is not None
        tokens = len(tokenizer.encode(text, add_special_tokens=False, verbose=False))
        if tokens >= self.llm.max_model_len:
            raise RequestError(
                f"the document has {tokens:,} tokens; the context holds {self.llm.max_model_len:,}"
            )
        return tokens

    def count_image_tokens(self, image: dict[str, Any]) -> int:
        """Return the tokens of a message with an image alone. Raises RequestError."""
        if not self.llm.takes_images:
            raise RequestError(f"{self.model} takes text alone")
        alone = Conversation(images=[image])
        return len(self._stream(alone, alone.ask(""), 0).prompt_token_ids)

    def _answer(self, question: Content, shown: tuple[str, ...]) -> bool:
        """Answer a question; return True if there is a reply, which becomes a turn."""
        try:
            stream = self._fit(question)
            self._asked += 1
            # Ctrl-C ends the reply after the current step, and nothing else.
            with keeping_typed(), handling(lambda *_: stream.abort(), signal.SIGINT):
                output = print_reply(stream, plain=self._plain)
        except (RequestError, EngineError) as error:
            tell_error(error)
            return False
        self.last, self.changed = output, ""
        self.picture.look(self._asked)
        answer = output.outputs[0]
        is_whole = answer.finish_reason != "abort"
        if not is_whole and answer.text:
            note("[interrupted: the question and this part of the reply stay, and both are cached]")
        elif not is_whole:
            note(
                "[interrupted before the reply began: the question is taken back, and what was "
                "read is cached]"
            )
        if answer.text or is_whole:
            turn = Turn(question, answer.text, tuple(answer.token_ids), shown)
            self.conversation.turns.append(turn)
        return bool(answer.text or is_whole)

    def _fit(self, question: Content) -> RequestStream:
        """Return the request for a question; where the context is full, drop the oldest turns.

        All that is left is read again, so the rest may take half of the context only. Raises
        RequestError for a question that does not fit alone; nothing is dropped then.
        """
        conversation, limit = self.conversation, self.llm.max_model_len
        room = min(self.params.max_tokens or limit, _ROOM, limit // 4)
        start, stop = conversation.start, len(conversation.turns)
        try:
            stream = self._stream(conversation, question, start)
            if start == stop or len(stream.prompt_token_ids) + room <= limit:
                return stream
        except RequestError:
            if start == stop:
                raise
        stream = self._stream(conversation, question, stop)
        for first in range(start + 1, stop):
            with suppress(RequestError):
                longer = self._stream(conversation, question, first)
                if len(longer.prompt_token_ids) <= limit // 2:
                    stream, stop = longer, first
                    break
        conversation.start = stop
        self._tell_left_out(stream, stop - start)
        return stream

    def _stream(self, conversation: Conversation, question: Content, first: int) -> RequestStream:
        messages = conversation.messages(question, first)
        return self.llm.stream_chat(messages, self.params, adapter=self._adapter)

    def _tell_left_out(self, stream: RequestStream, turns: int) -> None:
        cached: list[int] = []
        if self.last is not None:
            cached = [*self.last.prompt_token_ids, *self.last.outputs[0].token_ids]
        pairs = zip(cached, stream.prompt_token_ids, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        oldest = f"{turns} oldest turns are" if turns > 1 else "oldest turn is"
        note(
            f"[the context of {self.llm.max_model_len:,} tokens is full: the {oldest} left "
            f"out with all documents there, and {len(stream.prompt_token_ids) - same:,} tokens are "
            "to be read]"
        )
