from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.text import chat_template as module
from jaxserve.text.chat_template import read_template, render_chat
from jaxserve.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% for part in m['content'] %}{% if part.type == 'text' %}({{ part.text }}){% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}({{ part.text }})"
    "{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}"
)
USER = [{"role": "user", "content": "Hi"}]


def render(template: str | dict[str, str], messages: Any = USER, **options: Any) -> str:
    templates = {"default": template} if isinstance(template, str) else template
    tokenizer: Any = SimpleNamespace(chat_templates=templates, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return render_chat(tokenizer, messages, **options)


def test_chatml() -> None:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert render(CHATML) == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    own = [{"role": "system", "content": "Be brief."}, *USER]
    assert render(CHATML, own, add_generation_prompt=False) == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


def test_rendered_text_is_encoded_without_a_second_bos(byte_level: Tokenizer) -> None:
    tokenizer: Any = SimpleNamespace(chat_templates={"default": NO_SYSTEM}, special_tokens=byte_level.special_tokens)
    ids = byte_level.encode(render_chat(tokenizer, USER), add_special_tokens=False)
    assert ids.count(0) == 1 and ids[0] == 0


@pytest.mark.parametrize(
    ("messages", "said"),
    [([{"role": "system", "content": "x"}, *USER], "System role not supported"), (USER * 2, "roles must alternate")],
)
def test_what_the_template_refuses_is_the_clients_error(messages: list[dict[str, str]], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        render(NO_SYSTEM, messages)


def test_content_as_strings_or_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in render(CHATML, parts)
    assert render(PARTS, parts) == "(a)(b)"
    assert render(PARTS) == "(Hi)"
    assert render(BOTH, parts) == "(a)(b)"
    assert render(BOTH) == "Hi"
    alias = "{% for m in messages %}{% set c = m.content %}{% for p in c %}({{ p.text }}){% endfor %}{% endfor %}"
    assert render(alias, parts) == "(a)(b)"
    split = "{% for m in messages %}{% for w in m.content.split(' ') %}[{{ w }}]{% endfor %}{% endfor %}"
    assert render(split, [{"role": "user", "content": "x y"}]) == "[x][y]"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        ["Hi"],
        [{"content": "Hi"}],
        [{"role": 7, "content": "Hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [7]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
    ],
)
def test_bad_messages(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        render(CHATML, messages)


def test_named_templates() -> None:
    templates = {"default": "D", "tool_use": "T{{ tools | length }}", "rag": "R"}
    assert render(templates) == "D"
    assert render(templates, template_kwargs={"tools": [{"type": "function"}]}) == "T1"
    assert render(templates, chat_template="rag") == "R"
    assert render(templates, chat_template="own {{ x }}", template_kwargs={"x": 5}) == "own 5"
    with pytest.raises(InvalidRequest, match="default, rag, tool_use"):
        render(templates, chat_template="rga")
    with pytest.raises(InvalidRequest, match="it has none"):
        render({})


def test_environment_is_like_transformers() -> None:
    assert render("  {% if true %}\n{{ {'a': 'é<'} | tojson }}\n  {% endif %}\n") == '{"a": "é<"}\n'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}a{% set x = 1 %}{% endgeneration %}b") == "ab"
    assert render("{% set n = namespace(x=1) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}") == "2"
    assert render("{{ nothing }}{% if tools is none %}no tools{% endif %}") == "no tools"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "refusal": None}
    assert render("{% for m in messages %}{{ m.keys() | list }}{% endfor %}", [call]) == "['role', 'tool_calls']"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages[0].content.missing.more }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% for %}",
        "{% include 'x' %}",
        "{{ range(10**9) }}",
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 10**10 * messages }}",
        "{% set n = 10**9 %}{{ 'a' * n }}",
        "{{ 9**99999 }}",
    ],
)
def test_bad_templates_are_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template"):
        render(source)


def test_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'xxxxxxxxxxxxxxxx' }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(module, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="1000 characters"):
        render(endless)
    monkeypatch.setattr(module, "MAX_RENDERED_CHARS", 10**9)
    monkeypatch.setattr(module, "MAX_RENDER_S", 0.05)
    with pytest.raises(InvalidRequest, match="longer than"):
        render(endless)
    for silent in (
        "{% set many = range(99999) %}{% for a in many %}{% for b in many %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for b in range(99999) %}{% endfor %}{% endmacro %}{% for a in range(99999) %}{% set x = f() %}{% endfor %}",
    ):
        with pytest.raises(InvalidRequest, match="longer than"):
            render(silent)


def test_watched_loops_are_loops_as_before() -> None:
    assert render("{% for a in range(3) %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}") == "1/3,2/3,3/3"
    assert render("{% for a in nothing %}x{% else %}none{% endfor %}") == "none"
    assert render("{% for k, v in {'a': 1}.items() if v %}{{ k }}{{ loop.first }}{% endfor %}") == "aTrue"
    assert render("{% for a in [[1], 2] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}") == "12"
    assert render("{{ 2 * 3 }}{{ 'ab' * 2 }}{{ 2 ** 3 }}{{ 2 ** 0.5 > 1 }}") == "6abab8True"


def test_continue_final_message() -> None:
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, messages, **options).endswith("<|im_start|>assistant\nWell, ")
    assert render(NO_SYSTEM, messages, **options) == "<s>[user]Hi[assistant]Well,", "a template that trims stays trimming"
    assert render(PARTS, messages, **options) == "(Hi)(Well, "
    with pytest.raises(InvalidRequest, match="exclude"):
        render(CHATML, messages, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        render("{{ messages[0].content }}", messages, **options)
    with pytest.raises(InvalidRequest, match="to continue"):
        render(CHATML, [*USER, {"role": "assistant", "tool_calls": []}], **options)
    assert messages[-1]["content"] == "Well, "


def test_templates_of_a_checkpoint(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "data" / "golden" / "llama-bias"
    (tmp_path / "tokenizer.json").write_text((golden / "tokenizer.json").read_text())
    assert Tokenizer.from_directory(tmp_path).chat_templates == {}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "one"}
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]}))
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "a", "rag": "b"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).chat_templates == {"default": "file"}


def test_template_of_a_file_or_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(NO_SYSTEM)
    assert read_template(str(file)) == NO_SYSTEM == read_template(NO_SYSTEM)
    with pytest.raises(ConfigError, match=r"nothing\.jinja cannot be read: .*No such file"):
        read_template(str(tmp_path / "nothing.jinja"))
    file.write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match=r"chat\.jinja: the chat template has an error: "):
        read_template(str(file))


@pytest.mark.parametrize("bos", ["{{ bos_token }}", "{{- bos_token -}}\n", "<s>", "{% if messages %}{{ bos_token }}{% endif %}"])
def test_bos_is_there_once_however_the_template_writes_it(byte_level: Tokenizer, bos: str) -> None:
    tokenizer: Any = SimpleNamespace(chat_templates={"default": bos + CHATML}, special_tokens=byte_level.special_tokens)
    ids = byte_level.encode(render_chat(tokenizer, USER), add_special_tokens=False)
    assert byte_level.encode("Hi")[0] == 0  # the tokenizer adds one of its own to a raw prompt
    assert ids[0] == 0 and ids.count(0) == 1
