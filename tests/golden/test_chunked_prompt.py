"""A prompt of 8,000 tokens in chunks gives what one pass over it gives.

With the first layers of SmolLM2 here, for time; `scripts/chunked_prompt.py` runs all of them (docs/models.md has the figures).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).parents[2] / "scripts" / "chunked_prompt.py"
NUM_TOKENS, CHUNK = 8000, 512


def test_8000_tokens_in_chunks_equal_one_pass(demo_model, served_runner, monkeypatch):
    spec = importlib.util.spec_from_file_location("chunked_prompt", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "ModelRunner", served_runner)
    prompt = script.LongPrompt(demo_model, NUM_TOKENS, (CHUNK,), num_layers=2)
    whole, cut = prompt.run(NUM_TOKENS), prompt.run(CHUNK)
    assert (whole.num_steps, cut.num_steps) == (script.NUM_GREEDY, -(-NUM_TOKENS // CHUNK) - 1 + script.NUM_GREEDY)
    assert len(set(whole.token_ids)) > 1
    assert all(np.isfinite(list(entry.values())).all() for entry in whole.logprobs)
    assert cut.token_ids == whole.token_ids
    assert script.difference(whole, cut) <= script.TOLERANCE
