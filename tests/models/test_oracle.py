"""Every supported architecture over paged K/V, compared with `generate` of transformers."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headstart.attention import AttentionOptions
from tests.models.paged import Paged
from tests.tiny_models import TINY, VOCABULARY

LENGTHS = (19, 30, 5)
NEW_TOKENS = 8
# Prompt rows of each sequence per step; afterwards all decode side by side.
PIECES = ((7, 11, 2), (1, 1, 2), (11, 0, 1), (0, 17, 0), (0, 1, 0))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def oracle(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], Tensor, Tensor]:
    """Return the greedy tokens of transformers, their logits, and those of the prompt."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=VOCABULARY + 1,  # none of the tokens: so all texts have one length
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        prompt_logits = model(ids, use_cache=False).logits[0]
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits), prompt_logits


@pytest.mark.parametrize("name", TINY)
def test_paged_greedy_equals_generate(name: str) -> None:
    reference = TINY[name]()
    reference.set_attn_implementation("eager")
    paged = Paged(TINY[name]())
    sequences = [paged.add(prompt, NEW_TOKENS) for prompt in prompts()]
    for counts in PIECES:
        paged.step([(s, n) for s, n in zip(sequences, counts, strict=True) if n])
    for _ in range(NEW_TOKENS):
        for sequence in sequences:
            sequence.token_ids.append(int(sequence.logits[-1].argmax()))
        paged.step([(sequence, 1) for sequence in sequences])
    for sequence, prompt in zip(sequences, prompts(), strict=True):
        tokens, generated, prompt_logits = oracle(reference, prompt)
        assert sequence.token_ids[len(prompt) :] == tokens
        ours = torch.stack(sequence.logits)
        assert ours.dtype == torch.float32
        scale = float(prompt_logits.abs().max())
        for actual, expected in (
            (ours[: len(prompt)], prompt_logits),
            (ours[len(prompt) - 1 : -1], generated),
        ):
            torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-5 * scale)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("mistral", "sliding_window"),
        ("gemma2", "sliding_window"),
        ("gemma2", "softcap"),
        ("gemma3", "sliding_window"),
        ("phi3", "sliding_window"),
        ("gpt_oss", "sliding_window"),
        ("gpt_oss", "sinks"),
        ("cohere2", "sliding_window"),
        ("starcoder2", "sliding_window"),
    ],
)
def test_the_tiny_models_use_their_features(name: str, option: str) -> None:
    """Otherwise the comparison above would prove nothing about windows, caps and sinks."""
    paged = Paged(TINY[name]())
    seen: Counter[bool] = Counter()
    attend = paged.backend.attend

    def spy(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        seen[getattr(options, option) is not None] += 1
        return attend(layer, q, k, v, options)

    paged.backend.attend = spy  # type: ignore[method-assign]
    sequence = paged.add(prompts()[0])
    paged.step([(sequence, len(sequence.token_ids))])
    assert seen[True] > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    ("dtype", "kernels"), [(torch.bfloat16, "1"), (torch.bfloat16, "0"), (torch.float16, "1")]
)
def test_half_precision_stays_near_full(
    name: str, dtype: torch.dtype, kernels: str, use_kernels: Callable[..., None]
) -> None:
    use_kernels(kernels)
    exact = TINY[name]()
    exact.set_attn_implementation("eager")
    prompt = prompts()[1]
    with torch.no_grad():
        expected = exact(torch.tensor([prompt])).logits[0]
    paged = Paged(TINY[name]().to(dtype))
    sequence = paged.add(prompt)
    for count in (13, 1, 16):
        paged.step([(sequence, count)])
    error = (torch.stack(sequence.logits) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", TINY)
def test_a_block_at_a_time_is_bitwise_reproducible(name: str) -> None:
    """One sequence at a time, block by block, gives equal bits.

    They do not depend on the place of its blocks or on earlier sequences, also for a padded block.
    """
    prompt = prompts()[1][: 4 * BLOCK_ROWS]
    model = Paged(TINY[name]()).decoder

    def run(seed: int, others: int, tail: int) -> Tensor:
        paged = Paged(model, seed=seed)
        for other in range(others):
            sequence = paged.add([(7 * other + n) % VOCABULARY for n in range(20)])
            paged.step([(sequence, 13)])
            paged.step([(sequence, 7)])
        ids = prompt[:-tail] + [0] * tail if tail else prompt
        sequence = paged.add(ids)
        for _ in range(len(prompt) // BLOCK_ROWS):
            paged.step([(sequence, BLOCK_ROWS)], contiguous_gather=True)
        return torch.stack(sequence.logits)

    expected = run(seed=0, others=0, tail=0)
    assert torch.equal(run(seed=1, others=3, tail=0), expected)
    padded = run(seed=2, others=1, tail=3)
    assert torch.equal(padded, run(seed=3, others=0, tail=3))
    assert not torch.equal(padded, expected)


BLOCK_ROWS = 7  # not a divisor of anything: blocks of attention need not be blocks of memory
