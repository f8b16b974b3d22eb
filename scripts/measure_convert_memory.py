"""Measures the peak memory of conversions over what their imports take, for files made on the spot.

    python scripts/measure_convert_memory.py [--gigabytes 4] [--directory DIR]

Converts a single-file safetensors (bfloat16) whose largest tensors are half of it, one of many equal tensors, and a GGUF
(Q4_0, dequantized to float32), each in a process of its own, and checks the bound: 2 x the largest tensor in float32 + 256 MB.
The files are sparse (all zeros), which changes nothing for memory: every byte is read, converted and written.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

MEASURE = """
import os, sys, time
os.environ["JAX_PLATFORMS"] = "cpu"
import gguf, tokenizers, tensorstore, orbax.checkpoint.experimental.v1
from jaxserve.convert import convert
def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
base = status("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
started = time.monotonic()
convert(sys.argv[1], sys.argv[2])
print(base, status("VmHWM:") - base, time.monotonic() - started)
"""


def shapes(vocab: int, hidden: int, mlp: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a llama model under GGUF names."""
    result: dict[str, tuple[int, ...]] = {"token_embd": (vocab, hidden), "output": (vocab, hidden), "output_norm": (hidden,)}
    for i in range(layers):
        result |= {f"blk.{i}.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")}
        result |= {f"blk.{i}.ffn_gate": (mlp, hidden), f"blk.{i}.ffn_up": (mlp, hidden), f"blk.{i}.ffn_down": (hidden, mlp)}
        result |= {f"blk.{i}.attn_norm": (hidden,), f"blk.{i}.ffn_norm": (hidden,)}
    return result


def sizes(gigabytes: float, *, is_top_heavy: bool) -> tuple[int, int, int, int]:
    """vocab, hidden, mlp, layers for about that many GB in bfloat16."""
    hidden, mlp = 2048, 8192
    layer_bytes = 2 * (4 * hidden * hidden + 3 * hidden * mlp)
    if is_top_heavy:
        # A quarter of the file each for embedding and head.
        return int(gigabytes * 1e9 / 4 / (2 * hidden)), hidden, mlp, max(int(gigabytes * 1e9 / 2 / layer_bytes), 1)
    return 4096, hidden, mlp, max(int(gigabytes * 1e9 / layer_bytes), 1)


def write_safetensors(directory: Path, dimensions: tuple[int, int, int, int]) -> Path:
    """A Hugging Face directory with one sparse file."""
    from jaxserve.convert.gguf_names import LAYOUTS

    vocab, hidden, mlp, layers = dimensions
    header, offset = {}, 0
    for name, shape in shapes(*dimensions).items():
        num_bytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        place = [offset, offset + num_bytes]
        header[LAYOUTS["llama"].hugging_face_name(f"{name}.weight")] = {"dtype": "BF16", "shape": shape, "data_offsets": place}
        offset += num_bytes
    text = json.dumps(header).encode()
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_gguf(path: Path, dimensions: tuple[int, int, int, int]) -> Path:
    """A sparse GGUF: Q4_0 matrices, F32 norms, and a tokenizer with a token for each row of the embedding."""
    import gguf
    import numpy as np

    vocab, hidden, mlp, layers = dimensions
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(mlp)
    writer.add_block_count(layers)
    writer.add_head_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    total = 0
    for name, shape in shapes(*dimensions).items():
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_0
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = shape[0] * (shape[1] if len(shape) > 1 else 1) // block * block_bytes
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), num_bytes, raw_dtype=kind)
        total += -(-num_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(-(-path.stat().st_size // 32) * 32 + total)
    return path


def measure(source: Path, destination: Path, largest_bytes: int) -> bool:
    """Converts in a new process and prints one line; whether the bound holds."""
    done = subprocess.run([sys.executable, "-c", MEASURE, source, destination], stdout=subprocess.PIPE, text=True, check=True)
    base, over, seconds = (float(word) for word in done.stdout.split())
    bound = 2 * largest_bytes + 256e6
    size = sum(file.stat().st_size for file in ([source] if source.is_file() else source.iterdir()))
    print(
        f"{source.name}: {size / 1e9:.2f} GB, largest tensor {largest_bytes / 1e6:.0f} MB in float32; imports {base / 1e6:.0f} MB, "
        f"peak over them {over / 1e6:.0f} MB (bound {bound / 1e6:.0f} MB); {seconds:.1f} s",
        flush=True,
    )
    shutil.rmtree(destination)
    return over < bound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of each safetensors file")
    parser.add_argument("--directory", type=Path, help="where to work; needs about 4 x that size free")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        work = Path(name)
        heavy, even = (sizes(arguments.gigabytes, is_top_heavy=flag) for flag in (True, False))
        cases = [
            (write_safetensors(work / "large-embedding", heavy), heavy[0] * heavy[1]),
            (write_safetensors(work / "equal-tensors", even), even[1] * even[2]),
            (write_gguf(work / "large-embedding-q4_0.gguf", heavy), heavy[0] * heavy[1]),
        ]
        results = [measure(source, work / "converted", 4 * elements) for source, elements in cases]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
