"""The OpenAI endpoints, through the real `openai` client where it can say it and raw HTTP where it cannot."""

import dataclasses
import json
import logging
import socket
import threading
import time

import openai
import pytest

from jaxserve.config import ServerConfig
from jaxserve.errors import InvalidRequest
from jaxserve.serve.openai_types import ChatBody, CompletionBody


def greedy(**options):
    return {"model": "counting", "temperature": 0, **options}


def extra(**fields):
    return {"extra_body": fields}


def test_a_completion_is_the_models_tokens_as_text(server, client):
    answer = client.completions.create(**greedy(prompt=[5, 7], max_tokens=6), **extra(return_token_ids=True))
    expected = server.output_ids([5, 7], 6)
    [choice] = answer.choices
    assert choice.token_ids == expected
    assert choice.prompt_token_ids == [5, 7]
    assert choice.text == server.tokenizer.decode(expected)
    assert choice.finish_reason == "length"
    assert (answer.object, answer.model) == ("text_completion", "counting")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 6, 8)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_max_tokens_is_16_by_default_and_clamped_to_the_context(client):
    assert client.completions.create(**greedy(prompt=[5, 7]), **extra(ignore_eos=True)).usage.completion_tokens == 16
    assert client.completions.create(**greedy(prompt=[5, 7], max_tokens=10**6), **extra(ignore_eos=True)).usage.completion_tokens == 254
    chat = client.chat.completions.create(
        model="counting", temperature=0, messages=[{"role": "user", "content": "hi"}], **extra(ignore_eos=True)
    )
    assert chat.usage.total_tokens == 256


def test_text_prompts_get_special_tokens_and_ids_do_not(server, client):
    text = client.completions.create(**greedy(prompt="Hello", max_tokens=1), **extra(return_token_ids=True))
    assert text.choices[0].prompt_token_ids == server.tokenizer.encode("Hello")
    assert text.choices[0].prompt_token_ids[0] == 0
    bare = client.completions.create(**greedy(prompt="Hello", max_tokens=1), **extra(return_token_ids=True, add_special_tokens=False))
    assert bare.choices[0].prompt_token_ids == text.choices[0].prompt_token_ids[1:]


@pytest.mark.parametrize("prompt", [["Hello", "World"], [[5, 7], [9]]])
def test_several_prompts_are_choices_in_order(client, prompt):
    answer = client.completions.create(**greedy(prompt=prompt, max_tokens=4), **extra(return_token_ids=True))
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice, one in zip(answer.choices, prompt, strict=True):
        solo = client.completions.create(**greedy(prompt=one, max_tokens=4), **extra(return_token_ids=True))
        assert choice.token_ids == solo.choices[0].token_ids
    assert answer.usage.completion_tokens == 8


def test_n_sequences_use_consecutive_seeds(server, client):
    answer = client.completions.create(
        model="counting", prompt=[5, 7], n=3, seed=11, max_tokens=5, **extra(return_token_ids=True, ignore_eos=True)
    )
    assert [choice.token_ids for choice in answer.choices] == [server.output_ids([5, 7], 5, seed=11 + i) for i in range(3)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 15)


CALLS = {
    "plain": {"prompt": "Hello", "max_tokens": 40},
    "n": {"prompt": "Hello", "max_tokens": 20, "n": 2, "temperature": 0.5, "seed": 3},
    "prompts": {"prompt": ["Hello", "World"], "max_tokens": 20},
    "logprobs": {"prompt": "Hello", "max_tokens": 20, "logprobs": 3},
    "echo": {"prompt": "Hello", "max_tokens": 20, "echo": True},
    "echo logprobs": {"prompt": "Hello", "max_tokens": 20, "echo": True, "logprobs": 2},
    "echo only": {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 2},
    "ids": {"prompt": [200, 100, 50], "max_tokens": 60, "extra_body": {"return_token_ids": True, "skip_special_tokens": False}},
    "stop ids": {"prompt": [5, 7], "max_tokens": 60, "extra_body": {"stop_token_ids": list(range(200, 300)), "min_tokens": 2}},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_completion_stream_adds_up_to_the_whole_answer(client, name):
    call = greedy(**CALLS[name])
    whole = client.completions.create(**call)
    chunks = list(client.completions.create(**call, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert getattr(parts[-1], "stop_reason", None) == choice.stop_reason
        ids = [token_id for part in parts for token_id in getattr(part, "token_ids", None) or ()]
        assert ids == (getattr(choice, "token_ids", None) or [])
        logprobs = [part.logprobs for part in parts if part.logprobs]
        assert bool(logprobs) == bool(choice.logprobs)
        if choice.logprobs:
            for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [value for part in logprobs for value in getattr(part, field)] == getattr(choice.logprobs, field)


def chat_call(**options):
    return greedy(messages=[{"role": "user", "content": "Tell me"}], max_completion_tokens=30, **options)


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1, "seed": 5}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["e"]}])
def test_a_chat_stream_adds_up_to_the_whole_answer(client, options):
    call = chat_call(**options)
    whole = client.chat.completions.create(**call)
    chunks = list(client.chat.completions.create(**call, stream=True))
    for choice in whole.choices:
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert logprobs == (choice.logprobs.content if choice.logprobs else [])
    assert whole.choices[0].message.role == "assistant"


