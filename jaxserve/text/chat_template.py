"""Chat messages to the text of a prompt, by the checkpoint's Jinja template, in a sandbox that behaves as transformers' does.

A template is data of strangers: it sees plain values only, cannot reach Python, and is stopped when it loops too long or makes or
writes too much. What it refuses (`raise_exception`) is the client's error. The result holds its special tokens already, so it is encoded
with `add_special_tokens=False`. Next: `tokenizer`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.text.tokenizer import Tokenizer

MAX_RENDERED_CHARS = 32 * 2**20
MAX_RENDER_S = 10.0
MAX_EXPONENT = 1000
_CONTINUE_MARK = "<|jaxserve-the-final-message-goes-on-here|> "
"""Appended to the final message to find where it ends in the rendered text; the space shows whether the template trims it."""

_deadline: ContextVar[float] = ContextVar("deadline")
"""When the template that this thread renders must have ended."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The prompt's text, special tokens included.

    Args:
        tokenizer: Gives the templates and the named special tokens that they may use.
        messages: Each with a `role`, and a `content` that is a string, a list of text parts, or absent.
        add_generation_prompt: Open the assistant's turn.
        continue_final_message: Leave the final message open so that the model goes on with it.
        chat_template: Name of one of the model's templates, or Jinja source; None takes "tool_use" when there are tools and
            the model has it, else "default".
        template_kwargs: More variables for the template, such as `tools` or `enable_thinking`.

    Raises:
        InvalidRequest: Bad messages, no template, or the template refuses or fails.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other; set one to false.", param="continue_final_message"
        )
    variables = dict(template_kwargs or {})
    source = _choose_template(tokenizer, chat_template, has_tools=bool(variables.get("tools")))
    template = _compile(source)
    chat = [_clean_message(message, i, template) for i, message in enumerate(_check_list(messages))]
    if continue_final_message:
        _mark_final_message(chat[-1])
    variables = tokenizer.special_tokens | {"tools": None, "documents": None} | variables
    text = _render(template.jinja, variables | {"messages": chat, "add_generation_prompt": add_generation_prompt})
    return _cut_at_mark(text) if continue_final_message else text


def read_template(given: str) -> str:
    """The Jinja source that `--chat-template` names: a file's, or itself where it is a template.

    Raises:
        ConfigError: The file cannot be read, or the template has an error.
    """
    is_source = "{{" in given or "{%" in given
    try:
        source = given if is_source else Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given} cannot be read: {error}. Name a file with a Jinja template.") from None
    try:
        _compile(source)
    except InvalidRequest as error:
        raise ConfigError(f"--chat-template {given if not is_source else ''}: {error}") from None
    return source


