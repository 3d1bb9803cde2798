"""Display of replies, default sampling, and the contents of saved chats."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

from headstart.cli.chat import COMMANDS, find_command
from headstart.cli.markdown import MarkdownWriter, split_finished
from headstart.cli.messages import Conversation, Turn
from headstart.cli.options import CHAT_SAMPLING, chat_sampling, parse_sampling
from headstart.cli.reply import WrappingWriter
from headstart.cli.terminal import figures
from headstart.engine.outputs import RequestMetrics
from headstart.engine.params import SamplingParams
from headstart.errors import RequestError
from headstart.models.files import BUILT_IN, find_folder
from tests.cli.test_main import call

if TYPE_CHECKING:
    from headstart.cli.chat import Chat

REPLY = "A *word*, and more words.\n\n- one\n\n  more\n\n```\ncode\n\ncode\n```\n\nThe end"


def test_wrapping_does_not_depend_on_the_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    text = "aa bbb cccc dd\neeeeeeeeeeee f \x1b[2J"
    for size in (1, 3, 100):
        with WrappingWriter(8) as writer:
            for end in range(size, len(text) + size, size):
                writer.write(text[:end])
        lines = capsys.readouterr().out.splitlines()
        assert lines == ["aa bbb", "cccc dd", "eeeeeeeeeeee", "f \ufffd[2J"]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_finished_blocks_do_not_depend_on_the_pieces(size: int) -> None:
    blocks, printed = [], 0
    for end in range(size, len(REPLY) + size, size):
        finished, _ = split_finished(REPLY[printed:end])
        blocks += [finished] if finished else []
        printed += len(finished)
    assert "".join(blocks) == REPLY.removesuffix("The end")
    if size == 1:
        assert blocks == [REPLY[:27], REPLY[27:42], REPLY[42:-7]]


def test_markdown_is_rendered() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    with MarkdownWriter(console) as writer:
        for end in range(len(REPLY) + 1):
            writer.write(REPLY[:end])
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "• one" in shown and "```" not in shown.rpartition("• one")[2].rpartition("code")[2]
    assert shown.rstrip().endswith("The end")


@pytest.mark.parametrize(
    ("config", "temperature", "top_p"),
    [
        ({"temperature": 0.3}, 0.3, 1.0),
        ({"temperature": 0.3, "top_p": 0.8}, 0.3, 0.8),
        ({"do_sample": False, "temperature": 0.3}, 0.0, 0.95),
        ({"repetition_penalty": 1.1}, 0.7, 0.95),
        ({}, 0.7, 0.95),
        (None, 0.7, 0.95),
    ],
)
def test_a_chat_uses_the_models_sampling_defaults(
    config: object, temperature: float, top_p: float, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    params = chat_sampling({}, tmp_path)
    assert (params.temperature, params.top_p) == (temperature, top_p)
    assert chat_sampling({"temperature": 0.1}, tmp_path).temperature == 0.1


def test_an_invalid_default_of_the_model_is_reported(tmp_path: Path) -> None:
    for file in find_folder(BUILT_IN).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    done = call("chat", "--model", str(tmp_path))
    assert done.exit_code == 2
    assert "the model's generation_config.json: temperature is 'hot'; allowed" in done.stderr


def test_the_embedded_model_stays_greedy() -> None:
    assert chat_sampling({}, find_folder(BUILT_IN)).is_greedy
    assert CHAT_SAMPLING["temperature"] > 0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("warp", "9", "'warp' cannot be set; allowed: max_tokens, "),
        ("temprature", "1", "'temprature' cannot be set; did you mean temperature?"),
        ("top_k", "many", "top_k is 'many'; allowed: "),
        ("top-k", "1.5", "1.5"),
        ("ignore_eos", "x", "allowed: true or false"),
    ],
)
def test_an_invalid_setting_is_one_sentence(name: str, text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_sampling(name, text)


def test_settings_are_parsed_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: a list became one stop string, and `Temperature` was refused."""
    assert parse_sampling("stop", '["a", "b"]') == {"stop": ["a", "b"]}
    assert parse_sampling("stop", "[a]") == {"stop": ["[a]"]}
    assert parse_sampling("Temperature", "1") == {"temperature": 1.0}
    chat: Any = SimpleNamespace(params=SamplingParams())
    COMMANDS["/set"].run(chat, "temperature 0.7")
    assert chat.params.temperature == 0.7
    assert capsys.readouterr().err == "temperature is now 0.7\n"
    with pytest.raises(RequestError, match="/set needs NAME VALUE"):
        COMMANDS["/set"].run(chat, "temperature=0.7")
    with pytest.raises(RequestError, match="stop has 1; allowed: strings"):
        replace(SamplingParams(), **parse_sampling("stop", "[1]"))


def test_a_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    conversation = Conversation(system="Be brief.", start=1, images=[image])
    conversation.turns.append(Turn("one", "1"))
    conversation.turns.append(Turn(conversation.make_question("two"), "2"))
    conversation.drop_waiting()
    conversation.save(tmp_path / "chat.json", "m")
    loaded = Conversation.load(tmp_path / "chat.json")
    assert (loaded.system, loaded.turns, loaded.start) == (
        conversation.system,
        conversation.turns,
        0,
    )
    assert conversation.messages("x", conversation.start)[1]["content"][0] == image


