"""Sampling of text: cached keys and values give the logits of a full forward pass, and choices are reproducible."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.data.text_tokens import ByteTokenizer
from common.models.gpt import GPT
from common.models.sampling import NextTokenPredictor, draw_token, sample_text, sample_tokens
from tests.harness.commands.refusals import expect_refusal

CONTEXT = 12
VOCABULARY = 256


def build_gpt(**options: Any) -> GPT:
    return GPT(CONTEXT, VOCABULARY, width=16, layers=2, heads=4, **options).double().eval()


class RepeatLast(nn.Module):
    """A network other than a GPT: the next token is the last one plus the number of tokens in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor) -> Tensor:
        following = (input + input.shape[1]) % VOCABULARY
        return 100 * self.scale * nn.functional.one_hot(following, VOCABULARY)


class Recital(nn.Module):
    """A network that continues any prompt of a known length with fixed tokens."""

    def __init__(self, tokens: list[int], prompt_length: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.prompt_length = prompt_length
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor) -> Tensor:
        token = torch.tensor(self.tokens[input.shape[1] - self.prompt_length])
        logits = 1000 * self.scale * nn.functional.one_hot(token, VOCABULARY)
        return logits.expand(*input.shape, -1)


@pytest.mark.parametrize("key_value_heads", [0, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_cached_logits_equal_those_of_a_full_forward_pass(key_value_heads: int, tied: bool) -> None:
    model = build_gpt(key_value_heads=key_value_heads, tied=tied)
    text = torch.randint(VOCABULARY, (40,)).tolist()
    predictor = NextTokenPredictor(model, CONTEXT)
    lengths = [3, 1, 1, 4, *[1] * 31]  # the prompt, single tokens, several tokens, and beyond the context
    cached = []
    windows = []
    start = 0
    for length in lengths:
        cached.append(predictor.predict(text[start : start + length]))
        windows.append(list(predictor.tokens))
        start += length
        assert predictor.tokens == text[start - len(predictor.tokens) : start]
    predictor.remove_caches()
    assert max(map(len, windows)) == CONTEXT
    for logits, window in zip(cached, windows, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(logits, model(torch.tensor([window]))[0, -1], rtol=1e-12, atol=1e-12)


def test_a_new_token_needs_the_forward_pass_of_one_token() -> None:
    model = build_gpt()
    lengths = []
    model.embedding.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    sample_tokens(model, CONTEXT, [1, 2, 3], 6)
    assert lengths == [3, 1, 1, 1, 1, 1]


def test_a_prompt_longer_than_the_context_is_shortened_to_its_end() -> None:
    model = build_gpt()
    long_prompt = torch.randint(VOCABULARY, (30,)).tolist()
    assert sample_tokens(model, CONTEXT, long_prompt, 3) == sample_tokens(model, CONTEXT, long_prompt[-6:], 3)


def test_samples_depend_on_the_seed_and_leave_the_model_unchanged() -> None:
    model = build_gpt()
    tokens = torch.randint(VOCABULARY, (1, CONTEXT))
    before = model(tokens)
    first = sample_tokens(model, CONTEXT, [1], 20, seed=1)
    assert sample_tokens(model, CONTEXT, [1], 20, seed=1) == first
    assert sample_tokens(model, CONTEXT, [1], 20, seed=2) != first
    assert torch.equal(model(tokens), before), "a cache must not remain in the model"


def test_a_network_without_caches_computes_all_tokens_again() -> None:
    assert sample_tokens(RepeatLast(), 4, [10], 5, temperature=0) == [11, 13, 16, 20, 22]


class FixedPositions(nn.Module):
    """A network with a table of positions that it does not cut to the length of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(CONTEXT, VOCABULARY))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.one_hot(input, VOCABULARY) + self.positions


@pytest.mark.parametrize("prompt, reason", [([1, 2, 3], "3 tokens (The size"), ([1], "1 token, because it returns")])
def test_a_network_that_accepts_only_full_texts_is_refused(prompt: list[int], reason: str) -> None:
    with expect_refusal(f"the network does not accept a text of {reason} ... accepts any length up to 12 tokens"):
        sample_tokens(FixedPositions(), CONTEXT, prompt, 1)


def test_a_prompt_may_contain_any_bytes() -> None:
    prompt = os.fsdecode(b"caf\xe9")  # as Python decodes an argument that is not UTF-8
    assert sample_text(build_gpt(), CONTEXT, ByteTokenizer(), prompt, tokens=2).startswith("caf�")


def test_temperature_and_top_k_limit_the_choices() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)

    def draw_many(temperature: float, top_k: int) -> set[int]:
        return {draw_token(logits, temperature, top_k, generator) for _ in range(300)}

    assert draw_many(0, 0) == {1}
    assert draw_many(1e-310, 0) == draw_many(1e-310, 2) == {1}, "a logit divided by the temperature is infinite"
    assert draw_many(1, 2) == {1, 3}
    assert draw_many(1, 0) == {0, 1, 2, 3}
    assert draw_many(1, 9) == {0, 1, 2, 3}, "a top_k above the vocabulary selects all tokens"
    frequencies = torch.zeros(4)
    for _ in range(4000):
        frequencies[draw_token(logits, 2.0, 0, generator)] += 1
    torch.testing.assert_close(frequencies / 4000, (logits / 2).softmax(0).float(), rtol=0, atol=0.03)


def test_a_sampled_text_starts_with_the_prompt_and_contains_no_control_characters() -> None:
    sampled = [*"é\n\t".encode(), 0x1B, 0xFF]
    assert sample_text(Recital(sampled, len("def ")), 99, ByteTokenizer(), "def ", tokens=6) == "def é\n\t�"
    assert sample_text(Recital(sampled, len("\n")), 99, ByteTokenizer(), "", tokens=6) == "\né\n\t�"
