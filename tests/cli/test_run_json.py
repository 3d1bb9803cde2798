"""`headstart run --json`: answers follow a schema; unsupported schemas are refused."""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headstart.cli.reply import RawWriter
from tests.cli.test_main import call

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def save(folder: Path, schema: object) -> str:
    path = folder / "schema.json"
    path.write_text(schema if isinstance(schema, str) else json.dumps(schema), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2},
        {"type": "boolean"},
        {"anyOf": [{"const": None}, {"const": [1, {"x": 2}]}]},
    ],
)
def test_answers_are_valid_by_the_schema(schema: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path, schema)
    result = call("run", "--json", path, "--temperature", "2", "--seed", "3", "Who?", "And who?")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        answer = json.loads(line)
        jsonschema.validate(answer, schema)
        assert line == json.dumps(answer, ensure_ascii=False, separators=(",", ":"))


def test_a_cut_off_answer_is_reported(tmp_path: Path) -> None:
    result = call("run", "--json", save(tmp_path, PERSON), "--max-tokens", "3", "Who?")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(
        "headstart: answer 1 was cut off and is not complete"
    )


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("{", "allowed: a JSON schema"),
        ("[]", "that is an object"),
        ({"not": {"type": "string"}}, 'cannot be followed: Unimplemented keys: ["not"]'),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "Unsatisfiable schema: "),
        ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"),
        ({"enum": ["x" * 70_000]}, "65,536 at most"),
    ],
)
def test_an_invalid_schema_is_refused_before_the_model_is_loaded(
    schema: object, says: str, tmp_path: Path
) -> None:
    path = save(tmp_path, schema)
    result = call("run", "--model", "/no/such/model", "--json", path, "Who?")
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("headstart: --json: ") and says in line


def test_a_missing_schema_or_library_is_reported_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = call("run", "--model", "/no/such/model", "--json", "nowhere.json", "Who?")
    assert missing.stderr == "headstart: cannot read nowhere.json: No such file or directory\n"
    monkeypatch.setitem(sys.modules, "llguidance", None)
    without = call("run", "--model", "/no/such/model", "--json", save(tmp_path, PERSON), "Who?")
    assert without.stderr.endswith(
        'needs llguidance: pip install ".[structured]" in the folder of the clone\n'
    )
    assert (missing.exit_code, without.exit_code) == (2, 2)


def test_json_is_not_broken_between_words(capsys: pytest.CaptureFixture[str]) -> None:
    text = json.dumps("two words " * 30 + "\x9b", ensure_ascii=False)
    with RawWriter(clean=True) as writer:
        for end in (3, 50, len(text)):
            writer.write(text[:end])
    assert capsys.readouterr().out == text.replace("\x9b", "\ufffd") + "\n"
