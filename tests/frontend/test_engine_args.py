"""A program's command line with vLLM's engine options, as in vLLM's examples."""

import argparse
import ast
import copy
import inspect
import json
import pickle
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from headstart import (
    LLM,
    AsyncEngineArgs,
    ConfigError,
    EngineArgs,
    SamplingParams,
)
from headstart.engine.config import EngineConfig, make_config
from headstart.frontend.vllm_compat import ENGINE, SERVE, Option, read_config, read_options
from headstart.utils import FlexibleArgumentParser
from tests.engine.tiny_llm import make_llm, save_smallest
from tests.forked import run_program
from tests.house.source import ROOT
from tests.tiny_tokenizers import TINY_TOKENIZERS

SURFACE = json.loads((ROOT / "tests/data/vllm_surface.json").read_text(encoding="utf-8"))
DEFAULTS = SURFACE["EngineArgs"]


def names_of(table: dict[str, Option], state: str) -> list[str]:
    return [name for name, option in table.items() if option.state == state]


def read(*arguments: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args([*arguments]))


PROGRAM = """
import argparse
from dataclasses import asdict
from headstart import LLM, EngineArgs, SamplingParams
from headstart.utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(dtype="float32")
parser.add_argument_group("sampling").add_argument("--max-tokens", type=int)
args = vars(parser.parse_args())
params = SamplingParams(max_tokens=args.pop("max_tokens"), ignore_eos=True)
llm = LLM(**asdict(EngineArgs.from_cli_args(argparse.Namespace(**args))))
[output] = llm.generate([5, 6], params)
print(llm.engine.max_model_len, llm.engine.config.num_blocks, len(output.outputs[0].token_ids))
llm.close()
"""


def test_a_program_from_vllms_examples(tmp_path: Path) -> None:
    folder = save_smallest(tmp_path)
    arguments = f"--model {folder} --max_model_len 128 --num-gpu-blocks-override=24 --enforce-eager"
    done = run_program(PROGRAM, *arguments.split(), "--max-tokens", "3")
    assert done.stdout == "128 24 3\n", done.stderr


