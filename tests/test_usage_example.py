"""The usage program of vLLM's prefix caching page, with another import line and model name."""

from pathlib import Path

import pytest

from headstart.cli.demo import people_table

PROGRAM = """
import time
from headstart import LLM, SamplingParams

LONG_PROMPT = PREAMBLE + TABLE

def get_generation_time(llm, sampling_params, prompts):
    # time the generation
    start_time = time.time()
    output = llm.generate(prompts, sampling_params=sampling_params)
    end_time = time.time()
    # print the output and generation time
    print(f"Output: {output[0].outputs[0].text}")
    print(f"Generation time: {end_time - start_time} seconds.")
    outputs.extend(output)

# set enable_prefix_caching=True to enable APC
llm = LLM(
    model=MODEL,
    enable_prefix_caching=True
)

sampling_params = SamplingParams(temperature=0, max_tokens=100)

get_generation_time(
    llm,
    sampling_params,
    LONG_PROMPT + "Question: what is the age of John Doe? Your answer: The age of John Doe is ",
)

get_generation_time(
    llm,
    sampling_params,
    LONG_PROMPT + "Question: what is the age of Zack Blue? Your answer: The age of Zack Blue is ",
)
"""


def test_the_usage_program_runs(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preamble = "You are a helpful assistant. Here is a table as follows.\n# Table\n"
    names = {"PREAMBLE": preamble, "TABLE": people_table(), "MODEL": str(demo_model), "outputs": []}
    exec(compile(PROGRAM, "usage.py", "exec"), names)
    first, second = names["outputs"]
    assert first.num_cached_tokens == 0
    shared = len(preamble + people_table() + "Question: what is the age of ")  # one token per byte
    assert second.num_cached_tokens == shared
    assert capsys.readouterr().out.count("Generation time: ") == 2
    names["llm"].close()
