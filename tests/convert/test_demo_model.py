"""The demo model's tokenizer, rebuilt from its GGUF file, gives the ids of the model's own."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from jaxserve.convert.read_gguf import read_gguf


def test_token_ids(golden_real_dir, demo_gguf):
    tokenizer = Tokenizer.from_str(read_gguf(demo_gguf).small_files["tokenizer.json"].decode())
    cases = json.loads((golden_real_dir / "smollm2-135m-instruct-q4_1.json").read_text())["cases"]
    texts = {name: case for name, case in cases.items() if isinstance(case.get("text"), str)}
    assert len(texts) >= 5
    for name, case in texts.items():
        assert tokenizer.encode(case["text"]).ids == case["token_ids"], name
    # Every digit is a token of its own.
    expected = "788 216 34 32 34 36 28 216 33 35 41 13768 284 216 33 32 32 32 32 32 32 2698 43 1792 45 35 30 33 36 33 37 41"
    assert tokenizer.encode("In 2024, 139 boats and 1000000 fish; x=3.14159").ids == [int(word) for word in expected.split()]
