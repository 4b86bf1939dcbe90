"""Sampling of text from a trained model, token by token.

A GPT keeps the keys and values of the tokens that it has processed, so that each new token needs the forward pass of
one token only. Other networks compute all tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from common.data.text_tokens import Tokenizer
from common.models.gpt import GPT, KeyValueCache
from common.system.errors import UserError, summarize_error
from common.system.text import format_count

SAMPLE_TOKENS = 256
"""Number of tokens that are sampled after a prompt."""


class NextTokenPredictor:
    """Computes the logits of the next token for a text that grows by one or several tokens at a time.

    The text may be longer than the context of the model. If the context is full, only the second half of the context is
    kept and computed again, because the cached values depend on tokens that have left the context.
    """

    def __init__(self, model: nn.Module, context: int) -> None:
        self.model = model
        self.context = context
        self.tokens: list[int] = []
        """Tokens in the context."""
        self.blocks = model.blocks if isinstance(model, GPT) else []

    def start_caches(self) -> None:
        """Start with empty caches of keys and values."""
        for block in self.blocks:
            block.attention.cache = KeyValueCache()

    def remove_caches(self) -> None:
        """Remove the caches, so that the model computes full texts again."""
        for block in self.blocks:
            block.attention.cache = None

    @torch.no_grad()
    def predict(self, new_tokens: Sequence[int]) -> Tensor:
        """Append tokens to the text, and return the logits [vocabulary] of the next token.

        Raises UserError if the model does not accept texts that are shorter than its context.
        """
        new = list(new_tokens)
        is_full = len(self.tokens) + len(new) > self.context
        if is_full:
            all_tokens = self.tokens + new
            self.tokens = []
            new = all_tokens[-max(1, self.context // 2) :]
        if not self.tokens:
            self.start_caches()
        self.tokens += new
        computed = new if self.blocks else self.tokens
        logits = self._compute_logits(torch.tensor([computed], device=next(self.model.parameters()).device))
        return logits[0, -1]

    def _compute_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [1, T, vocabulary] for tokens [1, T]."""
        problem = f"the network does not accept a text of {format_count(tokens.shape[1], 'token')}"
        remedy = f"sampling needs a network that accepts any length up to {self.context} tokens"
        try:
            logits: Tensor = self.model(tokens)
        except Exception as error:
            if self.blocks:
                raise
            raise UserError(f"{problem} ({summarize_error(error)}); {remedy}") from None
        if logits.shape[:-1] != tokens.shape:  # a table of fixed length has been added to a single token
            raise UserError(f"{problem}, because it returns logits for {logits.shape[1]} tokens; {remedy}")
        return logits


def sample_tokens(
    model: nn.Module,
    context: int,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> list[int]:
    """Sample `count` tokens that continue a prompt of at least one token.

    `temperature` divides the logits; 0 always selects the token with the highest probability. If `top_k` is not 0, only
    the `top_k` tokens with the highest probabilities can be drawn (Fan et al. 2018, arXiv 1805.04833). The model must
    be in eval mode.
    """
    generator = torch.Generator().manual_seed(seed)
    predictor = NextTokenPredictor(model, context)
    sampled: list[int] = []
    new = list(prompt)
    try:
        for _ in range(count):
            logits = predictor.predict(new).double().cpu()
            new = [draw_token(logits, temperature, top_k, generator)]
            sampled += new
    finally:
        predictor.remove_caches()
    return sampled


def draw_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw a token from logits [vocabulary]."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        lowest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    # With a maximum of 0, a quotient may be -inf but not inf, whose softmax is NaN.
    probabilities = ((logits - logits.max()).double() / temperature).softmax(0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def sample_text(
    model: nn.Module,
    context: int,
    tokenizer: Tokenizer,
    text: str,
    *,
    tokens: int = SAMPLE_TOKENS,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """Continue a text by `tokens` tokens, and return the whole text.

    An empty text is replaced by a line break. Bytes that are not valid UTF-8 are replaced, and control characters other
    than line breaks and tabs are omitted, because a terminal could execute them. Raises UserError if the tokenizer has
    no tokens for the text, or if the model does not accept short texts.
    """
    content = (text or "\n").encode(errors="surrogateescape")  # bytes of the command line may not be UTF-8
    prompt = tokenizer.encode(content).tolist()
    if not prompt:
        raise UserError(f"the tokenizer has no tokens for the text {text!r}; use another text")
    sampled = sample_tokens(model, context, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    joined = tokenizer.decode([*prompt, *sampled])
    return "".join(char for char in joined if char.isprintable() or char in "\n\t")
