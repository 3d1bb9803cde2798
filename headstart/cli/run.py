"""The questions of `headstart run`: prompts, files, images and standard input, put together."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.conversation import join_content, read_document, read_image, read_text
from headstart.cli.progress import describe_wait, waiting
from headstart.cli.streams import as_typed, hiding_typed, reading_stdin
from headstart.engine.config import EngineConfig
from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.errors import RequestError
from headstart.imports import load_module
from headstart.models.config_values import context_bound
from headstart.models.files import BUILT_IN, read_json

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.params import SamplingParams
    from headstart.frontend.llm import LLM
    from headstart.frontend.streams import RequestStream

STDIN = "-"
_MODEL_NAME = re.compile(
    r"[\w.-]+/[\w.-]+(?::[\w.-]+)?|[a-z][\w.-]*:(?:latest|\d[\w.-]*)|.*\.gguf|" + BUILT_IN
)


def names_model(prompt: str) -> bool:
    """Return True if a prompt looks like the name of a model, which other programs take there."""
    return _MODEL_NAME.fullmatch(prompt) is not None


@dataclass(frozen=True)
class Questions:
    """Texts to answer one after another, all about the same documents and images.

    raw: complete the texts without the model's chat template. form: of the answers, None for any
    text.
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
        """Yield a request for each text. Raises RequestError."""
        params = replace(params, structured_outputs=self.form)
        tokenizer = llm.get_tokenizer()
        is_chat = not self.raw and tokenizer is not None and bool(tokenizer.chat_template)
        if not is_chat and (self.system is not None or self.images):
            raise RequestError("--system and --image need a model with a chat template")
        system: list[dict[str, Any]] = []
        if self.system is not None:
            system.append({"role": "system", "content": self.system})
        for text in self.texts:
            if is_chat:
                content = join_content(self.documents, self.images, text)
                messages = [*system, {"role": "user", "content": content}]
                yield llm.stream_chat(messages, params, adapter=adapter)
            else:
                yield llm.stream("".join([*self.documents, text]), params, adapter=adapter)

    def check_images(self, folder: Path) -> None:
        """Raise RequestError for images where the model in a folder takes none."""
        settings = folder / "config.json"
        if not self.images or not settings.is_file():
            return
        names = {"vision_config", "image_token_id", "image_token_index"}
        if not names & read_json(settings).keys():
            raise RequestError("the model takes text alone: --image needs a model that sees")

    def check_length(self, folder: Path, config: EngineConfig) -> None:
        """Raise RequestError for a text that is longer than the context, before loading the model.

        The engine reports a prompt that only its chat template makes too long.
        """
        settings = folder / "config.json"
        limits = [config.max_model_len]
        if settings.is_file():
            limits.append(context_bound(read_json(settings)))
        if config.num_blocks is not None:
            limits.append(config.num_blocks * config.block_size)
        limit = min((limit for limit in limits if limit is not None), default=None)
        longest = "".join([*self.documents, max(self.texts, key=len)])
        if limit is None or len(longest.encode()) < limit:
            return  # a token has a byte at least
        with hiding_typed(), waiting(describe_wait("counting the tokens of the prompt")):
            # Reading a tokenizer takes a second of imports, which the model needs in any case.
            max_length = load_module("headstart.frontend.text")
            max_length.check_text_fits(folder, longest, limit)

    def check(self, answers: Sequence[RequestOutput]) -> None:
        """Raise RequestError for an answer that was cut before it had its form."""
        if self.form is None:
            return
        for number, answer in enumerate(answers, start=1):
            try:
                # Python's int() refuses more than 4,300 digits.
                json.loads(answer.outputs[0].text, parse_int=str)
            except ValueError as error:
                raise RequestError(
                    f"answer {number} was cut and is no whole JSON; allowed: a higher --max-tokens "
                    f"than {len(answer.outputs[0].token_ids)}, no --stop"
                ) from error


def read_questions(prompts: Sequence[str], options: dict[str, Any]) -> Questions:
    """Take the options about questions out of `options`, and read what they name.

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
    return Questions(
        texts or ("",),
        documents,
        tuple(read_image(Path(as_typed(image)), limit) for image in images),
        None if system is None else as_typed(system),
        raw,
        None if schema is None else _read_schema(Path(as_typed(schema))),
    )


def _read_schema(path: Path) -> StructuredOutputsParams:
    """Return the form of answers that are JSON by a file's schema. Raises RequestError.

    White space between JSON's tokens is excluded: small models write little else.
    """
    text = read_text(path)
    try:
        form = StructuredOutputsParams(json=text, disable_any_whitespace=True)
        with hiding_typed(), waiting(describe_wait(f"compiling the schema in {path}")):
            # The compiler brings torch with it, which the model needs in any case.
            load_module("headstart.frontend.grammar").check_form(form.form)
    except RequestError as error:
        text = str(error).replace("structured_outputs.json", str(path))
        raise RequestError(f"--json: {text}") from error
    return form


def _read_stdin() -> str:
    with reading_stdin():
        text = sys.stdin.read()
    if not text.strip():
        raise RequestError("standard input is empty; allowed: a text")
    return text
