"""The byte-level BPE of a GGUF file (`tokenizer.ggml.model` gpt2) as the parts of a tokenizer.json.

How text is cut before merging is named by `tokenizer.ggml.pre`; only the kinds whose original pre-tokenizer is known exactly are
built, and every other name is an error: a near miss gives wrong token ids for some texts, which nobody notices. The patterns are
those of the models' own tokenizer.json files. Called by `gguf_tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import CheckpointError

LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one value of `tokenizer.ggml.pre` cuts text.

    Attributes:
        pattern: Cuts into its matches; None is GPT-2's own pattern.
        is_digit_single: Every digit is cut off first.
        is_nfc: Text is NFC-normalized first.
        is_whole_word_first: A word that is a token is not merged up from bytes.
        adds_bos: Whether BOS is prepended where the file does not say.
    """

    pattern: str | None = None
    is_digit_single: bool = False
    is_nfc: bool = False
    is_whole_word_first: bool = False
    adds_bos: bool = False


_LLAMA3 = PreTokenizer(pattern=LLAMA3_PATTERN, is_whole_word_first=True, adds_bos=True)
_QWEN2 = PreTokenizer(pattern=QWEN2_PATTERN, is_nfc=True)
_SINGLE_DIGITS = PreTokenizer(is_digit_single=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(pattern=_TEKKEN_PATTERN, is_whole_word_first=True, adds_bos=True),
}


def pre_tokenizer_of(metadata: Mapping[str, Any]) -> PreTokenizer:
    """How the file's text is cut; CheckpointError where that is not known."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(f"GGUF metadata: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}.")
    return PRE_TOKENIZERS[name]


def byte_level_bpe(
    tokens: list[str], merges: list[str], pre: PreTokenizer, *, what: str = "GGUF metadata: tokenizer.ggml.merges"
) -> dict[str, Any]:
    """The tokenizer.json without special tokens.

    Args:
        tokens: By id, in the byte alphabet of GPT-2.
        merges: Two tokens and a space between each, most important first.
        pre: How text is cut.
        what: Where the merges come from, for messages.
    """
    vocab = {token: i for i, token in enumerate(tokens)}
    steps: list[dict[str, Any]] = []
    if pre.is_digit_single:
        steps.append({"type": "Digits", "individual_digits": True})
    if pre.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False})
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre.pattern is None})
    return {
        "normalizer": {"type": "NFC"} if pre.is_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": pre.is_whole_word_first, "vocab": vocab, "merges": _pairs(merges, vocab, what)},
    }


def _pairs(merges: list[str], vocab: Mapping[str, int], what: str) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        cut = merge.find(" ", 1)  # the first token may itself begin with a space
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not (left in vocab and right in vocab and left + right in vocab):
            raise CheckpointError(f"{what} holds {merge!r}, which does not join two tokens into a third.")
        pairs.append((left, right))
    return pairs
