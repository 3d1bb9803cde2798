"""`headstart serve --config`: a file of flags, combined with typed flags."""

import shlex
from pathlib import Path

import pytest

from headstart.frontend.vllm_compat import read_config
from headstart.server.options import ServerOptions
from headstart.validation import describe
from tests.cli.test_main import call
from tests.cli.test_serve_flags import Served, put_adapter


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Replace the server, even in tests of errors, so that nothing is loaded."""
    return Served(monkeypatch)


def test_a_file_of_flags(served: Served, tmp_path: Path) -> None:
    """Typed flags override the file, as in `vllm serve --config`."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: of/file\nport: 9000\nmax-model-len: 2k\nenable-prefix-caching: false\n"
        "served_model_name: [a, b]\nnum-threads: 1\nlimit-mm-per-prompt: {image: 2}\n"
        "trust-remote-code: true\nquantization:\n"
    )
    served.read(f"--config {file} --max-model-len 3k")
    assert (served.model, served.options.port) == ("of/file", 9000)
    assert (served.options.served_model_name, served.options.model_alias) == ("a", ("b",))
    assert served.engine == {
        "max_model_len": 3000,
        "enable_prefix_caching": False,
        "num_threads": 1,
        "limit_mm_per_prompt": {"image": 2},
    }
    assert served.read(f"typed --config={file} --num-threads 2").model == "typed"
    assert served.engine["num_threads"] == 2


def save(folder: Path, text: str) -> str:
    """Write a file of flags, and return the flag that names it."""
    file = folder / "config.yaml"
    file.write_text(text)
    return f"--config {file}"


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("model-alias: [a, b]", {"model_alias": ("a", "b")}),
        ("model_alias: a b", {"model_alias": ("a b",)}),
        ("model-alias: 0123", {"model_alias": ("0123",)}),
        ("model-alias: [1.10, 2026-01-01, yes, 12:30:00]",
         {"model_alias": ("1.10", "2026-01-01", "yes", "12:30:00")}),
        ("api-key: 0123", {"api_key": ("0123",)}),
        ("api-key: [--port, -x]", {"api_key": ("--port", "-x")}),
        ("tls-key: true\ntls-cert: -c", {"tls_key": "true", "tls_cert": "-c"}),
        ("default-chat-template-kwargs.a: false\ndefault-chat-template-kwargs.b.c: '1'",
         {"default_chat_template_kwargs": '{"a": false, "b": {"c": "1"}}'}),
        ("default-chat-template-kwargs: {a: 2026-01-01, b: [1]}",
         {"default_chat_template_kwargs": '{"a": "2026-01-01", "b": [1]}'}),
        ("allowed-origins: [https://a.example, https://b.example]",
         {"cors_origin": "https://a.example,https://b.example"}),
        ("api-key: []\nport:\ntls-key: null", {}),
    ],
)  # fmt: skip
def test_values_of_a_file_are_passed_unchanged(
    served: Served, tmp_path: Path, text: str, changed: dict[str, object]
) -> None:
    """Regression: `model-alias: [a, b]` became alias a and model b; `api-key: 0123` the key 83."""
    served.read(save(tmp_path, text))
    assert (served.model, served.engine) == ("headstart-tiny", {})
    assert served.options == ServerOptions(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port: 9000\napi-key: SECRET : bad", "line 2 is not valid YAML"),
        ("api-key: *SECRET", "line 1 is not valid YAML"),
        ("api-key: !SECRET x", "line 1 is not valid YAML"),
        ("api-key: [SECRET", "line 1 is not valid YAML"),
        ("api-key: 'SECRET", "line 1 is not valid YAML"),
        ("api-key: @SECRET", "line 1 is not valid YAML"),
        ("SECRET: 2026-13-13", "it is not valid YAML"),
        ("limit: &a {SECRET: *a}", "line 1 is not valid YAML"),
        ("a: \0", "it is not valid YAML"),
        ("", "it is not a mapping of flags"),
        ("- a", "it is not a mapping of flags"),
        ("port: 1\n--api-key=SECRET: 1", "entry 2 has no flag name such as "
         "max-model-len"),
        ("'': true\na: b", "entry 1 has no flag name such as max-model-len"),
        ("9: 9", "entry 1 has no flag name such as max-model-len"),
        ("api-key: [SECRET, null]", "an item of api-key has no value"),
        ("config: SECRET", "it contains --config; allowed: one file"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_reported_without_its_text(tmp_path: Path, text: str, says: str) -> None:
    """PyYAML's errors quote the line, which may contain an API key."""
    line = save(tmp_path, text)
    result = call("serve", *shlex.split(line))
    path = line.partition(" ")[2]
    assert result.exit_code == 2
    assert result.stderr == f"headstart: --config is {describe(path)}; {says}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("adapter: [a=b, c=d]", "b is not an adapter, as it is not a folder"),
        ("api-keys: SECRET", "option '--api-keys' does not take a value"),
        ("port: true", "port is True; allowed: a whole number"),
        ("num-threads: [1, 2]", "'--num-threads' (HEADSTART_NUM_THREADS): '[1, 2]'; allowed: a"),
        (
            "shutdown-timeout: 5\ndrain-seconds: 9",
            "--drain-seconds is 9.0 and --shutdown-timeout is 5",
        ),
        ("enable-lorra: true", "no such option '--enable-lorra'. Did you mean '--enable-lora'?"),
    ],
)
def test_an_invalid_flag_in_a_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    result = call("serve", *shlex.split(save(tmp_path, text)))
    assert result.exit_code == 2 and "SECRET" not in result.stderr
    assert says in result.stderr, result.stderr


