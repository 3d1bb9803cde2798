"""Flags in the environment: what `--help` says of them holds, for every command."""

import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from headstart.cli.main import main
from headstart.cli.options import GroupedCommand, GroupedOption
from tests.cli.test_main import call


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command."""
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
def test_help_names_no_variable_that_is_not_the_command_s(words: tuple[str, ...]) -> None:
    """`doctor --help` and `replay --help` spoke of HEADSTART_MAX_TOKENS."""
    said = call(*words, "--help").stdout
    known = {
        variable
        for option in find(words).params
        for variable in ([option.envvar] if isinstance(option.envvar, str) else [])
    }
    named = set(re.findall(r"HEADSTART_\w+", said))
    assert named <= known
    if isinstance(find(words), GroupedCommand) and known:
        assert named


@pytest.mark.parametrize(("name", "option"), FLAGS, ids=lambda one: getattr(one, "flag", one))
def test_every_flag_has_the_variable_of_its_name(name: str, option: GroupedOption) -> None:
    """--wav was HEADSTART_WAV_FOLDER, and --router HEADSTART_ROUTERS."""
    variable = "HEADSTART_" + option.flag.lstrip("-").replace("-", "_").upper()
    kind = option.type
    value = str(kind.choices[0]) if isinstance(kind, click.Choice) else "1"
    given = ["trace"] if name == "replay" else []
    with (
        CliRunner().isolation(env={variable: value}),
        main.commands[name].make_context(name, given) as context,
    ):
        assert option.name is not None
        source = context.get_parameter_source(option.name)
    assert source is click.core.ParameterSource.ENVIRONMENT


def test_a_number_of_any_length_is_told_shortly() -> None:
    result = call("run", "--max-model-len", "9" * 5_000 + "K", "hi")
    assert result.exit_code == 2 and len(result.stderr) < 500


@pytest.mark.parametrize(
    ("variable", "told"),
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
def test_a_slip_in_a_variable_s_name_is_told(variable: str, told: str) -> None:
    """It was passed over in silence, and another model answered."""
    result = call("run", "--file", "/no/such", "hi", env={variable: "1"})
    assert result.exit_code == 2 and "cannot read /no/such" in result.stderr
    assert result.stderr.startswith(told or "headstart: cannot read")
