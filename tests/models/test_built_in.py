"""The built-in model answers right, so a wrong K/V row shows as a wrong answer.

The questions are those of vLLM's usage example, about its table of 30 people.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headstart import LLM, AsyncLLM, LLMEngine, SamplingParams
from headstart.cli.demo import INSTRUCTION, people_table
from headstart.cli.main import main
from headstart.errors import DamagedModelError, ModelNotFoundError
from headstart.models import files
from headstart.models.tokenizer import load_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=32)
ASKED = "Question: what is the {0} of {1}? Your answer: The {0} of {1} is "
ANSWERS = {
    ("age", "John Doe"): "29",
    ("age", "Zack Blue"): "30",
    ("age", "Emma Black"): "40",
    ("country", "Zack Blue"): "Australia",
    ("occupation", "Zack Blue"): "Lawyer",
    ("ID", "Zack Blue"): "28",
    ("address", "Mia Green"): "975 Pine St, Edinburgh, UK",
}
PROMPTS = [INSTRUCTION + people_table() + ASKED.format(*about) for about in ANSWERS]
TOKENIZER = load_tokenizer(files.BUILT_IN)
assert TOKENIZER is not None
# Two of the prompts fit, but not their answers.
TIGHT = sum(len(TOKENIZER.encode(prompt)) for prompt in PROMPTS[:2])


@pytest.fixture
def engines() -> Iterator[Any]:
    llms: list[LLM] = []

    def make(**options: Any) -> LLM:
        llms.append(LLM(files.BUILT_IN, **({"num_blocks": 300, "debug": True} | options)))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    llm = LLM(files.BUILT_IN, num_blocks=300, debug=True)
    yield llm
    llm.close()


OPTIONS = {
    "plain": {},
    "cache off": {"enable_prefix_caching": False, "num_blocks": 600},
    "alone": {"max_num_seqs": 1},
    "chunked": {"max_num_batched_tokens": 100},
    "preempted": {"enable_prefix_caching": False, "block_size": 1, "num_blocks": TIGHT},
    "deterministic": {"deterministic": True},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_answers_are_right_cold_and_warm(name: str, engines: Any) -> None:
    llm = engines(**OPTIONS[name])
    # Where nothing is cached each prompt is read whole, twice, and more often when preempted.
    count = len(PROMPTS) if llm.engine.config.enable_prefix_caching else 2
    for _ in range(2):
        outputs = llm.generate(PROMPTS[:count], GREEDY, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == list(ANSWERS.values())[:count]
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
        assert (llm.engine.num_preemptions > 0) is (name == "preempted")


def test_a_chat_about_one_document(engines: Any) -> None:
    llm = engines()
    messages = [
        {"role": "user", "content": INSTRUCTION + people_table() + "What is the age of John Doe?"}
    ]
    num_cached = 0
    for right, following in (("29", "What is the age of Zack Blue?"), ("30", "")):
        [output] = llm.chat(messages, GREEDY)
        assert output.outputs[0].text.endswith(right)
        assert output.num_cached_tokens >= num_cached
        num_cached = len(output.prompt_token_ids)
        answer = {"role": "assistant", "content": output.outputs[0].text}
        messages += [answer, {"role": "user", "content": following}]


CARDS = """\
Name: Ada Lovelace
Age: 36
Occupation: Writer

Name: Alan Turing
Age: 41
Occupation: Chemist
"""
SETTINGS = "door code: 4711\nwifi password: sunshine42\nrouter address: 192.168.0.1\n"
PROSE = "Maria Lopez is 34 years old. Maria Lopez lives at 12 Hill St, Oxford, UK.\n"


@pytest.mark.parametrize(
    ("document", "question", "answer"),
    [
        (INSTRUCTION + people_table(), "Who has the ID 28?", "The person is Zack Blue"),
        (INSTRUCTION + people_table(), "Who lives in Cork?", "The person is Jack Indigo"),
        (INSTRUCTION + people_table(), "Whose age is 99?", "The person is not in the document"),
        (
            INSTRUCTION + people_table(),
            "What is Mia Green's shoe size?",
            "The shoe size of Mia Green is not in the document",
        ),
        (
            CARDS,
            "what does Alan Turing do for a living?",
            "The occupation of Alan Turing is Chemist",
        ),
        (CARDS, "Whose age is 36?", "The person is Ada Lovelace"),
        (SETTINGS, "What is the wifi password?", "The wifi password is sunshine42"),
        (SETTINGS, "Tell me the router address.", "The router address is 192.168.0.1"),
        (SETTINGS, "What is the server name?", "The server name is not in the document"),
        (
            PROSE,
            "Where does Maria Lopez live?",
            "The address of Maria Lopez is 12 Hill St, Oxford, UK",
        ),
    ],
)
def test_other_documents_and_questions(
    document: str, question: str, answer: str, tiny: LLM
) -> None:
    [output] = tiny.chat([{"role": "user", "content": f"{document}\n{question}"}], GREEDY)
    assert output.outputs[0].text == answer
    assert output.outputs[0].finish_reason == "stop"


def test_an_error_for_a_missing_model_file_explains_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "__file__", str(tmp_path / "models" / "files.py"))
    with pytest.raises(ModelNotFoundError, match="install the package again"):
        files.find_folder(files.BUILT_IN)


@pytest.mark.parametrize(
    "name",
    [
        "headstart_tiny",
        "headstart-tny",
        "Headstart-Tiny",
        "./headstart-tiny",
        "a/headstart-tiny",
    ],
)
def test_an_error_for_a_similar_name_suggests_the_built_in_model(name: str) -> None:
    for call in (LLM, AsyncLLM, LLMEngine, files.find_folder):
        with pytest.raises(ModelNotFoundError, match=r"; did you mean headstart-tiny\?$"):
            call(name)
    with pytest.raises(ModelNotFoundError, match=r"no folder(?!.*did you mean)"):
        files.find_folder("tiny-llama")


@pytest.mark.parametrize("command", [["run", "Hi"], ["chat"], ["serve"], ["demo"]])
def test_commands_suggest_the_built_in_model(command: list[str]) -> None:
    done = CliRunner().invoke(main, [*command, "--model", "headstart-tin"])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].endswith("; did you mean headstart-tiny?")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    for file in files.find_folder(files.BUILT_IN).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DamagedModelError, match=r"model\.safetensors"):
        LLM(tmp_path)
