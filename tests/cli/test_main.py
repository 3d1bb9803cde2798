"""The demo, `run` and `chat` with the demo model, and errors of the command line."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence
from headstart.cli.demo import REQUESTS
from headstart.cli.main import main
from headstart.cli.options import SAMPLING_FLAGS, sort_options
from headstart.cli.pool_picture import CACHED, EMPTY, HELD, PoolPicture
from headstart.engine.config import EngineConfig
from tests.engine.tiny_llm import save_smallest

# The model with random weights has a token for every byte, which makes tokens easy to count.
SMALL = ["--model", "demo", "--num-blocks", "64", "--max-tokens", "8"]


def call(*arguments: str, stdin: str = "", env: Mapping[str, str | None] = {}) -> Result:
    """Run a command in this process; exceptions other than its errors fail the test.

    env: changes of the environment; None removes a variable.
    """
    result = CliRunner().invoke(main, arguments, input=stdin, env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def cached_tokens(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"cached ([\d,]+) \(", text)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Return the output of `headstart demo` and the path of its picture."""
    svg = tmp_path_factory.mktemp("demo") / "demo.svg"
    result = call("demo", "--svg", str(svg))
    assert result.exit_code == 0, result.output
    yield result.stdout, svg


def test_demo_answers_match_the_table(demo: tuple[str, Path]) -> None:
    output = " ".join(demo[0].split())
    assert "age of John Doe is 29 " in output
    assert "age of Zack Blue is 30 " in output
    assert "Right answers: 3 of 3." in output


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("The age of John Doe is 29", True),
        ("The age of John Doe is 2999999999", False),
        ("John Doe is 29 years old.", True),
    ],
)
def test_an_answer_counts_only_with_the_exact_word(answer: str, right: bool) -> None:
    """Regression: an endless 2999... counted as 29."""
    assert REQUESTS[0].is_answered_by(answer) is right


def test_notes_warn_of_useless_answers(demo: tuple[str, Path], demo_model: Path) -> None:
    assert "little else" in " ".join(demo[0].split())
    assert "answers are noise" in " ".join(call("run", *SMALL, "x").stderr.split())


def test_demo_shows_the_figures_of_three_requests(demo: tuple[str, Path]) -> None:
    shown = re.findall(
        r"│ ([\d,]+) +([\d,]+) \((\d+)%\) +([\d.]+ m?s), (.*?)  +[\d.]+ m?s", demo[0]
    )
    prompts, cached, shares, _, notes = zip(*shown, strict=True)
    assert len(shown) == 3
    assert int(prompts[0].replace(",", "")) > 1000
    assert cached[0] == "0"
    assert all(int(share) > 95 for share in shares[1:])
    assert notes[0] == "cold" and all("× sooner" in note for note in notes[1:])
    assert re.search(r"cold / warm +[\d.]+ m?s / [\d.]+ m?s = [\d.]+", demo[0])


def test_demo_draws_the_pool_after_each_request(demo: tuple[str, Path]) -> None:
    pools = re.findall(r"■ held (\d+) +□ cached (\d+) +· empty (\d+)", demo[0])
    assert [sum(map(int, pool)) for pool in pools] == [320, 320, 320]
    assert demo[0].count("■") - len(pools) == sum(int(held) for held, _, _ in pools)
    owners = [[int(n) for n in re.findall(r" \d: (\d+)", line)] for line in demo[0].splitlines()]
    first, second, third = [counts for counts in owners if counts]
    assert len(third) == 3 and first[0] > 80
    assert second[1] < 20 and third[2] < 20


def test_demo_saves_its_picture(demo: tuple[str, Path]) -> None:
    picture = demo[1].read_text(encoding="utf-8")
    words = " ".join(ElementTree.fromstring(picture).itertext()).replace("\xa0", " ")
    assert "time to first token" in words and "■" in words
    assert "font-face" not in picture
    assert picture.startswith('<svg xml:space="preserve" ')  # or spaces are lost outside browsers


