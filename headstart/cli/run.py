"""What `headstart run` asks: prompts, files, images and standard input, put together."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.contents import join_content, read_document, read_image, read_text
from headstart.cli.progress import describe_check, waiting
from headstart.cli.streams import as_typed, hiding_typed, reading_stdin
from headstart.engine.config import EngineConfig
from headstart.errors import RequestError
from headstart.frontend.structured.params import StructuredOutputsParams
from headstart.imports import load_module
from headstart.models.context_length import context_bound
from headstart.models.files import BUILT_IN, read_json

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.params import SamplingParams
    from headstart.frontend.llm import LLM
    from headstart.frontend.streams import RequestStream

__all__ = ["Questions", "names_model", "read_questions"]

STDIN = "-"


def names_model(prompt: str) -> bool:
    """Whether a prompt looks like the name of a model, as others' command lines have it there."""
    is_name = (
        re.fullmatch(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?|[a-z][\w.-]*:(?:latest|\d[\w.-]*)", prompt)
        is not None
    )
    return prompt == BUILT_IN or is_name or prompt.endswith(".gguf")


@dataclass(frozen=True)
class Questions:
    """Texts to answer one after another, all about the same documents and images.

    raw: the texts are completed as they are, without the model's chat template. form: what the
    answers must be, None for any text.
    """

    texts: tuple[str, ...]
    documents: tuple[str, ...] = ()
    images: tuple[dict[str, Any], ...] = ()
    system: str | None = None
    raw: bool = False
    form: StructuredOutputsParams | None = None

    def streams(
        self, llm: LLM, params: SamplingParams, adapter: str | None
    ) -> Iterator[RequestStream]:
        """A request for each text, for the adapter of a name if one is given.

        Raises RequestError.
        """
        params = replace(params, structured_outputs=self.form)
        tokenizer = llm.get_tokenizer()
        is_chat = not self.raw and tokenizer is not None and bool(tokenizer.chat_template)
        if not is_chat and (self.system is not None or self.images):
            raise RequestError("--system and --image need a model with a chat template")
        for text in self.texts:
            if is_chat:
                yield llm.stream_chat(self._messages(text), params, adapter=adapter)
            else:
                yield llm.stream("".join([*self.documents, text]), params, adapter=adapter)

    def check_images(self, folder: Path) -> None:
        """Raise RequestError for images where the model in a folder takes none."""
        settings = folder / "config.json"
        if not self.images or not settings.is_file():
            return
        if (
            not {"vision_config", "image_token_id", "image_token_index"}
            & read_json(settings).keys()
        ):
            raise RequestError("the model takes text alone: --image needs a model that sees")

    def check_length(self, folder: Path, config: EngineConfig) -> None:
        """Raise RequestError for what no context of the model in a folder has room for.

        Before the model is loaded: its tokenizer and its configuration are enough. What is only a
        little too long, with what a chat template adds, is told by the engine.
        """
        settings = folder / "config.json"
        told = context_bound(read_json(settings)) if settings.is_file() else None
        limits = [told, config.max_model_len]
        if config.num_blocks is not None:
            limits.append(config.num_blocks * config.block_size)
        limit = min((one for one in limits if one is not None), default=None)
        longest = "".join([*self.documents, max(self.texts, key=len)])
        if limit is None or len(longest.encode()) < limit:
            return  # a token has a byte at least
        with hiding_typed(), waiting(describe_check("counting the tokens of the prompt")):
            # What reads a tokenizer takes a second of imports, which the model needs in any case.
            load_module("headstart.frontend.text.max_length").check_text_fits(
                folder, longest, limit
            )

    def check(self, answers: Sequence[RequestOutput]) -> None:
        """Raise RequestError for an answer that was cut before it had its form."""
        if self.form is None:
            return
        for number, answer in enumerate(answers, start=1):
            text = answer.outputs[0].text
            try:
                json.loads(text, parse_int=str)  # int() refuses more than 4,300 digits
            except ValueError as error:
                raise RequestError(
                    f"answer {number} was cut and is no whole JSON; allowed: a higher --max-tokens "
                    f"than {len(answer.outputs[0].token_ids)}, no --stop"
                ) from error

    def _messages(self, text: str) -> list[dict[str, Any]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        content = join_content(self.documents, self.images, text)
        return [*system, {"role": "user", "content": content}]


def read_questions(prompts: Sequence[str], options: dict[str, Any]) -> Questions:
    """What the arguments of `run` ask; the options for it are taken out of `options`.

    Raises RequestError.
    """
    files, images = options.pop("files"), options.pop("images")
    system, raw, schema = options.pop("system"), options.pop("raw"), options.pop("json")
    if raw and (images or system is not None):
        raise RequestError("--raw takes no chat template, which --system and --image need")
    if [*prompts, *files].count(STDIN) > 1:
        raise RequestError(f"{STDIN} stands more than once: standard input can be read once")
    documents = tuple(
        _read_stdin() if file == STDIN else read_document(Path(as_typed(file))) for file in files
    )
    texts = tuple(_read_stdin() if text == STDIN else as_typed(text) for text in prompts)
    if not texts and not documents:
        if sys.stdin.isatty():
            raise RequestError("no prompt: give one or more, or --file, or text on standard input")
        texts = (_read_stdin(),)
    if not all(text.strip() for text in texts):
        raise RequestError("a prompt is empty; allowed: a text")
    limit = options["max_image_pixels"] or EngineConfig.max_image_pixels
    shown = tuple(read_image(Path(as_typed(image)), limit) for image in images)
    return Questions(
        texts or ("",),
        documents,
        shown,
        None if system is None else as_typed(system),
        raw,
        None if schema is None else _read_schema(Path(as_typed(schema))),
    )


def _read_schema(path: Path) -> StructuredOutputsParams:
    """The form of answers that are JSON by a file's schema. Raises RequestError.

    White space between JSON's tokens is left out: small models like to write nothing else.
    """
    text = read_text(path)
    try:
        form = StructuredOutputsParams(json=text, disable_any_whitespace=True)
        with hiding_typed(), waiting(describe_check(f"compiling the schema in {path}")):
            # What compiles it brings torch with it, which is loaded for the model in any case.
            load_module("headstart.frontend.structured.grammar").check_form(form.form)
    except RequestError as error:
        told = str(error).replace("structured_outputs.json", str(path))
        raise RequestError(f"--json: {told}") from error
    return form


def _read_stdin() -> str:
    with reading_stdin():
        text = sys.stdin.read()
    if not text.strip():
        raise RequestError("standard input is empty; allowed: a text")
    return text
