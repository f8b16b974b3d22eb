"""Text to token ids and back, from `tokenizer.json` and `tokenizer_config.json`. Runs no code of a checkpoint.

Built on the `tokenizers` library alone: importing `transformers` takes over a second, this 20 ms. The rules that transformers
adds on top (which tokens are special, when BOS and EOS are added) are followed here. Next: `pieces`, `detokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.text.pieces import TokenPieces

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. All methods may be called from several threads; long encodes release the GIL.

    Attributes:
        special_tokens: Named special tokens such as bos_token, as templates read them.
        special_token_ids: Ids left out of text when special tokens are skipped.
        added_tokens: Text of each token outside the base vocabulary, special or not.
        chat_templates: Jinja source by name; the usual one is "default". Empty when the model has none.
        max_token_id: Largest id of vocabulary and added tokens (the model's vocabulary may be larger or smaller).
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], chat_templates: dict[str, str]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = {name: text for name in _NAMED_TOKENS if (text := _content(config.get(name)))}
        _add_missing_tokens(backend, config, self.special_tokens.values())
        _set_bos_and_eos(backend, config, self.special_tokens)
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.max_token_id = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.chat_templates = chat_templates
        self.pieces = TokenPieces(backend)
        self._backend = backend

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Reads a checkpoint directory's tokenizer.json and, where they exist, tokenizer_config.json and chat_template.jinja or .json.

        Raises:
            CheckpointError: tokenizer.json is missing, or a file cannot be read.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{path} has no tokenizer.json; a tokenizer in another format must be converted to it first.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        config = _read_config(path / "tokenizer_config.json")
        return cls(backend, config, _chat_templates(path, config))

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token, if there is one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's end-of-sequence token, if there is one; a model may have more."""
        return self._named_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raw prompts add special tokens (BOS); rendered templates hold theirs already and must not.

        Raises:
            InvalidRequest: The text is no valid Unicode (a lone surrogate).
        """
        try:
            # Of the library's ways to encode, only those for batches release the GIL: a long text must not stop other threads.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text holds a lone surrogate, which is no valid Unicode; send well-formed text.") from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids: the same as streaming them. Ids the tokenizer lacks give nothing, broken UTF-8 gives U+FFFD."""
        middle = self.pieces.middle
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        kept = [token_id for token_id in token_ids if token_id not in skipped and middle(token_id)]
        if not kept:
            return ""
        return b"".join([self.pieces.first(kept[0]), *map(middle, kept[1:])]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text; empty when the tokenizer lacks the id. May be a part of a character."""
        return self.pieces.middle(token_id)

    def token_text(self, token_id: int) -> str:
        """The text of `token_bytes`, with U+FFFD for a part of a character."""
        return self.pieces.middle(token_id).decode("utf-8", "replace")

    def token_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary writes it, or None."""
        return self._backend.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _content(token: Any) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with its text under `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds a {type(config).__name__}; it must be a JSON object.")
    return config


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    file = path / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    # Multimodal checkpoints may keep it in a file of its own.
    template = _read_config(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template if isinstance(entry, dict) and {"name", "template"} <= entry.keys()}
    return {}


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], named: Iterable[str]) -> None:
    """Adds tokens that only tokenizer_config.json knows and marks special ones, as transformers does at load.

    Tokens are added in the order of their ids, so that those beyond the vocabulary get the ids the config gives them.
    """
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _content(entry)
        if text is not None and text not in known:
            flags = {key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            known[text] = token = AddedToken(text, **flags)
            _add(backend, token)
    for text in [*named, *_extra_special_tokens(config)]:
        old = known.get(text)
        if old is None or not old.special:
            flags = {key: getattr(old, key) for key in ("single_word", "lstrip", "rstrip", "normalized")} if old else {"normalized": False}
            known[text] = token = AddedToken(text, special=True, **flags)
            _add(backend, token)


def _add(backend: tokenizers.Tokenizer, token: AddedToken) -> None:
    if token.special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _extra_special_tokens(config: dict[str, Any]) -> list[str]:
    extra: list[Any] = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key) or []
        extra += value.values() if isinstance(value, dict) else value
    return [text for token in extra if (text := _content(token))]


def _set_bos_and_eos(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Where tokenizer_config.json says add_bos_token or add_eos_token, that rule replaces tokenizer.json's own."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    bos = named.get("bos_token") if config.get("add_bos_token") else None
    eos = named.get("eos_token") if config.get("add_eos_token") else None
    template: Sequence[str] = [*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])]
    tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    backend.post_processor = TemplateProcessing(single=list(template), special_tokens=tokens)
