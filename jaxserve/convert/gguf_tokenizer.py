"""Rebuilds tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

How text is cut before merging is named by `tokenizer.ggml.pre`; only the kinds whose original pre-tokenizer is known exactly are
built, and every other name is an error: a near miss gives wrong token ids for some texts, which nobody notices. The patterns are
those of the models' own tokenizer.json files. Go on to `read_gguf.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import CheckpointError

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
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


_LLAMA3 = PreTokenizer(pattern=_LLAMA3_PATTERN, is_whole_word_first=True, adds_bos=True)
_QWEN2 = PreTokenizer(pattern=_QWEN2_PATTERN, is_nfc=True)
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


def tokenizer_files(metadata: Mapping[str, Any], *, vocab_size: int) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja.

    Args:
        metadata: All metadata of the file.
        vocab_size: Rows of the embedding; the tokenizer may not have more tokens.

    Raises:
        CheckpointError: No tokenizer, or one of a kind that is not supported, or damaged.
    """
    model, pre_name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise CheckpointError(f"GGUF metadata: tokenizer.ggml.model {model!r} is not supported; supported: gpt2 (byte-level BPE).")
    if pre_name not in PRE_TOKENIZERS:
        raise CheckpointError(f"GGUF metadata: tokenizer.ggml.pre {pre_name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}.")
    pre = PRE_TOKENIZERS[pre_name]
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    if not 0 < len(tokens) <= vocab_size or len(set(tokens)) < len(tokens):
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.tokens must hold 1 to {vocab_size} different tokens (the rows of the embedding), "
            f"got {len(tokens)}, {len(set(tokens))} different."
        )
    types = metadata.get("tokenizer.ggml.token_type") or []
    ids = _special_ids(metadata, len(tokens))
    adds = {name: bool(metadata.get(f"tokenizer.ggml.add_{name}_token", name == "bos" and pre.adds_bos)) for name in ("bos", "eos")}
    for name, is_added in adds.items():
        if is_added and name not in ids:
            raise CheckpointError(f"GGUF metadata: tokenizer.ggml.add_{name}_token is set but tokenizer.ggml.{name}_token_id is missing.")
    special = {i for i, kind in enumerate(types) if kind == _CONTROL} | set(ids.values())
    defined = {i for i, kind in enumerate(types) if kind == _USER_DEFINED} - special
    affixes = tuple((ids[name], tokens[ids[name]]) if is_added else None for name, is_added in adds.items())
    tokenizer = _byte_level_bpe(tokens, metadata.get("tokenizer.ggml.merges") or [], pre, special, defined, *affixes)
    config = _tokenizer_config(metadata, tokens, ids, special, defined, adds)
    files = {"tokenizer.json": tokenizer.encode(), "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode()}
    if template := metadata.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    return files


def _special_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    ids = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            continue
        if not 0 <= value < num_tokens:
            raise CheckpointError(f"GGUF metadata: tokenizer.ggml.{key}_token_id {value} is not one of {num_tokens} tokens.")
        ids[name] = value
    return ids


def _byte_level_bpe(
    tokens: list[str],
    merges: list[str],
    pre: PreTokenizer,
    special: set[int],
    defined: set[int],
    bos: tuple[int, str] | None,
    eos: tuple[int, str] | None,
) -> str:
    """The tokenizer.json text of a byte-level BPE."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    # A merge is two tokens with a space between; the first token may itself begin with a space.
    pairs = []
    for merge in merges:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise CheckpointError(f"GGUF metadata: tokenizer.ggml.merges holds {merge!r}, which is not two tokens.")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    try:
        vocab = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.is_whole_word_first))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"GGUF metadata: the tokenizer's merges and tokens do not fit together: {error}") from error
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.is_digit_single else []
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    if bos or eos:
        single = [*([bos[1]] if bos else []), "$A", *([eos[1]] if eos else [])]
        pair = [*single, *([bos[1] + ":1"] if bos else []), "$B:1", *([eos[1] + ":1"] if eos else [])]
        affixes = list(dict.fromkeys((token, i) for i, token in filter(None, (bos, eos))))
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=affixes)
    tokenizer.add_tokens([AddedToken(tokens[i], special=i in special, normalized=False) for i in sorted(special | defined)])
    return tokenizer.to_str()


def _tokenizer_config(
    metadata: Mapping[str, Any], tokens: list[str], ids: dict[str, int], special: set[int], defined: set[int], adds: dict[str, bool]
) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): {"content": tokens[i], **flags, "special": i in special} for i in sorted(special | defined)},
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length"),
        "add_bos_token": adds["bos"],
        "add_eos_token": adds["eos"],
    }
    for name, i in ids.items():
        config[f"{name}_token"] = tokens[i]
    return config
