"""Writes <folder>.json beside this file: the hidden states that transformers gives for a golden checkpoint, pooled both ways.

Not part of the test run: it needs torch and transformers, which jaxserve does not depend on. In an environment of its own:

    python -m venv /tmp/torchenv && /tmp/torchenv/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/torchenv/bin/python tests/data/embeddings/make.py llama3-rope qwen3

`last` is hidden_states[-1] (after the final norm) of a prompt's last token, `mean` the mean over its tokens, in float32 with eager
attention and a batch of one. The prompts are those of the folder's expected.json, and a longer one that begins as the last of them.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"


def embed(folder: str) -> dict:
    path = GOLDEN / folder
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = json.loads((path / "expected.json").read_text())["prompts"]
    prompts.append(prompts[-1][:17] + [4 + 31 * i % 300 for i in range(40)])
    hidden = []
    with torch.no_grad():
        for prompt in prompts:
            output = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
            hidden.append(output.hidden_states[-1][0])
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prompts": prompts,
        "last": [states[-1].tolist() for states in hidden],
        "mean": [states.double().mean(0).float().tolist() for states in hidden],
    }


for name in sys.argv[1:]:
    (HERE / f"{name}.json").write_text(json.dumps(embed(name)) + "\n")
