"""Orders of messages for templates that refuse some orders or drop messages."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headstart.frontend.chat.conversation import ConversationMemory
from headstart.frontend.chat.messages import TemplateOptions
from tests.tiny_tokenizers import CHATML, TINY_TOKENIZERS

TURN = "{{- '<' + m.role + '>' + m.content + '</>' -}}"
CALLS = "{%- for c in (m.tool_calls or []) -%}{{- c | tojson -}}{%- endfor -%}"
LOOP = "{%- for m in messages -%}CHECK" + TURN.replace("+ '</>'", "") + CALLS + "{{- '</>' -}}"
LOOP += "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<assistant>' -}}{%- endif -%}"
REFUSES = "{{- raise_exception('no') -}}{%- endif -%}"
STRICT = {
    "system_first": LOOP.replace(
        "CHECK", "{%- if m.role == 'system' and not loop.first -%}" + REFUSES
    ),
    "no_system": LOOP.replace("CHECK", "{%- if m.role == 'system' -%}" + REFUSES),
    "drops_system": LOOP.replace("CHECK", "{%- if m.role != 'system' or loop.first -%}").replace(
        "{%- endfor -%}{%- if add", "{%- endif -%}{%- endfor -%}{%- if add"
    ),
    # One system message, then user and assistant by turns, calls and their results aside.
    "alternating": "{%- set ns = namespace(user=true, last='') -%}"
    + LOOP.replace(
        "CHECK",
        "{%- if m.role == 'system' and not loop.first -%}"
        + REFUSES
        + "{%- if ns.last == 'tool' and m.role not in ['tool', 'assistant'] -%}"
        + REFUSES
        + "{%- if m.role == 'user' or m.role == 'assistant' and not m.tool_calls -%}"
        "{%- if (m.role == 'user') != ns.user -%}"
        + REFUSES
        + "{%- set ns.user = not ns.user -%}{%- endif -%}{%- set ns.last = m.role -%}",
    ),
}
STRICT["no_system_last"] = (
    "{%- if messages[-1].role == 'system' -%}" + REFUSES + LOOP.replace("CHECK", "")
)
STRICT["user_last"] = "{%- if messages[-1].role == 'system' -%}" + REFUSES + STRICT["system_first"]
STRICT["no_system_alternating"] = STRICT["alternating"].replace(" and not loop.first", "")
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def memory_of(template: str) -> ConversationMemory:
    return ConversationMemory(TINY_TOKENIZERS["byte_level"](chat_template=template))


def conversation(seed: int) -> list[dict[str, Any]]:
    """Return messages in a random order; a call and its result stay together."""
    draw = random.Random(seed)
    messages: list[dict[str, Any]] = []
    for place in range(draw.randint(1, 9)):
        role = draw.choice(["system", "user", "user", "assistant", "assistant", "tool"])
        text = f"text{place}."
        if role == "tool":
            if not messages or messages[-1]["role"] == "assistant":
                messages.append({"role": "user", "content": f"ask{place}."})
            called = {"role": "assistant", "content": f"call{place}.", "tool_calls": [CALL]}
            messages.append(called)
            messages.append({"role": "tool", "tool_call_id": CALL["id"], "content": text})
            messages.append({"role": "assistant", "content": f"so{place}."})
        else:
            messages.append({"role": role, "content": text})
    return messages


@pytest.mark.parametrize("name", sorted(STRICT))
def test_a_strict_template_gets_an_accepted_order(name: str) -> None:
    """The prompt has all texts in order, and later turns do not change its beginning."""
    memory = memory_of(STRICT[name])
    whole = TemplateOptions(add_generation_prompt=False)
    for seed in range(60):
        messages = conversation(seed)
        before = ""
        for end in range(1, len(messages) + 1):
            rendered = memory.render(messages[:end], whole)
            places = [rendered.index(message["content"]) for message in messages[:end]]
            assert places == sorted(places), (seed, rendered)
            assert rendered.startswith(before), (seed, before, rendered)
            before = rendered.removesuffix("</>").removesuffix("\n</system>")
            if messages[end - 1].get("tool_calls"):
                before = before[: before.rindex(messages[end - 1]["content"])]
            before = before.removesuffix("</><user>")  # the empty turn after only system messages


def test_a_lenient_template_gets_messages_unchanged() -> None:
    memory = memory_of(CHATML)
    for seed in range(60):
        messages = conversation(seed)
        sent = "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in messages
        )
        assert memory.render(messages) == sent + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "roles", "rendered"),
    [
        ("system_first", "SSU", "<system>0\n\n1</><user>2</>"),
        ("system_first", "SUSU", "<system>0</><user>1</><user><system>\n2\n</system></><user>3</>"),
        ("no_system", "SUAU", "<user>0</><user>1</><assistant>2</><user>3</>"),
        ("drops_system", "SSU", "<system>0\n\n1</><user>2</>"),
        ("alternating", "UUA", "<user>0\n\n1</><assistant>2</>"),
        ("alternating", "UAAU", "<user>0</><assistant>1\n\n2</><user>3</>"),
        ("alternating", "SAU", "<system>0</><user></><assistant>1</><user>2</>"),
        ("alternating", "UASU", "<user>0</><assistant>1</><user><system>\n2\n</system>\n\n3</>"),
        ("user_last", "SS", "<system>0\n\n1</><user></>"),
        ("no_system_alternating", "SSUA", "<user>0\n\n1\n\n2</><assistant>3</>"),
    ],
)
def test_the_order_for_each_template(name: str, roles: str, rendered: str) -> None:
    names = {"S": "system", "U": "user", "A": "assistant"}
    messages = [{"role": names[role], "content": str(place)} for place, role in enumerate(roles)]
    options = TemplateOptions(add_generation_prompt=False)
    assert memory_of(STRICT[name]).render(messages, options) == rendered


def test_a_users_turn_after_a_tool_result() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "rain"}
    turns = [{"role": "user", "content": "look"}, call, result, {"role": "user", "content": "so?"}]
    assert "<tool>rain\n\nso?</>" in memory_of(STRICT["alternating"]).render(turns)
    assert "</><assistant></><user>so?</>" in memory_of(STRICT["alternating"]).render(
        [*turns[:2], turns[3]]
    )
    assert "<tool>rain</><user>so?</>" in memory_of(STRICT["system_first"]).render(turns)


def test_merged_assistant_turns_lose_nothing() -> None:
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "I will."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    rendered = memory_of(STRICT["alternating"]).render(turns)
    [_, turn] = rendered.split("<assistant>")[:2]
    assert turn.startswith('I will.{"id": "call00001"')


def test_calls_without_results_and_turns_apart_from_their_calls() -> None:
    """Any order in which each result follows its call; a result may also come first."""
    letters = {"S": "system", "U": "user", "A": "assistant", "C": "assistant", "T": "tool"}
    memory = memory_of(STRICT["alternating"])
    for roles in ("ACU", "ACA", "UACTA", "UCUCA", "UACTACTA", "TA", "TCU", "UACSA", "CTU", "SCCTU"):
        messages = [
            {
                "role": letters[role],
                "content": f"text{place}.",
                "tool_calls": [CALL] * (role == "C"),
            }
            for place, role in enumerate(roles)
        ]
        rendered = memory.render(messages)
        assert all(message["content"] in rendered for message in messages)


def test_parts_of_merged_turns() -> None:
    turn = "{%- for p in m.content -%}{{- '[' + p.text + ']' -}}{%- endfor -%}"
    template = STRICT["alternating"].replace("'<' + m.role + '>' + m.content ", "'<>'")
    template = template.replace(CALLS, turn)
    options = TemplateOptions(chat_template_content_format="openai", add_generation_prompt=False)
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert memory_of(template).render(turns, options) == "<>[a][\n\n][b]</>"
