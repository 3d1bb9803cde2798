"""Write the tables of `docs/vllm.md` anew from the tables that the code decides by.

    python tools/vllm_table.py

What stands above the first heading of a table stays.
"""

from collections.abc import Mapping
from pathlib import Path

from headstart.errors import ConfigError, RequestError
from headstart.frontend.vllm_api import calls, configs, members, modules, sampling
from headstart.frontend.vllm_api.options import ENGINE
from headstart.frontend.vllm_api.rows import Flags, JsonNames, Names, Row, Verdict
from headstart.frontend.vllm_api.serve_args import SERVE_ROWS
from headstart.server.openai.fields import CHAT_ROWS, COMPLETION_ROWS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "vllm.md"
START = "## LLM(...), EngineArgs(...)\n"

# Rows of `ENGINE` that hold for a server as they are stand there.
_OF_A_SERVER = {name: row for name, row in SERVE_ROWS.items() if ENGINE.rows.get(name) != row}
# Of completions: rows that chats have otherwise.
_OF_COMPLETIONS = {n: row for n, row in COMPLETION_ROWS.items() if CHAT_ROWS.get(n) != row}
SECTIONS: Mapping[str, Names] = {
    "LLM(...), EngineArgs(...)": ENGINE,
    "headstart serve": Flags("headstart serve", _OF_A_SERVER, ConfigError),
    "POST /v1/chat/completions": JsonNames("the request", CHAT_ROWS, RequestError),
    "POST /v1/completions": JsonNames("the request", _OF_COMPLETIONS, RequestError),
    "SamplingParams(...)": sampling.SAMPLING,
    "SamplingParams": members.PARAMS,
    "StructuredOutputsParams(...)": sampling.STRUCTURED,
    "LLM.generate(...)": calls.GENERATE,
    "LLM.chat(...)": calls.CHAT,
    "LLM.beam_search(...)": calls.BEAM_SEARCH_CALL,
    "BeamSearchParams(...)": sampling.BEAM_SEARCH,
    "LLM.reset_prefix_cache(...)": calls.RESET,
    "AsyncLLM.generate(...)": calls.ASYNC_GENERATE,
    "LLMEngine.add_request(...)": calls.ADD_REQUEST,
    "AsyncLLM.from_engine_args(...), LLMEngine.from_engine_args(...)": calls.FROM_ENGINE_ARGS,
    "Prompts": calls.PROMPT,
    "LoRARequest(...)": calls.LORA,
    "LLM": members.LLM,
    "AsyncLLM": members.ASYNC_LLM,
    "LLMEngine": members.LLM_ENGINE,
    "LLM.llm_engine": members.ENGINE_VIEW,
    **configs.CONFIGS,
    "RequestOutput": members.REQUEST_OUTPUT,
    "RequestOutput.metrics": members.REQUEST_METRICS,
    "CompletionOutput": members.COMPLETION_OUTPUT,
    "Logprob": members.LOGPROB,
    "Imports": members.EXPORTS,
    "Modules": modules.MODULES,
}


def table(names: Names) -> str:
    """The rows of one table, in Markdown."""
    lines = ["| name | | |", "|---|---|---|"]
    order = list(Verdict)
    for name, row in sorted(names.rows.items(), key=lambda item: order.index(item[1].verdict)):
        lines.append(f"| `{names.spell(name)}` | {row.verdict.value} | {_note(names, row)} |")
    return "\n".join(lines)


def _note(names: Names, row: Row) -> str:
    shown = [names.show(value) for value in row.allowed if row.verdict is Verdict.REFUSED]
    allowed = ", ".join(f"`{value}`" for value in shown if value)
    return f"taken: {allowed}; {row.note}" if allowed else row.note


def all_tables() -> str:
    """Every table under its heading."""
    return "\n\n".join(f"## {title}\n\n{table(names)}" for title, names in SECTIONS.items()) + "\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(text.partition(START)[0] + all_tables(), encoding="utf-8")


if __name__ == "__main__":
    main()