def test_run_answers_several_questions_about_one_file(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "document.txt").write_text("Turn the valve to the left. " * 10)
    document = str(tmp_path / "document.txt")
    result = call("run", *SMALL, "--raw", "--file", document, "How?", "Why?")
    assert result.exit_code == 0
    first, second = cached_tokens(result.stderr)
    assert (first, second) == (0, len("Turn the valve to the left. " * 10))
    assert len(result.stdout.splitlines()) == 2


def test_run_puts_files_before_each_question(demo_model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"This is {name}.\n")
    files = [word for name in ("one", "two") for word in ("--file", str(tmp_path / name))]
    result = call("run", *SMALL, *files, "--system", "Be brief.", "-", stdin="Hello")
    spelled = "\n\n".join(["This is one.", "This is two.", "Hello"])
    system = 1 + len("system\nBe brief.") + 1 + len("\n")
    turn = 1 + len(f"user\n{spelled}") + 1 + len("\n") + 1 + len("assistant\n")
    assert f"prompt {system + turn} tokens" in result.stderr


def test_run_reads_its_prompt_from_stdin(demo_model: Path) -> None:
    result = call("run", *SMALL, stdin="Hello")
    assert result.exit_code == 0
    turn = 1 + len("user\nHello") + 1 + len("\n") + 1 + len("assistant\n")
    assert f"prompt {turn} tokens" in result.stderr
    assert "each · length]" in result.stderr


def test_chat_hits_its_earlier_turns(demo_model: Path) -> None:
    result = call("chat", *SMALL, stdin="Hello there\n\n/pool\n/nonsense\nAnd again\n/quit\nlate\n")
    assert result.exit_code == 0
    prompts = [int(n) for n in re.findall(r"prompt (\d+) tokens", result.stderr)]
    cached = cached_tokens(result.stderr)
    assert len(prompts) == 2
    assert "headstart: /nonsense is not a command (/help lists them); type two" in result.stderr
    assert cached[0] == 0
    assert prompts[0] + 8 - 1 <= cached[1] < prompts[1]
    assert "■ held 0" in result.stderr
    assert "> Hello there" in result.stdout
    assert "late" not in result.stdout


def test_chat_accepts_commands_of_other_programs(demo_model: Path) -> None:
    lines = "/?\nHello\n/clear\n//Hello\n/show\n/show system\n/show license\n/bye\nlate\n"
    result = call("chat", *SMALL, "--system", "Be brief.", stdin=lines)
    hello, slashed = (int(n) for n in re.findall(r"prompt (\d+) tokens", result.stderr))
    assert slashed == hello + 1  # "/Hello"
    assert "shows the commands; so does /?" in result.stderr
    assert "a new conversation begins" in result.stderr
    assert "1 turn so far" in result.stderr
    assert "\nBe brief.\nBe brief.\nheadstart: the argument of /show is 'license'" in result.stderr
    assert "is 'license'; allowed: info, parameters, system" in result.stderr
    assert "late" not in result.stdout


def test_reset_starts_a_new_conversation(demo_model: Path) -> None:
    result = call("chat", *SMALL, "--system", "Be brief.", stdin="Hello\n/reset\n/explain\nHello\n")
    prompts = re.findall(r"prompt (\d+) tokens", result.stderr)
    assert prompts[0] == prompts[1]
    assert "\na new conversation begins, with the system message\n" in result.stderr
    assert "headstart: there is no question yet" in result.stderr


def test_retry_keeps_pending_documents(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "people.txt").write_text("Ann is 31.\n" * 20, encoding="utf-8")
    lines = f"Hello\n/file {tmp_path / 'people.txt'}\n/retry\nHow old is Ann?\n"
    result = call("chat", *SMALL, "--max-tokens", "8", stdin=lines)
    hello, again, question = (int(n) for n in re.findall(r"prompt (\d+) tokens", result.stderr))
    assert again == hello
    assert question > hello + 100  # the document went with the question after it


