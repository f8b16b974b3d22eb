"""From GGUF tensor names to Hugging Face's, and what llama.cpp changed in the tensors, for each architecture that is read.

Knows the layout of tensors, not of metadata (`gguf_config.py`) nor of files (`gguf_file.py`); who uses this is `read_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How one architecture's tensors are kept.

    Attributes:
        layer_names: Part of a layer, as GGUF calls it, to Hugging Face's name.
        expert_names: Stack of all experts, as GGUF calls it, to Hugging Face's name of each; {e} stands for the expert.
        is_interleaved: Rows of q and k are in pairs of rotated dimensions.
        is_norm_offset: Norm weights are stored plus one, unlike in Hugging Face's checkpoints.
    """

    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    expert_names: Mapping[str, str] = field(default_factory=dict)
    is_interleaved: bool = False
    is_norm_offset: bool = False

    def hugging_face_name(self, name: str) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; a name that is not known stays as it is."""
        stem, _, kind = name.rpartition(".")
        if stem in _TOP_NAMES:
            return f"{_TOP_NAMES[stem]}.{kind}"
        layer, part = layer_part(stem)
        if part in self.layer_names:
            return f"model.layers.{layer}.{self.layer_names[part]}.{kind}"
        # Files of before the stacks keep each expert by itself.
        part, _, expert = part.rpartition(".")
        template = self.expert_names.get(f"{part}_exps") if expert.isdigit() else None
        return name if template is None else f"model.layers.{layer}.{template.replace('{e}', expert)}.{kind}"

    def expert_name(self, name: str, expert: int) -> str | None:
        """Hugging Face's name of one expert in a stack; None for what is no stack of experts."""
        stem, _, kind = name.rpartition(".")
        layer, part = layer_part(stem)
        template = self.expert_names.get(part)
        return None if template is None else f"model.layers.{layer}.{template.replace('{e}', str(expert))}.{kind}"


def layer_part(stem: str) -> tuple[str, str]:
    """`blk.3.attn_q` -> ("3", "attn_q"); empty where the tensor is of no layer."""
    match = re.fullmatch(r"blk\.(\d+)\.([\w.]+)", stem)
    return (match[1], match[2]) if match else ("", "")


def _experts(prefix: str, gate: str, up: str, down: str) -> dict[str, str]:
    return {f"ffn_{part}_exps": f"{prefix}.experts.{{e}}.{name}" for part, name in (("gate", gate), ("up", up), ("down", down))}


LAYOUTS = {
    "llama": Layout(
        layer_names=_LAYER_NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"},
        expert_names=_experts("block_sparse_moe", "w1", "w3", "w2"),
        is_interleaved=True,
    ),
    "qwen2": Layout(),
    "qwen3": Layout(layer_names=_LAYER_NAMES | _HEAD_NORMS),
    "qwen3moe": Layout(
        layer_names=_LAYER_NAMES | _HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
        expert_names=_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    "gemma": Layout(is_norm_offset=True),
    "gemma2": Layout(layer_names=_LAYER_NAMES | _OUTPUT_NORMS, is_norm_offset=True),
    "gemma3": Layout(layer_names=_LAYER_NAMES | _OUTPUT_NORMS | _HEAD_NORMS, is_norm_offset=True),
    "phi3": Layout(layer_names=_LAYER_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}
"""By the value of `general.architecture`."""
