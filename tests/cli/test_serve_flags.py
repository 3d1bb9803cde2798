"""`headstart serve` with the flags of `vllm serve`."""

import ast
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from headstart.cli.main import main
from headstart.frontend.vllm_compat import ENGINE, SERVE
from headstart.server.options import ServerOptions
from tests.cli.test_main import call
from tests.house.source import ROOT

SURFACE = json.loads((ROOT / "tests/data/vllm_surface.json").read_text(encoding="utf-8"))
FRONT = SURFACE["FrontendArgs"]
OPTIONS = ENGINE | SERVE
NAMES = set(OPTIONS)
NO_FLAGS = ("mamba_config", "model_weights")  # fields of EngineArgs that vLLM has no flags for


class Served:
    """The options that a command line passes to the server, which does not start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headstart.cli.main.run_server", self._take)
        self.model = ""
        self.engine: Mapping[str, Any] = {}
        self.options = ServerOptions()
        self.adapters: Mapping[str, Path] = {}

    def _take(
        self, model: str, engine: Mapping[str, Any], options: ServerOptions, *more: Any
    ) -> None:
        self.model, self.engine, self.options, self.adapters = model, engine, options, more[1]

    def read(self, line: str, **env: str) -> "Served":
        """Run `headstart serve` with these flags and environment variables."""
        result = call("serve", *shlex.split(line), env={"HEADSTART_CACHE_DIR": None, **env})
        assert result.exit_code == 0, result.stderr
        return self


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def test_every_flag_of_vllm_is_accepted() -> None:
    assert set(FRONT) <= NAMES
    spelled = {f"--{name.replace('_', '-')}": name for name in NAMES if name not in NO_FLAGS}
    spelled |= {option.short: name for name, option in OPTIONS.items() if option.short}
    for names in SURFACE["flags"]:
        assert len({spelled[name] for name in names if name != "model_tag"}) <= 1, names


def test_the_frontends_defaults_are_accepted(served: Served) -> None:
    for name, source in FRONT.items():
        if source in (None, "...", "None", "''"):
            continue
        default, flag = ast.literal_eval(source), name.replace("_", "-")
        if isinstance(default, bool):
            served.read(f"--{flag}" if default else f"--no-{flag}")
        else:
            served.read(f"--{flag} {shlex.quote(str(default))}")


def test_boolean_flags_match_vllm() -> None:
    for name, default in FRONT.items():
        if default in ("True", "False"):
            assert OPTIONS[name].kind == "switch", name


@pytest.mark.parametrize(
    ("line", "model", "engine"),
    [
        ("some/model", "some/model", {}),
        ("--model some/model", "some/model", {}),
        ("", "headstart-tiny", {}),
        ("--max-model-len 4k", "headstart-tiny", {"max_model_len": 4000}),
        ("--max_model_len=4K", "headstart-tiny", {"max_model_len": 4096}),
        ("--max-model-len auto -tp 1", "headstart-tiny", {"max_model_len": "auto"}),
        ("a -O3 -cc.mode=NONE --no-enable-prefix-caching", "a", {"enable_prefix_caching": False}),
        ("a --disable-prefix-caching -q None", "a", {"enable_prefix_caching": False}),
        ("a --seed 42 --max-num-seqs 1K", "a", {"seed": 42, "max_num_seqs": 1024}),
        ("a --limit-mm-per-prompt.image 2", "a", {"limit_mm_per_prompt": {"image": 2}}),
        ("a --override-generation-config '{\"top_k\": 3}' --num_threads 1", "a",
         {"override_generation_config": {"top_k": 3}, "num_threads": 1}),
        ("a --chat-template '{{ messages }}' --tokenizer b --gpu-memory-utilization 0.9", "a",
         {"chat_template": "{{ messages }}", "tokenizer": "b"}),
    ],
)  # fmt: skip
def test_flags_of_the_engine(
    served: Served, line: str, model: str, engine: dict[str, object]
) -> None:
    served.read(line)
    assert (served.model, dict(served.engine)) == (model, engine)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("--host localhost --port 9000", {"host": "localhost", "port": 9000}),
        ("--served-model-name my-model", {"served_model_name": "my-model"}),
        ("--served-model-name a b c --model-alias d",
         {"served_model_name": "a", "model_alias": ("d", "b", "c")}),
        ("--api-key 123 abc", {"api_key": ("123", "abc")}),
        ("--ssl-keyfile k --ssl-certfile c", {"tls_key": "k", "tls_cert": "c"}),
        ('--allowed-origins \'["https://a.example", "*"]\'', {"cors_origin": "https://a.example,*"}),
        ("--allowed-origins [] --no-allow-credentials", {}),
        ("--disable-uvicorn-access-log --uvicorn-log-level warning", {"log_format": "off"}),
        ("--shutdown-timeout 3", {"drain_seconds": 3}),
        ("--shutdown-timeout 3 --drain-seconds 3", {"drain_seconds": 3}),
        ("--log-format json --no-disable-uvicorn-access-log", {"log_format": "json"}),
        ("--default-chat-template-kwargs '{\"a\": 1}'",
         {"default_chat_template_kwargs": '{"a": 1}'}),
        ("--default-chat-template-kwargs.a=1", {"default_chat_template_kwargs": '{"a": 1}'}),
        ("--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3", {}),
        ("--disable-log-requests --max-log-len 10 --no-enable-log-requests --root-path ''", {}),
        ("--trust-request-chat-template", {"trust_request_chat_template": True}),
    ],
)  # fmt: skip
def test_flags_of_the_frontend(served: Served, line: str, changed: dict[str, object]) -> None:
    served.read(line)
    assert served.options == ServerOptions(**changed)  # type: ignore[arg-type]


def put_adapter(folder: Path) -> Path:
    """Write an adapter's configuration, the only file read before the model."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_adapters_in_vllms_format(served: Served, tmp_path: Path) -> None:
    x, y = put_adapter(tmp_path / "x"), put_adapter(tmp_path / "y=z")
    module = json.dumps({"name": "b", "path": str(y), "base_model_name": "c"})
    served.read(f"--lora-modules a={x} '{module}'")
    assert served.adapters == {"a": x, "b": y}
    assert served.read(f"--lora-modules a={x} --adapter b={y} --enable-lora").adapters.keys() == {
        *"ab"
    }