class _Template(NamedTuple):
    """A compiled template and the forms of `content` that it understands."""

    jinja: jinja2.Template
    takes_parts: bool
    takes_strings: bool


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, and products that cannot fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`left * right` or `left ** right`; jinja comes here for these operators alone."""
        if operator == "**" and isinstance(right, int) and abs(right) > MAX_EXPONENT:
            raise SecurityError(f"the exponent {right} is larger than {MAX_EXPONENT}.")
        for items, count in ((left, right), (right, left)):
            if operator == "*" and isinstance(items, Sized) and isinstance(count, int) and len(items) * count > MAX_RENDERED_CHARS:
                raise SecurityError(f"{len(items)} times {count} is larger than {MAX_RENDERED_CHARS}.")
        return super().call_binop(context, operator, left, right)


def _watched[T](items: Iterable[T]) -> Iterator[T]:
    """Put around what every loop goes over, as one that writes nothing would never be stopped otherwise."""
    for item in items:
        if time.monotonic() > _deadline.get():
            raise _too_long()
        yield item


def _watch_loops(tree: nodes.Template, environment: jinja2.Environment) -> None:
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = nodes.Filter(loop.iter, "jaxserve_watched", [], [], None, None, lineno=loop.lineno, environment=environment)


def _too_long() -> InvalidRequest:
    return InvalidRequest(f"the chat template ran longer than {MAX_RENDER_S:g} s.", param="messages")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes HTML characters, which would put &lt; into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters["jaxserve_watched"] = _watched
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=64)
def _compile(source: str) -> _Template:
    try:
        environment = _environment()
        tree = environment.parse(source)
        takes_parts, takes_strings = _iterates_content(tree), _tests_for_string(tree)
        _watch_loops(tree, environment)
        return _Template(environment.from_string(tree), takes_parts, takes_strings)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the chat template has an error: {error}", param="chat_template") from error


def _choose_template(tokenizer: Tokenizer, wanted: str | None, *, has_tools: bool) -> str:
    templates = tokenizer.chat_templates
    name = wanted or ("tool_use" if has_tools and "tool_use" in templates else "default")
    if name in templates:
        return templates[name]
    if wanted and "{" in wanted:
        return wanted
    has = f"it has {', '.join(sorted(templates))}" if templates else "it has none"
    raise InvalidRequest(
        f"this model has no chat template named {name!r} ({has}); continue a text instead, or give it one: a server's --chat-template, or "
        "the argument chat_template in Python.",
        param="chat_template",
    )


def _iterates_content(tree: nodes.Template) -> bool:
    """Whether the template loops over a message's `content`, and so takes a list of parts.

    `content` itself, a name assigned from it, and macro arguments called content count; `content.split(...)` does not.
    """
    aliases = {"content"}

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in aliases
        if isinstance(node, nodes.Getattr):
            return node.attr == "content"
        return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node):
            aliases.add(assign.target.name)
    return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _tests_for_string(tree: nodes.Template) -> bool:
    return any(test.name == "string" for test in tree.find_all(nodes.Test))


def _check_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages must be a non-empty list of objects with role and content.", param="messages")
    return messages


def _clean_message(message: Any, i: int, template: _Template) -> dict[str, Any]:
    """A copy the template may see: no None values (templates would print them), content in the form it understands."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"messages[{i}] is {type(message).__name__}; it must be an object with role and content.", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"messages[{i}].role is {role!r}; it must be a non-empty string.", param="messages")
    clean = {key: value for key, value in message.items() if value is not None}
    if "content" in clean:
        clean["content"] = _content(clean["content"], i, template)
    elif "tool_calls" not in clean:
        raise InvalidRequest(f"messages[{i}] has no content; give a string or a list of text parts.", param="messages")
    return clean


def _content(content: Any, i: int, template: _Template) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        wants_parts = template.takes_parts and not template.takes_strings
        return [{"type": "text", "text": content}] if wants_parts else content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"messages[{i}].content is {type(content).__name__}; it must be a string or a list of text parts.", param="messages"
        )
    texts = [_part_text(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if template.takes_parts else "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequest(f"{where} is {type(part).__name__}; it must be an object with type and text.", param="messages")
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text"):
        raise InvalidRequest(f"{where} is of type {kind!r}; this model takes text only.", param="messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is {text!r}; it must be a string.", param="messages")
    return text


def _mark_final_message(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _CONTINUE_MARK
    elif content:
        content[-1]["text"] += _CONTINUE_MARK
    else:
        raise InvalidRequest("continue_final_message needs text in the final message to continue.", param="messages")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE_MARK.rstrip())
    if at < 0:
        raise InvalidRequest(
            "the chat template does not show the final message as it is, so it cannot be continued; set continue_final_message to false.",
            param="continue_final_message",
        )
    is_trimmed = not text.startswith(_CONTINUE_MARK, at)
    return text[:at].rstrip() if is_trimmed else text[:at]


def _render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    _deadline.set(time.monotonic() + MAX_RENDER_S)
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise InvalidRequest(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters.", param="messages")
            if time.monotonic() > _deadline.get():
                raise _too_long()
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, OverflowError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"the chat template failed on these messages: {error}", param="messages") from error
    return "".join(pieces)
