"""Tokenizers that are ranked byte strings as the parts of a tokenizer.json: tiktoken files, and Mistral's tekken.json.

tiktoken joins the two neighbours whose union has the lowest rank. The same is said by merges: for every token all its cuts into two
tokens, ordered by the rank of the union. Called by `tokenizer_files.py`.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError


def read_tiktoken(content: bytes, name: str) -> dict[bytes, int]:
    """Token to rank, of a file with a token in base64 and its rank on each line."""
    ranks = {}
    try:
        for line in content.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"{name} is no tiktoken file: {error}.") from None
    _check_ranks(ranks, name)
    return ranks


def is_tiktoken(content: bytes) -> bool:
    """Whether a file looks like a tiktoken file: a token in base64 and its rank on the first line."""
    parts = content[:4096].split(b"\n", 1)[0].split()
    if len(parts) != 2 or not parts[1].isdigit():
        return False
    try:
        base64.b64decode(parts[0], validate=True)
    except binascii.Error:
        return False
    return True


def read_tekken(content: bytes, name: str) -> tuple[dict[bytes, int], dict[int, str], str]:
    """Of a tekken.json: token to rank, special tokens by id (they come before the ranks), and the pattern that cuts text."""
    try:
        value = json.loads(content)
        config = value["config"]
        num_special, pattern = int(config["default_num_special_tokens"]), str(config["pattern"])
        num_ranks = int(config["default_vocab_size"]) - num_special
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in value["vocab"] if entry["rank"] < num_ranks}
        given = {int(entry["rank"]): str(entry["token_str"]) for entry in value.get("special_tokens") or _default_tekken_special()}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{name} is no tekken.json: {error!r}.") from None
    _check_ranks(ranks, name)
    return ranks, {i: given.get(i, f"<SPECIAL_{i}>") for i in range(num_special)}, pattern


def ranked_pipeline(ranks: Mapping[bytes, int], pattern: str, *, offset: int = 0) -> dict[str, Any]:
    """Normalizer, pre-tokenizer, decoder and model; a token's id is its rank plus `offset`. Words that are tokens are not merged up."""
    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                merges.append((rank, left, right, (_written(token[:cut]), _written(token[cut:]))))
    merges.sort()
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {_written(token): rank + offset for token, rank in ranks.items()},
            "merges": [pair for *_, pair in merges],
        },
    }


def _check_ranks(ranks: Mapping[bytes, int], name: str) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{name} is damaged: its ranks must be 0 to {len(ranks) - 1}, and every byte must be a token.")


def _byte_alphabet() -> list[str]:
    """The character that GPT-2's byte alphabet writes for each byte: itself where it is printable, else one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_ALPHABET = _byte_alphabet()


def _written(token: bytes) -> str:
    return "".join(_ALPHABET[byte] for byte in token)


def _default_tekken_special() -> list[dict[str, Any]]:
    """What files of before version 7 leave out (mistral-common's list)."""
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    names += ["[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"]
    names += ["[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
    return [{"rank": i, "token_str": name} for i, name in enumerate(names)]
