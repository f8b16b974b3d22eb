"""Writes golden/<folder>: a tiny checkpoint with random weights and the logits that transformers gives for it.

Not part of the test run: it needs torch and transformers, which jaxserve does not depend on. In an environment of its own:

    python -m venv /tmp/torchenv && /tmp/torchenv/bin/pip install torch==2.13.0 transformers==5.24.0
    /tmp/torchenv/bin/python tests/data/make_golden.py olmo

The folder is as golden/README.md describes. Weights are normal: matrices with MATRIX_STD, routers wider, the weights of norms around
their neutral value, so that every tensor and nearly every field of the config moves the logits. Prompts are drawn until the best two
logits of every greedy step are at least MIN_GAP apart, so that a right implementation gives all tokens in float32. A new family is one
more entry of CONFIGS: small sizes (a folder is about 300 kB), other values than the defaults for whatever the network computes with, fewer
kv heads than heads, a window shorter than the longest prompt.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent / "golden"
PROMPT_LENGTHS = (4, 11, 20)
LONG_PROMPT = 35  # where a window or a chunk is shorter
NUM_GREEDY = 24
MIN_GAP = 3e-3
MATRIX_STD, ROUTER_STD = 0.12, 0.3
TOKENIZER_FOLDER = "llama3-rope"  # the tokenizer is the same in every folder

SIZES = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "olmo": SIZES | {"model_type": "olmo", "clip_qkv": 0.9, "rope_theta": 5000.0},
}


def make_model(config: dict, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    resolved = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(resolved, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_router = name.endswith(("gate.weight", "router.weight"))
            std = 0.1 if parameter.ndim < 2 else ROUTER_STD if is_router else MATRIX_STD
            neutral = parameter.clone() if parameter.ndim < 2 else 0.0
            parameter.copy_(neutral + torch.randn_like(parameter) * std)
    return model


def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def continued(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens, each from a pass over the whole sequence, and the gap of the best two logits at each."""
    greedy, gaps = [], []
    for _ in range(NUM_GREEDY):
        best = logits_of(model, prompt + greedy)[-1].topk(2)
        greedy.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return greedy, gaps


def pick_prompt(model: torch.nn.Module, length: int, generator: torch.Generator) -> tuple[list[int], list[int], list[float]]:
    while True:
        prompt = torch.randint(4, model.config.vocab_size, (length,), generator=generator).tolist()
        prompt[0] = 0
        greedy, gaps = continued(model, prompt)
        if min(gaps) >= MIN_GAP:
            return prompt, greedy, gaps


def make(name: str, seed: int = 1) -> None:
    folder, config = GOLDEN / name, CONFIGS[name]
    folder.mkdir(exist_ok=True)
    model = make_model(config, seed)
    generator = torch.Generator().manual_seed(seed)
    is_local = bool(config.get("sliding_window") or config.get("attention_chunk_size"))
    lengths = (*PROMPT_LENGTHS[:2], LONG_PROMPT if is_local else PROMPT_LENGTHS[2])
    cases = [pick_prompt(model, length, generator) for length in lengths]
    prompts = [prompt for prompt, _, _ in cases]
    logits = [logits_of(model, prompt) for prompt in prompts]
    arrays = {f"logits_{i}": x.contiguous() for i, x in enumerate(logits)}
    arrays |= {f"top2_gap_{i}": torch.tensor(gaps) for i, (_, _, gaps) in enumerate(cases)}
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    save_file(arrays, folder / "expected.safetensors")
    source = GOLDEN / TOKENIZER_FOLDER
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / file, folder / file)
    expected = {
        "name": name,
        "architecture": type(model).__name__,
        "model_type": model.config.model_type,
        "transformers_version": transformers.__version__,
        "torch_version": torch.__version__,
        "dtype": "float32",
        "attention": "eager",
        "device": "cpu",
        "seed": seed,
        "vocab_size": model.config.vocab_size,
        "prompts": prompts,
        "greedy": [greedy for _, greedy, _ in cases],
        "min_top2_gap": [round(min(gaps), 6) for _, _, gaps in cases],
        "logits_std": round(float(torch.cat(logits).std()), 4),
        "tokenizer": json.loads((source / "expected.json").read_text())["tokenizer"],
    }
    wide = model.double()
    expected["float64_max_abs_diff"] = [float((logits_of(wide, p) - x).abs().max()) for p, x in zip(prompts, logits, strict=True)]
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{name}: logits_std {expected['logits_std']}, smallest gaps {expected['min_top2_gap']}")


if __name__ == "__main__":
    for folder_name in sys.argv[1:]:
        make(folder_name)
