"""Stages and prompts that all families of omni models share."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headstart.cache import MultiModalItem
from headstart.engine.params import SamplingParams
from headstart.engine.request import (
    PlacedRows,
    PrecomputedEmbeddings,
    PreparedPrompt,
    PromptExtras,
)
from headstart.errors import DamagedModelError, RequestError
from headstart.models.tokenizer import load_tokenizer
from headstart.omni.engine_stage import EngineStage, Feed, PromptFeed, StagePrompt
from headstart.omni.media import as_items, as_rgb, read_features
from headstart.omni.output_cache import ContentCache, OutputCache, content_digest
from headstart.omni.params import SpokenPrompt
from headstart.omni.pipeline import Factory, StageNode, stage_config
from headstart.omni.stage import Input, OmniRequest, Stage
from headstart.omni.stage_decoder import OmniModel


class OmniStages:
    """Makes the stages of one loaded model, and prompts for these stages.

    audio, codes: the outputs with the waveform and the codes. spelling: the text of the placeholder
    of a sound ("audio") and of an image ("image"). A request has the option `voice` for `talker`.
    Embeddings of audio and images are cached in `cache`, and in the thinker's tiers if it has any.
    """

    graph: str
    audio: Input
    codes: Input
    text_params = SamplingParams(max_tokens=1024, temperature=0.0)
    speech_params: SamplingParams
    spelling: Mapping[str, str]
    factories: Mapping[str, Factory]

    def __init__(self, model: OmniModel, folder: str | Path, cache: OutputCache) -> None:
        if not model.voices:
            raise DamagedModelError(f"{folder} has no voices (speaker_id)")
        self.model = model
        self._cache = cache
        self._encoded = ContentCache(cache, "encoder")
        self.tokenizer = load_tokenizer(folder)
        self.voices = tuple(model.voices)

    def prepare(
        self, text: PreparedPrompt, inputs: Mapping[str, Any], salt: str | None
    ) -> SpokenPrompt:
        """Return a prompt with placeholders for its audio and images. Raises RequestError.

        inputs: `features` of transformers' processor, or `audio` and `images`. An item that was
        encoded before with the same salt is not encoded again.
        """
        media = self.model.media
        features = read_features(inputs.get("features", {}))
        images = [as_rgb(image) for image in as_items(inputs.get("images", []))]
        sounds = as_items(inputs.get("audio", []))
        for name, encoded_items in (
            ("audio", media.encode_audio(sounds)),
            ("images", media.encode_images(images)),
        ):
            if encoded_items.keys() & features.keys():
                raise RequestError(
                    f"the prompt has {name}, and features of {name}; allowed: one of them"
                )
            features |= encoded_items
        token_ids, placed = media.place(text.token_ids, features)
        items, rows = [], []
        for item in placed:
            content = (item.content[name] for name in sorted(item.content))
            digest = content_digest(item.kind, *content)
            items.append(MultiModalItem(digest, item.offset, item.length))
            try:
                encoded = self._encoded.recall(digest, partial(self.model.encode, item), salt)
            except (RuntimeError, ValueError, IndexError) as error:  # features of another model
                raise RequestError(
                    f"an {item.kind} cannot be encoded: {type(error).__name__}: {error}"
                ) from error
            if len(encoded) != item.length:
                raise RequestError(
                    f"an {item.kind} of {item.length} placeholders became {len(encoded)} embeddings"
                )
            rows.append(PlacedRows(item.offset, encoded))
        extras = None
        if placed:
            positions = self.model.positions(token_ids, features)
            extras = PromptExtras(tuple(items), PrecomputedEmbeddings(rows), positions)
        return SpokenPrompt(PreparedPrompt(token_ids, text.text, extras), features)

    def make_thinker(self, node: StageNode) -> Stage:
        """Return the stage that generates the text answer."""

        def feed(request: OmniRequest) -> Feed:
            params = request.params.get("thinker", self.text_params)
            return PromptFeed(StagePrompt(request.prompt.prepared, params, request.salt))

        decoder, config = self.model.thinker(), stage_config(node)
        stage = EngineStage(node.spec, decoder, feed, config, self._cache, self.tokenizer)
        tiers = stage.engine.tiers
        if tiers is not None:
            self._encoded.keep(tiers.image_loads, stage.engine.manager.hasher.model)
        return stage

    def voice(self, request: OmniRequest) -> str:
        """Return a request's voice, by default the first voice. Raises RequestError."""
        name = request.options.get("talker", {}).get("voice") or self.voices[0]
        if name not in self.voices:
            raise RequestError(f"there is no voice {name!r}; allowed: {', '.join(self.voices)}")
        return str(name)
