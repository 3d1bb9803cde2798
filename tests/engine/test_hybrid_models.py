"""Tiny models with recurrent layers answer as transformers does, from any resume point.

The oracle is transformers' pass over prompt and answer at once, without a cache.
"""

from pathlib import Path

import pytest
import torch

from headstart import LLM, SamplingParams
from headstart.lora.request import LoRARequest
from tests.tiny_adapters import Oracle, make_adapter
from tests.tiny_models import EACH_MIXER, HYBRIDS, RECURRENT, save_tiny, tiny_config, tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
TEXT = torch.randint(3, 131, (150,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [*((name, False) for name in (*HYBRIDS, *RECURRENT)), *((name, True) for name in HYBRIDS)],
)
def test_answers_after_hits(name: str, deterministic: bool, tmp_path: Path) -> None:
    reference = tiny_model(tiny_config(name))
    reference.set_attn_implementation("eager")
    llm = LLM(
        str(save_tiny(name, tmp_path)),
        dtype="float32",
        num_blocks=200,
        num_states=100,
        debug=True,
        max_num_batched_tokens=64,  # a long prompt takes several steps
        deterministic=deterministic,
    )

    def run(prompts: list[list[int]]) -> list[int]:
        """Check answers and log-probabilities; return the hit tokens of each prompt."""
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            answer = list(output.outputs[0].token_ids)
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + answer])).logits[0]
            expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
            assert answer == expected.argmax(-1).tolist()
            rows = zip(output.outputs[0].logprobs, answer, strict=True)
            own = [row[token].logprob for row, token in rows]
            torch.testing.assert_close(torch.tensor(own), expected.amax(-1), rtol=0.0, atol=1e-4)
        return [output.num_cached_tokens for output in outputs]

    prompts = [[*TEXT[:n], 5, 6, n % 50] for n in (30, 77, 101)]
    assert run(prompts[:1]) == [0]
    run(prompts[1:2])
    run(prompts[2:])
    [hit] = run([TEXT])
    assert hit == (96 if deterministic else 77)
    assert run([TEXT]) == [144 if deterministic else 149]
    branches = [[*TEXT[:n], 9, n % 100] for n in (30, 60, 77, 101, 150)]
    for branch in branches:
        run([branch])
    if not deterministic:
        assert run([[*branch[:-2], 8, 8] for branch in branches]) == [30, 60, 77, 101, 150]
    llm.close()


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("lfm2", ["q_proj", "in_proj", "out_proj", "w1"]),
        ("qwen3_5_text", ["q_proj", "in_proj_qkv", "in_proj_a", "out_proj"]),
        ("granitemoehybrid", ["v_proj", "in_proj", "out_proj"]),
    ],
)
def test_adapters_of_recurrent_layers(name: str, targets: list[str], tmp_path: Path) -> None:
    """An adapter has separate states, and answers after a hit as PEFT does."""
    base = save_tiny(name, tmp_path / "base")
    folder = make_adapter(base, tmp_path / "adapter", target_modules=targets)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    llm = LLM(str(base), dtype="float32", num_blocks=64, num_states=16, debug=True)
    adapter = LoRARequest("adapter", 1, str(folder))
    for request, path in ((None, None), (adapter, folder)):
        expected = Oracle(base, path).greedy(TEXT, 6)
        for cached in (0, len(TEXT) - 1):
            [output] = llm.generate([TEXT], params, use_tqdm=False, lora_request=request)
            assert list(output.outputs[0].token_ids) == expected
            assert output.num_cached_tokens == cached
    llm.close()


@pytest.mark.parametrize("name", EACH_MIXER)
def test_bits_do_not_depend_on_the_cache(name: str, tmp_path: Path) -> None:
    """Bits are equal with deterministic=True, from memory and from another engine's disk."""
    folder, answers = save_tiny(name, tmp_path / "model"), []
    prompts = [TEXT[:40], TEXT[:77], [*TEXT[:60], 9, 9]]
    for options in ({"enable_prefix_caching": False}, *[{"cache_dir": str(tmp_path / "kv")}] * 2):
        llm = LLM(
            str(folder),
            dtype="float32",
            num_blocks=200,
            num_states=100,
            debug=True,
            max_num_batched_tokens=64,
            deterministic=True,
            **options,
        )
        outputs = [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for prompt in prompts]
        completions = [output.outputs[0] for output in outputs]
        answers.append([(c.token_ids, c.cumulative_logprob, c.logprobs) for c in completions])
        llm.close()
    hits = [output.num_cached_tokens for output in outputs]
    has_attention = name not in ("mamba", "mamba2", "falcon_mamba")
    # Of states without K/V, stores have one for every 64 tokens.
    assert hits == ([32, 64, 48] if has_attention else [0, 64, 32])
    assert answers[1] == answers[0] and answers[2] == answers[0]