def test_parsed_arguments_can_be_passed_to_llm() -> None:
    """vLLM's examples write `LLM(**vars(args))`, with the defaults of all flags."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = vars(parser.parse_args(["--model", "headstart-tiny", "--max-num-seqs", "7"]))
    model = options.pop("model")
    config = make_config(read_options(model, options).config)
    assert config == EngineConfig(max_num_seqs=7)


def test_a_flag_for_every_option_of_vllm() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    values = vars(parser.parse_args([]))
    assert set(DEFAULTS) <= set(values)
    assert values["tensor_parallel_size"] == 1
    assert "--no-enable-prefix-caching" in parser.format_help()
    assert asdict(read("--model", "headstart-tiny")) == {"model": "headstart-tiny"}


def test_boolean_options_match_vllm() -> None:
    switches = {name for name, option in ENGINE.items() if option.kind == "switch"}
    assert {n for n, default in DEFAULTS.items() if default in ("True", "False")} <= switches


@pytest.mark.parametrize("name", names_of(ENGINE, "ignored"))
def test_an_option_without_effect_accepts_any_value(name: str) -> None:
    assert read_options("headstart-tiny", {name: object()}).config == {}


@pytest.mark.parametrize("name", names_of(ENGINE, "absent"))
def test_an_absent_option_accepts_only_neutral_values(name: str) -> None:
    for nothing in (None, *ENGINE[name].values):
        assert read_options("headstart-tiny", {name: nothing}).config == {}
    values = [value for value in ENGINE[name].values if value not in ("", [], {})]
    reason = "allowed: .*" if values else "not an option of headstart"
    with pytest.raises(ConfigError, match=f"^{name} is 'x'; {reason}; see docs/"):
        LLM("headstart-tiny", **{name: "x"})


@pytest.mark.parametrize("part", ["EngineArgs", "LLM.__init__()"])
def test_vllms_defaults_are_accepted(part: str) -> None:
    for name, source in SURFACE[part].items():
        if name != "model" and source not in (None, "..."):
            default = set() if source == "set()" else ast.literal_eval(source)
            read_options("headstart-tiny", {name: default})


def test_the_constructor_has_every_option() -> None:
    """The defaults are those of `EngineConfig`."""
    parameters = inspect.signature(LLM).parameters
    for option in fields(EngineConfig):
        assert parameters[option.name].default == option.default, option.name
    assert set(parameters) == {
        *EngineConfig.__dataclass_fields__,
        *names_of(ENGINE, "works"),
        "ignored",
    }


@pytest.mark.parametrize("name", [name for name in names_of(ENGINE, "works") if name != "model"])
def test_supported_options_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^({name}|max_images|num_blocks|kv_cache_memory) is"):
        make_config(read_options("headstart-tiny", {name: object()}).config)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_modl_len is 3; not an option of headstart; see"):
        LLM("headstart-tiny", max_modl_len=3)
    with pytest.raises(TypeError, match="'model'"):
        LLM()  # type: ignore[call-arg]
    assert read_options("headstart-tiny", {"device": "auto"}).config == {}


def test_a_tokenizer_of_another_folder(tmp_path: Path) -> None:
    tokenizer = TINY_TOKENIZERS["byte_level"]()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = save_smallest(tmp_path / "model")
    llm = make_llm(model, tokenizer=str(tmp_path / "tokenizer"))
    try:
        [output] = llm.generate("BA", SamplingParams(temperature=0, max_tokens=1))
        assert output.prompt_token_ids == tokenizer.encode("BA")
    finally:
        llm.close()
    assert read_options(model, {"tokenizer": str(model)}).tokenizer is None
    with pytest.raises(ConfigError, match="tokenizer is 'no/where'; allowed: the folder"):
        LLM(model, tokenizer="no/where")
    with pytest.raises(ConfigError, match=r"tokenizer is .*, a folder without a tokenizer"):
        LLM("headstart-tiny", tokenizer=tmp_path)


def test_values_are_parsed_by_their_format() -> None:
    args = read(
        *["--model", "1234", "--max-model-len", "4k", "--gpu_memory_utilization", "0.5"],
        *["--limit-mm-per-prompt", '{"image": 2}', "-tp", "1", "--no-enable-prefix-caching"],
        *["--served-model-name", "one", "two", "--max-num-seqs", "2K", "--generation-config=vllm"],
    )
    assert asdict(args) == {
        "model": "1234",
        "max_model_len": 4000,
        "gpu_memory_utilization": 0.5,
        "limit_mm_per_prompt": {"image": 2},
        "enable_prefix_caching": False,
        "served_model_name": ["one", "two"],
        "max_num_seqs": 2048,
        "generation_config": "vllm",
    }


def test_flags_are_written_as_in_vllm_0_33() -> None:
    args = read(
        *["--model", "headstart-tiny", "--disable-prefix-caching", "-O3", "-cc.mode=NONE"],
        *["--limit_mm_per_prompt.image=2", "--override-generation-config.top_k", "3", "-q", "None"],
        *["--cudagraph-capture-sizes", "1", "2", "--device-memory-utilization", "0.5"],
    )
    assert asdict(args) == {
        "model": "headstart-tiny",
        "enable_prefix_caching": False,
        "optimization_level": 3,
        "compilation_config": {"mode": "NONE"},
        "limit_mm_per_prompt": {"image": 2},
        "override_generation_config": {"top_k": 3},
        "cudagraph_capture_sizes": [1, 2],
        "gpu_memory_utilization": 0.5,
    }


def test_keys_of_json_are_merged() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--some-json")
    parser.add_argument("rest", nargs="*")
    arguments = ["--some_json.a.b", "1", "--some-json.a.c=x.y", "--some-json.d+", "e,f"]
    parsed = parser.parse_args([*arguments, "--some-json.d+=g", "--", "--some-json.a"])
    assert json.loads(parsed.some_json) == {"a": {"b": 1, "c": "x.y"}, "d": ["e", "f", "g"]}
    assert parsed.rest == ["--some-json.a"]
    assert parser.parse_args(["a.b=c"]).rest == ["a.b=c"]
    assert parser.parse_known_args(["--other.a", "1"])[1] == ["--other.a"]


@pytest.mark.parametrize("rest", [[], ["--more", "9"], ["-m", "9"], ["--", "9"]])
def test_a_key_of_json_does_not_consume_a_flag(
    rest: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--some-json")
    parser.add_argument("-m", "--more")
    parser.add_argument("rest", nargs="*")
    with pytest.raises(SystemExit):
        parser.parse_args(["--some-json.a", *rest])
    assert "argument --some-json.a: expected one argument" in capsys.readouterr().err
    assert parser.parse_args(["--some-json.a", "-1"]).some_json == '{"a": -1}'


@pytest.mark.parametrize("text", ["9" * 400 + "k", "9" * 400 + ".5k", "9" * 5000 + "K", "9" * 5000])
def test_a_long_number_is_refused_with_a_clear_error(text: str) -> None:
    """Earlier, 400 digits and a unit raised OverflowError, and 5,000 digits an argparse error."""
    args = read("--model", "headstart-tiny", "--max-model-len", text)
    with pytest.raises(ConfigError, match=r"^max_model_len is '[^ ]{,100}'; allowed: a whole"):
        make_config(read_config({"max_model_len": args.max_model_len}))


@pytest.mark.parametrize(
    ("theirs", "ours", "value"),
    [
        ("num_gpu_blocks_override", "num_blocks", 7),
        ("kv_cache_memory_bytes", "kv_cache_memory", 7),
        ("limit_mm_per_prompt", "max_images", {"image": 7}),
    ],
)
def test_two_names_of_an_option_have_one_value(theirs: str, ours: str, value: object) -> None:
    """Earlier, the last name in the dict was used."""
    message = re.escape(f"{ours} is 8 and {theirs} is {value}; allowed: one of")
    for options in ({theirs: value, ours: 8}, {ours: 8, theirs: value}):
        with pytest.raises(ConfigError, match=f"^{message}"):
            read_config(options)
        assert read_config(options | {ours: None}) == read_config(options | {ours: 7}) == {ours: 7}


def test_a_template_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_options("headstart-tiny", {"chat_template": "~/a.jinja"}).chat_template == (
        "{{ messages }}"
    )
    with pytest.raises(ConfigError, match=r"chat_template is '~no_user.*', which is neither"):
        read_config({"chat_template": "~no_user.at.all/a"})


def test_absent_options_and_a_missing_model_are_errors() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; allowed: 1; see docs/"):
        read("--model", "headstart-tiny", "-tp", "2")
    with pytest.raises(ConfigError, match="the arguments have no model; allowed: --model"):
        read("--max-model-len", "100")


def test_flags_of_the_async_engine() -> None:
    alone = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser(), async_args_only=True)
    assert "max_model_len" not in vars(alone.parse_args([]))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "headstart-tiny", "--enable-log-requests"])
    engine_args = AsyncEngineArgs.from_cli_args(args)
    assert isinstance(engine_args, AsyncEngineArgs)
    assert engine_args.enable_log_requests is True


def test_options_are_attributes_that_may_be_set(tmp_path: Path) -> None:
    args = EngineArgs("headstart-tiny", max_num_seqs=3)
    assert (args.max_num_seqs, args.tensor_parallel_size, args.quantization) == (3, 1, None)
    args.limit_mm_per_prompt = {"image": 1} | dict(args.limit_mm_per_prompt or {})
    assert asdict(args)["limit_mm_per_prompt"] == {"image": 1}
    args.model = str(tmp_path)
    assert asdict(args)["model"] == str(tmp_path)
    args.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        LLM.from_engine_args(args)
    assert not hasattr(args, "max_modl_len")


def test_dashes_and_underscores_are_equivalent() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--one-two", default=0, type=int)
    parser.add_argument("--three_four", default=0, type=int)
    parser.add_argument("rest", nargs="*")
    for arguments in (["--one_two", "1", "--three-four=2"], ["--one-two=1", "--three_four", "2"]):
        parsed = parser.parse_args([*arguments, "--", "--a_b"])
        assert (parsed.one_two, parsed.three_four, parsed.rest) == (1, 2, ["--a_b"])
    parsed, others = parser.parse_known_args(["--one_two=3", "a_b"])
    assert (parsed.one_two, parsed.rest, others) == (3, ["a_b"], [])


def test_flags_cannot_be_added_twice() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(argparse.ArgumentError, match="conflicting option string"):
        EngineArgs.add_cli_args(parser)
    program = FlexibleArgumentParser(conflict_handler="resolve")
    program.add_argument("--seed", default="own")
    assert EngineArgs.add_cli_args(program).parse_args(["--seed", "3"]).seed == 3


def test_engine_args_behave_like_a_dataclass() -> None:
    assert {member.name for member in fields(EngineArgs)} >= set(DEFAULTS)
    args = AsyncEngineArgs("headstart-tiny", seed=3)
    assert replace(args, seed=4).seed == 4
    assert copy.deepcopy(args) == pickle.loads(pickle.dumps(args)) == args != EngineArgs(args.model)
    assert vars(args) == asdict(args)
    assert repr(args) == "AsyncEngineArgs(model='headstart-tiny', seed=3)"
    for name in ("abort", "create_engine_config", "cache_config"):
        assert not hasattr(args, name)


def test_the_page_lists_every_name() -> None:
    """Each name is in the section of its state."""
    page = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    works, rest = page.split("\n## Works differently\n")
    ignored, absent = rest.split("\n## Without effect\n")[1].split("\n## Not here\n")
    pages = {"works": works, "ignored": ignored, "absent": absent}
    for name, option in ENGINE.items():
        assert f"`{name}`" in pages[option.state], name
    for name, option in SERVE.items():
        assert f"`--{name.replace('_', '-')}`" in pages[option.state], name


def test_drafts_are_configured_as_in_vllm() -> None:
    def speculation(**options: object) -> int:
        return make_config(read_config(options)).speculation

    drafts = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    assert speculation(speculative_config=drafts) == 5
    assert speculation(speculative_config=drafts, speculation=5) == 5
    assert speculation(speculative_config={"method": "suffix", "num_speculative_tokens": 64}) == 15
    assert speculation(speculative_config={"method": "ngram"}) == 15
    assert speculation(speculative_config=None, speculation=3) == 3
    with pytest.raises(ConfigError, match=r"^speculation is 3 and speculative_config is .*of the"):
        speculation(speculative_config=drafts, speculation=3)
    with pytest.raises(ConfigError, match=r"^num_speculative_tokens of .* is -1; allowed: a whole"):
        speculation(speculative_config={"method": "ngram", "num_speculative_tokens": -1})
    with pytest.raises(ConfigError, match=r'^speculative_config is .*"ngram" or "suffix"$'):
        speculation(speculative_config={"method": "eagle", "model": "drafter"})