def test_undo_names_the_documents_of_the_turn(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "people.txt").write_text("Ann is 31.\n", encoding="utf-8")
    lines = f"Hello\n/file {tmp_path / 'people.txt'}\nHow old is Ann?\n/retry\n/undo\n/undo\n"
    output = call("chat", *SMALL, stdin=lines).stderr
    assert "the last turn is removed, and with it people.txt (11 tokens); 1 turn left" in output
    assert "the last turn is removed; 0 turns left" in output


def test_chat_survives_a_turn_that_is_too_long(demo_model: Path) -> None:
    result = call("chat", *SMALL, "--max-model-len", "100", stdin="x" * 200 + "\nHello\n")
    assert result.exit_code == 0
    assert "headstart: the prompt has" in result.stderr
    assert result.stderr.count("first token") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--model", "/no/such/model", "x"], "/no/such/model"),
        (["run", "--block-size", "3", "x"], "block_size is 3"),
        (["run", "--temperature", "-1", "x"], "temperature"),
        (["run", "--num-blocks", "2", "x" * 100], "the prompt has"),
        (["run", ""], "empty"),
        (["run"], "standard input is empty"),
        (["run", "--file", "nowhere.txt"], "nowhere.txt"),
        (["demo", "--num-blocks", "10"], "max_model_len is 4800"),
        (["demo", "--warp", "9"], "--warp"),
        (["chat", "--dtype", "int4"], "int4"),
        (["demo", "--svg", "/no/such/folder/demo.svg"], "no folder /no/such/folder"),
        (["chat", "--resume", "nowhere.json"], "cannot read nowhere.json"),
        (["run", "--raw", "--system", "x", "y"], "--raw"),
        (["run", "--image", "nowhere.png", "y"], "cannot read nowhere.png"),
        (["run", "-", "-"], "once"),
        (["run", "  "], "empty"),
    ],
)
def test_an_error_is_one_line_with_status_2(
    demo_model: Path, arguments: list[str], says: str
) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert says in last
    assert last.startswith(("headstart: ", "Error: "))
    assert "Traceback" not in result.output


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    result = call("run", "--file", str(tmp_path / "image"), "x")
    assert (result.exit_code, result.stderr.split(":")[0]) == (2, "headstart")
    assert "not UTF-8" in result.stderr


@pytest.mark.parametrize("command", ["demo", "run", "chat"])
def test_every_engine_option_is_a_flag(command: str) -> None:
    declared = {name for option in main.commands[command].params for name in option.opts}
    for field in fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in declared or field.name in SAMPLING_FLAGS


def test_flags_keep_the_types_of_their_fields() -> None:
    arguments = [
        "--no-deduplicate",
        "--kv-cache-fraction",
        "0.5",
        "--num-blocks",
        "7",
        "--stop",
        "x",
    ]
    with (
        CliRunner().isolation(env={"HEADSTART_CACHE_DIR": None}),
        main.commands["chat"].make_context("chat", arguments) as context,
    ):
        options = sort_options(
            {k: v for k, v in context.params.items() if k not in ("model", "plain")}
        )
    assert options.engine == {"deduplicate": False, "kv_cache_fraction": 0.5, "num_blocks": 7}
    assert options.sampling.stop == ["x"]
    assert (options.sampling.max_tokens, options.sampling.temperature) == (256, 0.0)
    assert options.user_sampling == {"stop": ["x"]}


def test_the_error_of_an_environment_value_names_its_variable() -> None:
    env = {"HEADSTART_NUM_BLOCKS": "abc"}
    result = call("run", "hi", env=env)
    assert result.exit_code == 2
    assert "invalid value for '--num-blocks' (HEADSTART_NUM_BLOCKS): 'abc'" in result.stderr
    assert result.stderr.count("\n") == 1
    result = call("run", "--num-blocks", "xyz", "hi", env=env)
    assert "'xyz'; allowed: a whole number" in result.stderr


def test_flags_can_be_set_in_the_environment() -> None:
    assert "block_size is 3" in call("run", "x", env={"HEADSTART_BLOCK_SIZE": "3"}).stderr
    assert "HEADSTART_MAX_TOKENS" in call("run", "--help").stdout