def test_chat_renders_the_template_without_a_second_bos(server, client):
    answer = client.chat.completions.create(**chat_call(), **extra(return_token_ids=True))
    assert answer.prompt_token_ids == server.tokenizer.encode("<s>user: Tell me<|im_end|>assistant: ", add_special_tokens=False)
    parts = [{"type": "text", "text": "Tell"}, {"type": "text", "text": " me"}]
    again = client.chat.completions.create(model="counting", messages=[{"role": "user", "content": parts}], max_tokens=2)
    assert again.usage.prompt_tokens > 0
    open_end = client.chat.completions.create(
        model="counting",
        messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "So"}],
        **extra(return_token_ids=True, continue_final_message=True, add_generation_prompt=False),
    )
    assert server.tokenizer.decode(open_end.prompt_token_ids, False).endswith("assistant: So")


def test_bos_that_is_asked_for_is_not_doubled(server, client):
    wanted = server.tokenizer.encode("<s>user: Tell me<|im_end|>assistant: ", add_special_tokens=False)
    answer = client.chat.completions.create(**chat_call(), **extra(return_token_ids=True, add_special_tokens=True))
    assert answer.prompt_token_ids == wanted


def test_what_the_template_refuses_is_400_in_its_own_words(client):
    with pytest.raises(openai.BadRequestError, match="no system role here"):
        client.chat.completions.create(model="counting", messages=[{"role": "system", "content": "x"}])


def test_template_of_the_server(start_server, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("{{ bos_token }}{{ name }}{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with start_server(ServerConfig(chat_template=str(file))) as server:
        client = openai.OpenAI(base_url=server.http + "/v1", api_key="-", max_retries=0)
        options = extra(return_token_ids=True, chat_template_kwargs={"name": "Bo"})
        answer = client.chat.completions.create(model="counting", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, **options)
        assert server.tokenizer.decode(answer.prompt_token_ids, False) == "<s>Bo[Hi]"


def test_logprobs_of_a_completion(server, client):
    answer = client.completions.create(**greedy(prompt="Hi", max_tokens=8, echo=True, logprobs=2))
    [choice] = answer.choices
    prompt = server.tokenizer.encode("Hi")
    num_tokens = len(prompt) + 8
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset) == num_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value is not None for value in choice.logprobs.token_logprobs[1:])
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.text.startswith("Hi")
    assert choice.logprobs.text_offset[0] == 0
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
    assert max(choice.logprobs.text_offset) <= len(choice.text)
    assert choice.logprobs.token_logprobs[len(prompt)] == -1.0  # the greedy token has rank 1


def test_echo_without_output_scores_the_prompt(client):
    answer = client.completions.create(**greedy(prompt="Hello", max_tokens=0, echo=True, logprobs=1))
    [choice] = answer.choices
    assert choice.text == "Hello"
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0


def test_infinite_logprobs_become_a_number(client):
    answer = client.completions.create(**greedy(prompt=[5], max_tokens=1, logprobs=0), **extra(return_tokens_as_token_ids=True))
    [name] = answer.choices[0].logprobs.tokens
    assert name.startswith("token_id:")


def test_prompt_logprobs(client):
    answer = client.completions.create(**greedy(prompt=[5, 7, 9], max_tokens=1), **extra(prompt_logprobs=1))
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None
    assert [list(entry)[-1] for entry in rest] == ["7", "9"]
    assert set(rest[0]["7"]) == {"logprob", "rank", "decoded_token"}