def test_the_command_line_overrides_the_environment(served: Served) -> None:
    env = {
        "HEADSTART_MAX_MODEL_LEN": "2k",
        "HEADSTART_API_KEY": "one two",
        "HEADSTART_MODEL": "of/environment",
    }
    assert served.read("", **env).engine == {"max_model_len": 2000}
    assert served.options.api_key == ("one", "two")
    assert served.model == "of/environment"
    assert served.read("a --max-model-len 3k", **env).engine == {"max_model_len": 3000}
    assert served.model == "a"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-tp 2", "--tensor-parallel-size is 2; allowed: 1; see docs/vllm.md"),
        ("--offload-params x", "--offload-params is ['x']; not an option of headstart; "
         "see docs/vllm.md"),
        ("--enable-sleep-mode", "--enable-sleep-mode is True; allowed: False; see docs/vllm.md"),
        ("--spec-method ngram", "--spec-method is 'ngram'; not an option of headstart; "
         "see docs/vllm.md"),
        ("--tool-call-parser pythonic", "--tool-call-parser is 'pythonic'; allowed: 'hermes', "
         "'llama3_json', 'llama4_json', 'mistral'; see docs/vllm.md"),
        ("--max-modl-len 2", "no such option '--max-modl-len'. Did you mean '--max-model-len'? "
         "See headstart serve --help"),
        ("--flurb", "no such option '--flurb'. See headstart serve --help"),
        ("--max-model-len", "argument --max-model-len: expected one argument. See headstart serve "
         "--help"),
        ("a b", "got unexpected extra argument (b). See headstart serve --help"),
        ("a --model b", "the model is 'a' and --model is 'b'; allowed: one of the two"),
        ("--config /no/such.yaml", "--config is '/no/such.yaml'; [Errno 2] No such file or "
         "directory: '/no/such.yaml'"),
        ("no/model --chat-template no.jinja", "chat_template is 'no.jinja', which is neither a "
         "template nor a file: [Errno 2] No such file or directory: 'no.jinja'"),
        ("--ssl-keyfile k", "only one of tls_cert (or ssl_certfile) and tls_key (or "
         "ssl_keyfile) is set; allowed: both or none"),
        ("--allowed-origins '*'", "--allowed-origins is '*'; allowed: a list in JSON, such as "
         """'["https://a.example"]'"""),
        ("--lora-modules '{}'", "--lora-modules is '{}'; allowed: NAME=PATH, or "
         """'{"name": ..., "path": ...}'"""),
        ("""--lora-modules '{"name":"a","path":["x"]}'""",
         """--lora-modules is '{"name":"a","path":["x"]}'; allowed: NAME=PATH, or """
         """'{"name": ..., "path": ...}'"""),
        ("""--lora-modules '{"name":"a=b","path":"/x"}'""",
         """--lora-modules is '{"name":"a=b","path":"/x"}'; allowed: NAME=PATH, or """
         """'{"name": ..., "path": ...}'"""),
        ("--shutdown-timeout 5 --drain-seconds 9", "--drain-seconds is 9.0 and "
         "--shutdown-timeout is 5; allowed: one of the two"),
        ("--log-format json --disable-uvicorn-access-log", "--log-format is 'json' and "
         "--disable-uvicorn-access-log is 'off'; allowed: one of the two"),
        ("--max-images 2 --limit-mm-per-prompt.image 3", "max_images is 2 and "
         "limit_mm_per_prompt is {'image': 3}; allowed: one of the two"),
        ("--allowed-origins false", "--allowed-origins is False; allowed: a list in JSON, such as "
         """'["https://a.example"]'"""),
        ("--max-model-len x", "max_model_len is 'x'; allowed: a whole number of at least 1 or "
         "None"),
        ("--default-chat-template-kwargs x", "default_chat_template_kwargs is 'x'; allowed: an "
         'object in JSON, such as {"enable_thinking": false}'),
        ("--api-key k --no-api-keys", "api_key is set and api_keys is off; allowed: api_keys "
         "on"),
        ("--default-chat-template-kwargs.enable_thinking --port 9", "argument "
         "--default-chat-template-kwargs.enable_thinking: expected one argument. See headstart "
         "serve --help"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused_before_loading(served: Served, line: str, says: str) -> None:
    result = call("serve", *shlex.split(line))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.replace("main serve", "headstart serve") == f"headstart: {says}\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run --tensor-parallel-size 2 x", "no such option '--tensor-parallel-size'. See"),
        ("chat --partial-hitz", "no such option '--partial-hitz'. Did you mean '--partial-hits'?"),
        ("keys add a --flurb", "no such option '--flurb'. See main keys add --help"),
        ("serve -z", "no such option '-z'. See"),
    ],
)
def test_only_likely_typos_get_a_hint(line: str, says: str) -> None:
    """Regression: `run --tensor-parallel-size` led to "did you mean '--no-partial-hits'?"."""
    assert call(*line.split()).stderr.startswith(f"headstart: {says}")


def test_flags_without_effect_are_not_in_the_help() -> None:
    output = call("serve", "-tp", "2", "--help").stdout
    assert "serve [OPTIONS] [MODEL]" in output
    assert "--chat-template " in output and "docs/vllm.md" in " ".join(output.split())
    shown = {flag for param in main.commands["serve"].params for flag in param.opts}
    for name in (name for name, option in OPTIONS.items() if option.state != "works"):
        assert f"--{name.replace('_', '-')}" not in shown, name


@pytest.mark.parametrize(
    ("typed", "incomplete", "offered"),
    [
        (["--max-model-len"], "", set()),
        (["a", "--tensor-parallel-size", "2", "--dtype"], "fl", {"float32", "float16"}),
        (["--unknown"], "--chat-t", {"--chat-template"}),
    ],
)
def test_completion_of_partial_words(typed: list[str], incomplete: str, offered: set[str]) -> None:
    completion = ShellComplete(main, {}, "headstart", "_HEADSTART_COMPLETE")
    items = completion.get_completions(["serve", *typed], incomplete)
    assert {item.value for item in items} == offered
