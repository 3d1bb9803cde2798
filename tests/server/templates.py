"""The embedded model with chat templates of models that call tools, and images."""

from __future__ import annotations

import base64
import json
import shutil
from io import BytesIO
from pathlib import Path

from tests.small_demos import shallow_built_in
from tests.tiny_vision import make_image

__all__ = ["HERMES", "LLAMA", "MISTRAL", "THINKING", "model_with", "png_of"]


_TURNS = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message.reasoning_content -%}"
    "{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- message['content'] -}}"
    "{%- if message.tool_calls -%}CALLS{%- endif -%}"
    "{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>OPENING' -}}{%- endif -%}"
)
_TOOLS = (
    "{%- if tools -%}{{- '<|system|>' -}}{%- for tool in tools -%}{{- tool | tojson -}}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endif -%}"
)
_HERMES_CALLS = (
    "{%- for call in message.tool_calls -%}{%- if message.content or not loop.first -%}"
    "{{- '\\n' -}}{%- endif -%}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- call.function.arguments | tojson -}}{{- '}\\n</tool_call>' -}}{%- endfor -%}"
)
_LLAMA_CALLS = (
    "{%- for call in message.tool_calls -%}"
    '{{- \'{"name": "\' + call.function.name + \'", "parameters": \' -}}'
    "{{- call.function.arguments | tojson -}}{{- '}' -}}{%- endfor -%}"
)
_MISTRAL_CALLS = (
    "{{- '[TOOL_CALLS][' -}}{%- for call in message.tool_calls -%}"
    "{%- if call.id | length != 9 -%}{{- raise_exception('an id has 9 letters') -}}{%- endif -%}"
    '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' -}}'
    "{{- call.function.arguments | tojson -}}{{- '}' -}}"
    "{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}{%- endfor -%}{{- ']' -}}"
)


def _template(calls: str, opening: str = "") -> str:
    return _TOOLS + _TURNS.replace("CALLS", calls).replace("OPENING", opening)


HERMES = _template(_HERMES_CALLS).replace("<think>", "").replace("</think>", "")
LLAMA = HERMES.replace(_HERMES_CALLS, _LLAMA_CALLS)
MISTRAL = HERMES.replace(_HERMES_CALLS, _MISTRAL_CALLS)
THINKING = _template(_HERMES_CALLS, "<think>\\n")
"""Template of a model whose prompts start its reasoning."""


def model_with(
    template: str, folder: Path, special: tuple[str, ...] = (), source: Path | None = None
) -> Path:
    """Copy a model, by default the shallow one, with another chat template.

    special: texts that become special tokens in place of others.
    """
    for file in (source or shallow_built_in()).iterdir():
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(template)
    if special:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        size = len(tokenizer["model"]["vocab"])
        texts = dict(zip(range(size - len(special), size), special, strict=True))
        vocabulary = tokenizer["model"]["vocab"]
        merges = tokenizer["model"]["merges"]
        removed = {text for text, i in vocabulary.items() if i in texts}
        tokenizer["model"]["merges"] = [m for m in merges if "".join(m) not in removed]
        tokenizer["model"]["vocab"] = {t: i for t, i in vocabulary.items() if i not in texts}
        tokenizer["model"]["vocab"] |= {text: i for i, text in texts.items()}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"] += [
            {"id": i, "content": text, "special": True, **plain} for i, text in texts.items()
        ]
        path.write_text(json.dumps(tokenizer))
    return folder


def png_of(seed: int) -> str:
    """Return a PNG in base64."""
    buffer = BytesIO()
    make_image(seed).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
