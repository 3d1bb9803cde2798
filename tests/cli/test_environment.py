"""Flags in the environment match `--help` for every command."""

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from headstart.cli.main import main
from headstart.cli.options import GroupedCommand, GroupedOption
from tests.cli.test_main import call


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        yield *path, name


COMMANDS = list(commands(main))
FLAGS = [
    (name, option)
    for name, command in main.commands.items()
    if isinstance(command, GroupedCommand)
    for option in command.params
    if isinstance(option, GroupedOption)
]


def find(words: tuple[str, ...]) -> click.Command:
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_names_only_the_commands_variables(words: tuple[str, ...]) -> None:
    """Regression: `doctor --help` and `replay --help` mentioned HEADSTART_MAX_TOKENS."""
    output = call(*words, "--help").stdout
    variables = {
        variable
        for option in find(words).params
        for variable in ([option.envvar] if isinstance(option.envvar, str) else [])
    }
    named = set(re.findall(r"HEADSTART_\w+", output))
    assert named <= variables
    if isinstance(find(words), GroupedCommand) and variables:
        assert named


@pytest.mark.parametrize(("name", "option"), FLAGS, ids=lambda value: getattr(value, "flag", value))
def test_every_flag_has_the_variable_of_its_name(name: str, option: GroupedOption) -> None:
    """Regression: --wav was HEADSTART_WAV_FOLDER, and --router HEADSTART_ROUTERS."""
    variable = "HEADSTART_" + option.flag.lstrip("-").replace("-", "_").upper()
    kind = option.type
    value = str(kind.choices[0]) if isinstance(kind, click.Choice) else "1"
    arguments = ["trace"] if name == "replay" else []
    with (
        CliRunner().isolation(env={variable: value}),
        main.commands[name].make_context(name, arguments) as context,
    ):
        assert option.name is not None
        source = context.get_parameter_source(option.name)
    assert source is click.core.ParameterSource.ENVIRONMENT


def test_a_long_number_is_abbreviated_in_the_error() -> None:
    result = call("run", "--max-model-len", "9" * 5_000 + "K", "hi")
    assert result.exit_code == 2 and len(result.stderr) < 500


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("HEADSTART_MODLE", "HEADSTART_MODLE in the environment is not an option; did you mean "),
        ("HEADSTART_PORT", ""),  # of another command
        ("HEADSTART_NATIVE", ""),  # of no flag
        (
            "HEADSTART_GGUFDIR",
            "HEADSTART_GGUFDIR in the environment is not an option; did you mean ",
        ),
        ("MODLE", ""),
    ],
)
def test_a_typo_in_a_variable_is_reported(variable: str, message: str) -> None:
    """Regression: it was silently ignored, and another model answered."""
    result = call("run", "--file", "/no/such", "hi", env={variable: "1"})
    assert result.exit_code == 2 and "cannot read /no/such" in result.stderr
    assert result.stderr.startswith(message or "headstart: cannot read")