def test_help_is_ordered_from_common_options_to_internals() -> None:
    output = call("chat", "--help").stdout
    order = ["--model", "Sampling:", "--top-p", "Engine internals:", "--eviction"]
    places = [output.index(text) for text in order]
    assert places == sorted(places)
    assert "[1|2|4|8|16|32|64|128]" in output and "adaptive-lru]" in output


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_the_command(shell: str) -> None:
    assert "_HEADSTART_COMPLETE" in call("completion", shell).stdout


@pytest.mark.parametrize("option", ["--file", "--image", "--json", "--adapter"])
def test_paths_are_completed_by_the_shell(option: str) -> None:
    """Regression: it was empty, and replaced the shell's completion."""
    params = {name: param for param in main.commands["run"].params for name in param.opts}
    [item] = params[option].type.shell_complete(None, params[option], "READ")
    assert (item.type, item.value) == ("file", "READ")


def test_more_threads_than_cores_are_reported(demo_model: Path) -> None:
    result = call("run", *SMALL, "--num-threads", "99", "x")
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if line.startswith("headstart: 99 threads")]


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headstart", "--version"], capture_output=True, text=True
    )
    assert done.stdout.startswith("headstart, version ")


class TestPoolPicture:
    """The picture follows a real manager with blocks of 4 tokens."""

    def make(self, num_blocks: int) -> tuple[KVCacheManager, PoolPicture]:
        manager = KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=4))
        return manager, PoolPicture(manager)

    def admit(self, manager: KVCacheManager, name: str, token_ids: list[int]) -> TokenSequence:
        sequence = TokenSequence(name, token_ids)
        computed = manager.get_computed_blocks(sequence)
        left = len(token_ids) - computed.num_tokens
        assert manager.allocate_slots(sequence, left, computed) is not None
        manager.commit_step()
        return sequence

    def rows(self, picture: PoolPicture) -> list[str]:
        return [line.split()[-1] for line in picture.draw().plain.splitlines()[:-2]]

    def test_held_cached_and_empty(self) -> None:
        manager, picture = self.make(8)
        first = self.admit(manager, "a", list(range(10)))
        picture.update(1)
        assert self.rows(picture) == [HELD * 3 + EMPTY * 5]
        manager.free(first)
        self.admit(manager, "b", [*range(8), 99])
        picture.update(2)
        assert self.rows(picture) == [HELD * 2 + CACHED + HELD + EMPTY * 4]
        legend = picture.draw().plain.splitlines()[-2:]
        assert legend[0].split() == ["■", "held", "3", "□", "cached", "1", "·", "empty", "4"]
        assert legend[1].split() == ["computed", "by", "request", "1:", "3", "2:", "1"]

    def test_a_reused_block_is_shown_for_its_new_request(self) -> None:
        manager, picture = self.make(2)
        first = self.admit(manager, "a", list(range(8)))
        picture.update(1)
        manager.free(first)
        self.admit(manager, "b", list(range(50, 58)))
        picture.update(2)
        assert picture.draw().plain.splitlines()[-1].split()[-2:] == ["2:", "2"]

    def test_a_large_pool_has_several_blocks_per_cell(self) -> None:
        manager, picture = self.make(10_000)
        self.admit(manager, "a", list(range(4)))
        picture.update(1)
        assert self.rows(picture) == [HELD + EMPTY * 63]  # not the rows of empty blocks behind it
        assert "(20 blocks per cell)" in picture.draw().plain
        narrow = picture.draw(60).plain.splitlines()
        assert "        (20 blocks per cell)" in narrow and max(map(len, narrow)) <= 60


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_model_without_a_tokenizer_is_refused_before_it_is_loaded(
    command: str, tmp_path: Path
) -> None:
    """Regression: the model was loaded, and `run` then required token ids."""
    save_smallest(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    result = call(command, "--model", str(tmp_path / "model"), stdin="hi\n")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"headstart: {tmp_path}/model has no tokenizer (tokenizer.json")
