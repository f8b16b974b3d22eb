"""What the fake model computes: a token from the sum of those before it, hidden states and log-probabilities as simple.

Knows no pages and no steps. Next: `testing.counting_runner`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from jaxserve.core.events import Logprobs
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.core.sequence import FinishReason


def next_token(visible: Sequence[int], vocab_size: int, seed: int = 0) -> int:
    """The token that follows `visible`: the sum of its ids, plus how many they are, plus the seed, modulo the vocabulary.

    Greedy sequences have seed 0 here, so after (5, 3) comes (5 + 3 + 2) % vocab_size.
    """
    return (sum(visible) + len(visible) + seed) % vocab_size


def hidden_state(visible: Sequence[int]) -> tuple[float, float, float, float]:
    """The hidden state of the last of `visible`: the token, its position, the sum so far, and 1."""
    return (float(visible[-1]), float(len(visible) - 1), float(sum(visible)), 1.0) if visible else (0.0, 0.0, 0.0, 0.0)


def solo_output(
    prompt: Sequence[int], params: SamplingParams, *, max_length: int, eos: Set[int] = frozenset(), vocab_size: int = 1000, index: int = 0
) -> tuple[list[int], FinishReason, int | None]:
    """What sequence `index` of a request must produce, whatever runs beside it: tokens, finish reason and stop reason.

    Sampling needs a seed in `params`; `max_length` is the context length.
    """
    seed = 0 if params.is_greedy else (params.seed or 0) + index
    ends_at_eos = set() if params.ignore_eos else eos
    tokens: list[int] = []
    while True:
        token = next_token([*prompt, *tokens], vocab_size, seed)
        if len(tokens) < params.min_tokens:
            while token in ends_at_eos or token in params.stop_token_ids:
                token = (token + 1) % vocab_size
        tokens.append(token)
        if len(tokens) >= params.min_tokens and token in ends_at_eos:
            return tokens, FinishReason.STOP, None
        if len(tokens) >= params.min_tokens and token in params.stop_token_ids:
            return tokens, FinishReason.STOP, token
        if len(tokens) == params.max_tokens or len(prompt) + len(tokens) == max_length:
            return tokens, FinishReason.LENGTH, None


def logprobs_of(token_id: int, visible: Sequence[int], vocab_size: int, num_top: int) -> Logprobs:
    """Log-probabilities after `visible`: with best = next_token(visible), token (best + r) % vocab_size has rank r + 1, logprob -(r + 1).

    `num_top` -1 gives the whole vocabulary in vocabulary order.
    """
    return logprobs_around(next_token(visible, vocab_size), token_id, vocab_size, num_top)


def logprobs_around(best: int, token_id: int, vocab_size: int, num_top: int) -> Logprobs:
    """`logprobs_of` where the most likely token is known."""
    ids = list(range(vocab_size)) if num_top == -1 else [(best + r) % vocab_size for r in range(num_top)]
    ranks = [(i - best) % vocab_size + 1 for i in ids]
    rank = (token_id - best) % vocab_size + 1
    return Logprobs(token_id, float(-rank), rank, ids, [float(-r) for r in ranks])