def test_stop_strings_end_the_text_in_stream_and_not(server, client):
    text = client.completions.create(**greedy(prompt="Hello", max_tokens=60), **extra(ignore_eos=True)).choices[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    expected = text[: text.index(stop)]
    whole = client.completions.create(**greedy(prompt="Hello", max_tokens=60, stop=[stop]), **extra(ignore_eos=True))
    assert (whole.choices[0].text, whole.choices[0].finish_reason, whole.choices[0].stop_reason) == (expected, "stop", stop)
    assert whole.usage.completion_tokens < 60
    streamed = "".join(
        chunk.choices[0].text
        for chunk in client.completions.create(**greedy(prompt="Hello", max_tokens=60, stop=stop, stream=True), **extra(ignore_eos=True))
    )
    assert streamed == expected
    kept = client.completions.create(
        **greedy(prompt="Hello", max_tokens=60, stop=stop), **extra(ignore_eos=True, include_stop_str_in_output=True)
    )
    assert kept.choices[0].text == expected + stop
    server.wait_until_idle()


def test_usage_of_a_stream(client):
    call = chat_call(stream=True)
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        chunks = list(client.chat.completions.create(**call, stream_options=options or openai.NOT_GIVEN))
        assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    chunks = list(client.chat.completions.create(**call, stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert all(chunk.usage for chunk in chunks)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_usage_reports_cached_tokens(client):
    prompt = list(range(100, 150))
    client.completions.create(**greedy(prompt=prompt, max_tokens=1), **extra(cache_salt="cached"))
    again = client.completions.create(**greedy(prompt=prompt, max_tokens=1), **extra(cache_salt="cached"))
    assert again.usage.prompt_tokens_details.cached_tokens == 48
    other = client.completions.create(**greedy(prompt=prompt, max_tokens=1), **extra(cache_salt="other"))
    assert other.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_on_the_wire(server):
    body = json.dumps(greedy(prompt="Hello", max_tokens=3, stream=True)).encode()
    lines = raw_request(server, b"POST", "/v1/completions", body).split(b"\r\n\r\n", 1)[1]
    events = [part for part in lines.replace(b"\r\n", b"\n").split(b"\n") if part.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]"
    assert all(json.loads(event[6:])["object"] == "text_completion" for event in events[:-1])


def test_no_character_of_a_stream_ends_a_line_for_any_client(server):
    text = "a\u0085b\u2028c\u2029d\x0b\x0c\x1c\x1ee"
    body = json.dumps(greedy(prompt=text, echo=True, max_tokens=1, stream=True)).encode()
    lines = raw_request(server, b"POST", "/v1/completions", body).split(b"\r\n\r\n", 1)[1].decode().splitlines()
    [first, *_] = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert first["choices"][0]["text"].startswith(text)


def raw_request(server, method: bytes, path: str, body: bytes = b"", *, headers: bytes = b"") -> bytes:
    host, port = server.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(method + b" " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n")
        sock.sendall(headers + b"Content-Type: application/json\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def post(server, path: str, body) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head, _, content = raw_request(server, b"POST", path, data).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content) if content else {}


def get(server, path: str) -> tuple[int, dict]:
    head, _, content = raw_request(server, b"GET", path).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content) if content else {}


BAD_COMPLETIONS = {
    "empty prompt list": ({"prompt": []}, "prompt"),
    "no prompt": ({}, "prompt"),
    "prompt of the context": ({"prompt": [5] * 256}, "prompt"),
    "id out of vocabulary": ({"prompt": [5, 320]}, "prompt"),
    "negative id": ({"prompt": [-1]}, "prompt"),
    "prompt of mixed types": ({"prompt": ["a", 5]}, "prompt"),
    "n 0": ({"n": 0}, "n"),
    "n 10^9": ({"n": 10**9}, "n"),
    "n text": ({"n": "2"}, "n"),
    "many sequences": ({"prompt": [[5]] * 100, "n": 100, "temperature": 1}, "n"),
    "negative temperature": ({"temperature": -1}, "temperature"),
    "high temperature": ({"temperature": 2.5}, "temperature"),
    "text temperature": ({"temperature": "hot"}, "temperature"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "top_p 2": ({"top_p": 2}, "top_p"),
    "100 stops": ({"stop": ["x"] * 100}, "stop"),
    "empty stop": ({"stop": ""}, "stop"),
    "empty stop in list": ({"stop": ["a", ""]}, "stop"),
    "logit_bias out of vocabulary": ({"logit_bias": {"320": 1}}, "logit_bias"),
    "logit_bias key": ({"logit_bias": {"x": 1}}, "logit_bias"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens negative": ({"max_tokens": -5}, "max_tokens"),
    "max_tokens float": ({"max_tokens": 2.5}, "max_tokens"),
    "max_tokens bool": ({"max_tokens": True}, "max_tokens"),
    "logprobs 21": ({"logprobs": 21}, "logprobs"),
    "logprobs all": ({"logprobs": -1}, "logprobs"),
    "stop token out of vocabulary": ({"stop_token_ids": [1000]}, "stop_token_ids"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "prompt_logprobs in a stream": ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    "priority without policy": ({"priority": 1}, "priority"),
    "empty salt": ({"cache_salt": ""}, "cache_salt"),
    "long request_id": ({"request_id": "x" * 257}, "request_id"),
    "truncate 0": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "suffix": ({"suffix": "x"}, "suffix"),
    "best_of": ({"best_of": 3}, "best_of"),
    "json schema": ({"response_format": {"type": "json_object"}}, "response_format"),
    "guided": ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "bad_words": ({"bad_words": ["x"]}, "bad_words"),
    "beam": ({"use_beam_search": True}, "use_beam_search"),
    "10 MB prompt": ({"prompt": "x" * 10_000_000}, "prompt"),
    "10 MB prompt to cut": ({"prompt": "x" * 10_000_000, "truncate_prompt_tokens": 5}, "prompt"),
    "a million prompts": ({"prompt": ["a"] * 1_000_000}, "prompt"),
    "a million empty prompts": ({"prompt": [[]] * 1_000_000}, "prompt"),
}


@pytest.mark.parametrize("name", BAD_COMPLETIONS)
def test_bad_completions_are_400_naming_the_field(server, name):
    fields, param = BAD_COMPLETIONS[name]
    default = {} if name == "no prompt" else {"prompt": [5, 7]}
    start = time.process_time()  # of this process alone, which is also the server
    status, answer = post(server, "/v1/completions", {"model": "counting", "max_tokens": 2} | default | fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert answer["error"]["type"] == "BadRequestError"
    assert answer["error"]["code"] == 400
    assert answer["error"]["message"]
    assert time.process_time() - start < 3
    assert_alive(server)


BAD_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "messages text": ({"messages": "hi"}, "messages"),
    "template refuses": ({"messages": [{"role": "system", "content": "x"}]}, None),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, None),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "template": ({"chat_template": "x"}, "chat_template"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "logprobs number": ({"logprobs": 3}, "logprobs"),
    "many top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "negative top_logprobs": ({"logprobs": True, "top_logprobs": -5}, "top_logprobs"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "no completion tokens": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "both prompts": ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_bad_chats_are_400(server, name):
    fields, param = BAD_CHATS[name]
    status, answer = post(
        server, "/v1/chat/completions", {"model": "counting", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]} | fields
    )
    assert status == 400, answer
    if param is not None:
        assert answer["error"]["param"] == param, answer
    assert_alive(server)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"nonsense", b'{"prompt": [5], "temperature": NaN}', b'{"prompt": [5], "temperature": Infinity}',
     b'{"prompt": [5], "temperature": 1e999}', b'{"prompt": "\\ud800"}', b"\xff\xfe", b"[" * 100_000],
)  # fmt: skip
def test_malformed_json_is_400(server, body):
    status, answer = post(server, "/v1/completions", body)
    assert status == 400, answer
    assert_alive(server)


LARGE = {
    "text to cut": ("/v1/completions", {"prompt": "xy " * 300_000, "truncate_prompt_tokens": 5, "max_tokens": 1}),
    "text to count": ("/tokenize", {"prompt": "xy " * 300_000, "return_token_strs": True}),
    "ids": ("/detokenize", {"tokens": [5, 7] * 300_000}),
    "many prompts": ("/v1/completions", {"prompt": ["x" * 200] * 1000, "max_tokens": 1}),
    "too many prompts": ("/v1/completions", {"prompt": ["x"] * 300_000}),
}


@pytest.mark.parametrize(
    ("body", "least"), [(CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": [{"role": "user", "content": "x"}]})]
)
def test_what_is_not_served_is_refused_by_name(body, least):
    for name, neutral in body.not_served.items():
        with pytest.raises(InvalidRequest, match=f"{name} is not supported") as caught:
            body.parse(json.dumps(least | {name: {"asked": "for"}}).encode())
        assert caught.value.param == name
        for value in (*neutral, None):
            body.parse(json.dumps(least | {name: value}).encode())


@pytest.mark.parametrize("name", LARGE)
def test_large_requests_hold_up_no_other_client(server, name):
    path, body = LARGE[name]
    large = threading.Thread(target=post, args=(server, path, body))
    large.start()
    waits = []
    while large.is_alive() or not waits:
        start = time.monotonic()
        assert post(server, "/tokenize", {"prompt": "Hello"})[0] == 200
        waits.append(time.monotonic() - start)
    # Of a blocked server the first small request would get its answer only after the large one; how fast a machine is does not matter.
    assert len(waits) >= 4 or sum(waits) < 1, waits


def test_nan_in_logit_bias_is_400(server):
    assert post(server, "/v1/completions", b'{"prompt": [5], "logit_bias": {"5": NaN}}')[0] == 400


def test_unknown_models_are_404_listing_the_served_names(server, client):
    with pytest.raises(openai.NotFoundError, match=r"'counting', 'alias'"):
        client.completions.create(model="gpt-5", prompt="x")
    assert get(server, "/v1/models/gpt-5")[0] == 404
    assert client.completions.create(model="alias", prompt="x", max_tokens=1).model == "alias"


def test_unknown_fields_and_neutral_values_are_ignored(server, caplog):
    caplog.set_level(logging.DEBUG, "jaxserve.serve.openai_types")
    body = {
        "prompt": [5], "max_tokens": 1, "hello": 1, "user": "me", "suffix": None, "best_of": 1, "use_beam_search": False,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "length_penalty": 1.0,
    }  # fmt: skip
    assert post(server, "/v1/completions", body)[0] == 200
    assert "ignoring unknown fields: 'hello', 'user'" in caplog.messages


def test_other_paths_and_methods_and_sizes(server):
    assert get(server, "/v1/nothing")[0] == 404
    assert get(server, "/v1/completions")[0] == 405
    assert b"\r\nallow: POST\r\n" in raw_request(server, b"GET", "/v1/completions", headers=b"")
    head = raw_request(server, b"POST", "/v1/completions", headers=b"").split(b"\r\n")[0]
    assert b"400" in head
    host, port = server.http.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in sock.recv(65536).split(b"\r\n")[0]
    assert_alive(server)


def assert_alive(server) -> None:
    status, answer = post(server, "/v1/completions", {"prompt": [5, 7], "max_tokens": 2, "temperature": 0})
    assert status == 200, answer


def test_models_health_version(server, client):
    [first, second] = client.models.list().data
    assert (first.id, second.id, first.max_model_len) == ("counting", "alias", 256)
    assert client.models.retrieve("counting").id == "counting"
    assert get(server, "/health") == (200, {})
    assert get(server, "/version")[1]["version"]


def test_tokenize_and_detokenize(server):
    _, answer = post(server, "/tokenize", {"prompt": "Hello", "return_token_strs": True})
    assert answer["tokens"] == server.tokenizer.encode("Hello")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert "".join(answer["token_strs"][1:]) == "Hello"
    _, text = post(server, "/detokenize", {"tokens": answer["tokens"][1:]})
    assert text == {"prompt": "Hello"}
    _, chat = post(server, "/tokenize", {"messages": [{"role": "user", "content": "Hello"}]})
    assert chat["tokens"] == server.tokenizer.encode("<s>user: Hello<|im_end|>assistant: ", add_special_tokens=False)
    assert post(server, "/detokenize", {"tokens": [320]})[0] == 400
    assert post(server, "/tokenize", {})[0] == 400


def test_truncated_prompts_keep_their_end(client):
    call = greedy(prompt=[5, 6, 7, 8], max_tokens=1)
    for fields, expected in (({}, [7, 8]), ({"truncation_side": "right"}, [5, 6])):
        answer = client.completions.create(**call, **extra(truncate_prompt_tokens=2, return_token_ids=True, **fields))
        assert answer.choices[0].prompt_token_ids == expected


def test_equal_request_ids_are_both_served(server):
    body = {"prompt": [5, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True, "request_id": "same", "return_token_ids": True}
    answers: list[dict] = []
    threads = [threading.Thread(target=lambda: answers.append(post(server, "/v1/completions", body)[1])) for _ in range(4)]
    server.runner.gate.clear()
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    server.runner.gate.set()
    for thread in threads:
        thread.join(30)
    assert [answer["id"] for answer in answers] == ["cmpl-same"] * 4
    assert all(answer["choices"][0]["token_ids"] == server.output_ids([5, 7], 20) for answer in answers)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_disconnect_frees_the_pages(server, is_stream):
    host, port = server.http.removeprefix("http://").split(":")
    body = json.dumps({"prompt": [5, 7], "max_tokens": 250, "ignore_eos": True, "n": 2, "seed": 1, "stream": is_stream}).encode()
    server.runner.step_s = 0.05
    try:
        sock = socket.create_connection((host, int(port)), timeout=30)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        if is_stream:
            assert sock.recv(100)
        else:
            while server.engine.scheduler.num_running < 2:
                time.sleep(0.005)
        sock.close()
        server.wait_until_freed()
    finally:
        server.runner.step_s = 0.0


def test_a_failed_step_is_an_error_for_what_ran_and_the_server_goes_on(fresh_server):
    server = fresh_server
    server.runner.error = ValueError("injected")
    status, answer = post(server, "/v1/completions", {"prompt": [5], "max_tokens": 5})
    assert status == 500
    assert "injected" in answer["error"]["message"]
    assert_alive(server)


def test_an_error_within_a_stream_is_its_last_event(fresh_server):
    server = fresh_server
    server.runner.step_s = 0.02
    with server.client() as client:
        stream = client.completions.create(model="counting", prompt=[5], max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        server.runner.error = ValueError("injected")
        with pytest.raises(openai.APIError, match="injected"):
            list(stream)
    assert_alive(server)


def test_a_lost_engine_is_503_and_unhealthy(fresh_server):
    server = fresh_server
    assert get(server, "/health")[0] == 200
    server.loop.stop()
    end = time.monotonic() + 5
    while get(server, "/health")[0] != 503:
        assert time.monotonic() < end
    status, answer = post(server, "/v1/completions", {"prompt": [5]})
    assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")


def test_the_models_own_defaults_hold_unless_a_field_is_given(fresh_server):
    body = {"prompt": [5, 7], "max_tokens": 5, "return_token_ids": True}
    one = post(fresh_server, "/v1/completions", body)[1]
    assert one["choices"][0]["token_ids"] == fresh_server.output_ids([5, 7], 5)  # greedy, from the model's generation config
    seeded = post(fresh_server, "/v1/completions", body | {"temperature": 1, "seed": 4})[1]
    assert seeded["choices"][0]["token_ids"] == fresh_server.output_ids([5, 7], 5, seed=4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": -1, "max_tokens": 3}, None),
        ({"logprobs": -1, "max_tokens": 4}, "logprobs"),
        ({"logprobs": 20, "max_tokens": 200}, None),
        ({"logprobs": 21, "n": 20, "temperature": 1}, "logprobs"),
        ({"prompt_logprobs": -1, "prompt": [5] * 3}, None),
        ({"prompt_logprobs": -1, "prompt": [5] * 4}, "prompt_logprobs"),
        ({"prompt_logprobs": -1, "prompt": [[5]] * 4}, "prompt_logprobs"),
    ],
)
def test_whole_vocabularies_are_limited(fresh_server, monkeypatch, fields, param):
    monkeypatch.setattr("jaxserve.serve.call_limits.MAX_MANY_LOGPROBS", 1000)  # 3 tokens of 320
    [engine] = fresh_server.front_end.client.engines
    engine._info = dataclasses.replace(engine.info, max_logprobs=-1)
    status, answer = post(fresh_server, "/v1/completions", {"prompt": [5, 7], "max_tokens": 5} | fields)
    assert (status, answer["error"]["param"] if param else None) == (400 if param else 200, param), answer
