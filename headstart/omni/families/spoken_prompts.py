"""Prompts with audio and images, a cache of their embeddings, and the thinker's stage."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.cache import MultiModalItem
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import (
    GivenRows,
    PlacedRows,
    PreparedPrompt,
    PromptExtras,
    RotaryPositions,
)
from headstart.errors import RequestError
from headstart.frontend.images.decoding import decode_image
from headstart.omni.content_cache import ContentCache, content_digest
from headstart.omni.engine_stage import EngineStage
from headstart.omni.feeds import Feed, PromptFeed, StagePrompt
from headstart.omni.graph import StageNode
from headstart.omni.models.inputs import Media, Placed, as_items, read_features
from headstart.omni.models.stage_decoder import StageDecoder
from headstart.omni.output_cache import OutputCache
from headstart.omni.params import SpokenPrompt
from headstart.omni.stage import OmniRequest
from headstart.omni.stage_options import stage_config

__all__ = ["SpokenPrompts"]

TEXT = SamplingParams(max_tokens=1024, temperature=0.0)
"""A thinker's default sampling parameters."""


class HearingModel(Protocol):
    """The part of a model's interface that its prompts need."""

    media: Media

    def encode(self, placed: Placed) -> Tensor:
        """The rows that replace an item's placeholders, `[length, width]`."""
        ...

    def positions(
        self, token_ids: Sequence[int], features: Mapping[str, Tensor]
    ) -> tuple[Tensor, int]:
        """Rotary positions int64 `[3, tokens]`, and the offset of later tokens' positions."""
        ...


class SpokenPrompts:
    """Makes prompts for one model; keeps the embeddings of audio and images in `cache`.

    They outlive the process where the blocks of the thinker do, which this makes.
    """

    def __init__(self, model: HearingModel, cache: OutputCache) -> None:
        self._model = model
        self._cache = cache
        self._encoded = ContentCache(cache, "encoder")

    def make_thinker(
        self,
        node: StageNode,
        decoder: StageDecoder,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> EngineStage:
        """The stage that generates the text answer to such prompts."""
        stage = EngineStage(node.spec, decoder, _think, stage_config(node), self._cache, tokenizer)
        tiers = stage.engine.tiers
        if tiers is not None:
            self._encoded.keep(tiers.image_rows, stage.engine.manager.names.model)
        return stage

    def prepare(
        self, text: PreparedPrompt, given: Mapping[str, Any], salt: str | None
    ) -> SpokenPrompt:
        """A prompt with its audio and images in place. Raises RequestError.

        given: `features` as transformers' processor makes them, or `audio` and `images`. An item
        that was encoded before under the same salt is not encoded again.
        """
        media = self._model.media
        features = read_features(given.get("features", {}))
        images = [_as_rgb(image) for image in as_items(given.get("images", []))]
        sounds = as_items(given.get("audio", []))
        for name, made in (("audio", media.hear(sounds)), ("images", media.see(images))):
            if made.keys() & features.keys():
                raise RequestError(f"the prompt has {name}, and features of {name}; give one")
            features |= made
        token_ids = media.expand(text.token_ids, features)
        placed = media.locate(token_ids, features)
        items, rows = [], []
        for thing in placed:
            digest = content_digest(thing.kind, *(thing.content[k] for k in sorted(thing.content)))
            items.append(MultiModalItem(digest, thing.offset, thing.length))
            rows.append(PlacedRows(thing.offset, self._encode(thing, digest, salt)))
        positions = None
        if placed:
            table, delta = self._model.positions(token_ids, features)
            positions = RotaryPositions(table.numpy(), delta)
        extras = PromptExtras(tuple(items), GivenRows(rows), positions) if placed else None
        return SpokenPrompt(PreparedPrompt(token_ids, text.text, extras), features)

    def _encode(self, placed: Placed, digest: bytes, salt: str | None) -> Tensor:
        try:
            rows = self._encoded.recall(digest, lambda: self._model.encode(placed), salt)
        except (RuntimeError, ValueError, IndexError) as error:  # features of another model
            raise RequestError(
                f"an {placed.kind} cannot be encoded: {type(error).__name__}: {error}"
            ) from error
        if len(rows) != placed.length:
            raise RequestError(
                f"an {placed.kind} of {placed.length} placeholders became {len(rows)} embeddings"
            )
        return rows


def _as_rgb(image: Any) -> Any:
    """Return a Pillow image as models see it, and anything else unchanged. Raises RequestError."""
    try:
        from PIL import Image
    except ImportError:
        return image
    return decode_image(image, sys.maxsize) if isinstance(image, Image.Image) else image


def _think(request: OmniRequest) -> Feed:
    """A thinker's feed of the prepared prompt."""
    params = request.params.get("thinker", TEXT)
    return PromptFeed(StagePrompt(request.prompt.prepared, params, request.salt))