FILE = """
shutdown-timeout: 5
num-gpu-blocks-override: 7
kv-cache-memory-bytes: 1G
ssl-keyfile: k
ssl-certfile: c
disable-uvicorn-access-log: true
limit-mm-per-prompt: {image: 2}
allowed-origins: [https://a.example]
model-alias: [a]
"""
OURS = """
drain-seconds: 5
num-blocks: 7
kv-cache-memory: 1G
tls-key: k
tls-cert: c
log-format: "off"
max-images: 2
cors-origin: https://a.example
model-alias: [a]
"""
TYPED = (
    "--drain-seconds 9 --num-blocks 20 --kv-cache-memory 2k --tls-key K --tls-cert C "
    "--log-format json --max-images 3 --cors-origin x --model-alias b"
)
THEIRS = (
    "--shutdown-timeout 9 --num-gpu-blocks-override 20 --kv-cache-memory-bytes 2k --ssl-keyfile K "
    "--ssl-certfile C --log-format json --limit-mm-per-prompt.image 3 --allowed-origins '[\"x\"]' "
    "--model-alias b"
)


@pytest.mark.parametrize("text", [FILE, OURS])
@pytest.mark.parametrize("typed", [TYPED, THEIRS])
def test_typed_flags_override_a_file_under_any_name(
    served: Served, tmp_path: Path, text: str, typed: str
) -> None:
    served.read(
        f"{typed} {save(tmp_path, text)}",
        HEADSTART_MAX_IMAGES="9",
        HEADSTART_NUM_BLOCKS="9",
        HEADSTART_DRAIN_SECONDS="99",
    )
    assert served.options == ServerOptions(
        drain_seconds=9, tls_key="K", tls_cert="C", log_format="json", cors_origin="x",
        model_alias=("b",)
    )  # fmt: skip
    assert read_config(served.engine) == {
        "num_blocks": 20, "kv_cache_memory": 2000, "max_images": 3
    }  # fmt: skip


def test_typed_adapters_override_others(served: Served, tmp_path: Path) -> None:
    a, b, c, e = (put_adapter(tmp_path / name) for name in "abce")
    env = {"HEADSTART_ADAPTER": f"e={e}"}
    both = f"adapter: [b={b}, c={c}]"
    for typed in (f"--adapter a={a}", f"--lora-modules a={a}"):
        for text in (both, f"lora-modules: [{{name: b, path: {b}}}]"):
            served.read(f"{typed} {save(tmp_path, text)}", **env)
            assert served.adapters == {"a": a}
    assert served.read(save(tmp_path, both), **env).adapters.keys() == {*"bc"}