def test_saving_replaces_only_saved_conversations(tmp_path: Path) -> None:
    """Regression: `/save notes.md` overwrote the notes."""
    notes, saved = tmp_path / "notes.md", tmp_path / "saved.json"
    notes.write_text("| a table |\n")
    with pytest.raises(RequestError, match=r"notes\.md exists, and is not replaced"):
        Conversation().save(notes, "tiny")
    assert notes.read_text() == "| a table |\n"
    Conversation().save(saved, "tiny")
    Conversation("Be brief.").save(saved, "tiny")
    assert Conversation.load(saved).system == "Be brief."


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "7",
        '{"messages": 7}',
        '{"messages": [7]}',
        '[{"role": "user", "content": "a"}]',
        '[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]',
        '[{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}]',
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": ["a"]}]',
        '[{"role": ["x"], "content": "a"}, {"role": "assistant", "content": "a"}]',
        '[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "a"}]',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_not_a_conversation_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(content)
    with pytest.raises(RequestError, match="is not a saved conversation"):
        Conversation.load(tmp_path / "chat.json")


def test_a_missing_conversation_is_reported_as_missing(tmp_path: Path) -> None:
    """Regression: `/load` of a misspelled path reported "not a saved conversation"."""
    with pytest.raises(
        RequestError, match=r"^cannot read .*missing\.json: No such file or directory$"
    ):
        Conversation.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("/hlep", "/hlep is not a command (did you mean /help?)"),
        ("/explian", "/explian is not a command (did you mean /explain?)"),
        ("/savee chat.json", "/savee is not a command (did you mean /save?)"),
        ("/nope", "/nope is not a command (/help lists them)"),
        ("/nope\nand more", "/nope is not a command (/help lists them)"),
        ("/usr/bin/python", "/usr/bin/python is not a command (/help lists them)"),
        ("/etc is a folder", "/etc is not a command (did you mean /set?)"),
        ("/", "/ is not a command (/help lists them)"),
        ("/undo what I said", "/undo takes no argument"),
    ],
)
def test_an_unknown_command_is_refused(message: str, reason: str) -> None:
    """Regression: it was sent to the model, and stayed in the history."""
    with pytest.raises(RequestError) as caught:
        find_command(message)
    assert (
        str(caught.value)
        == f"{reason}; type two slashes to send a message that begins with a slash"
    )


@pytest.mark.parametrize("message", ["help", "//help", "//etc is a folder", "a /help", "//"])
def test_text_with_no_slash_or_two_is_a_message(message: str) -> None:
    assert find_command(message) is None


@pytest.mark.parametrize(
    ("message", "same", "argument"),
    [
        ("/?", "/help", ""),
        ("/clear", "/reset", ""),
        ("/bye", "/quit", ""),
        ("/show", "/show", ""),
        ("/show  system ", "/show", "system"),
        ("/system\nBe brief.", "/system", "Be brief."),
        ("/set temperature 0.2", "/set", "temperature 0.2"),
        ("/file a b.txt", "/file", "a b.txt"),
    ],
)
def test_aliases_of_commands(message: str, same: str, argument: str) -> None:
    match = find_command(message.strip())
    assert match is not None
    assert (match[0].run, match[1]) == (COMMANDS[same].run, argument)


def test_an_empty_conversation_is_not_saved(tmp_path: Path) -> None:
    chat = SimpleNamespace(conversation=Conversation(), model="m")
    path = tmp_path / "chat.json"
    with pytest.raises(RequestError, match="there is nothing to save yet"):
        COMMANDS["/save"].run(cast("Chat", chat), str(path))
    with pytest.raises(RequestError, match=r"new is not a folder$"):
        Conversation(turns=[Turn("a", "b")]).save(tmp_path / "new" / "chat.json", "m")
    assert not list(tmp_path.iterdir())


def test_a_reply_of_spaces_is_reported_as_empty() -> None:
    metrics = RequestMetrics(None, time_to_first_token=1.0, time_per_token=None, total=1.0)
    answer = SimpleNamespace(text=" \n", finish_reason="stop")
    output: Any = SimpleNamespace(
        outputs=[answer],
        metrics=metrics,
        prompt_token_ids=[1],
        num_cached_tokens=0,
        loaded_tokens={},
    )
    assert figures(output).endswith("first token 1.00 s · empty reply, stop]")
    output.loaded_tokens = {"disk": 16, "remote": 1200}
    assert "cached 0 (0%), 16 from disk, 1,200 from remote · first" in figures(output)


def test_undo_removes_pending_documents_before_turns() -> None:
    conversation = Conversation(turns=[Turn("a", "b")], documents=["a text"])
    chat = SimpleNamespace(conversation=conversation)
    undo = COMMANDS["/undo"].run
    undo(cast("Chat", chat), "")
    assert conversation.documents == [] and len(conversation.turns) == 1
    undo(cast("Chat", chat), "")
    assert conversation.turns == []
