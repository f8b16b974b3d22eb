"""The floor under a decode step on a card: bytes and operations of the compiled program beside what memory and tensor cores can do.

Bytes are those of the program's text (`bench.hlo`) and those that our kernels load and store. The latter are formulas here; tests hold them
to what Triton's interpreter counts. Nothing here was measured on a card: a floor is what no run can beat, not what one reaches. Next:
`scripts/roofline_table.py`, which writes docs/performance.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.bench import hlo
from jaxserve.bench.whole_step import WholeStep
from jaxserve.models.load import split_model
from jaxserve.models.spec import AttentionSpec, LatentAttentionSpec, ModelSpec, MoESpec
from jaxserve.runner.memory import group_limits, page_bytes, tree_bytes
from pallas_kernels import deviceless
from pallas_kernels.paged_attention.triton_sizes import single_token_sizes

BYTES_PER_S = 4.3e12
OPERATIONS_PER_S = 0.79e15
"""Measured elsewhere on an H200: copying, and bfloat16 products."""
BATCHES = (1, 8, 32, 128, 256)
CONTEXTS = (1024, 8192, 32768)
ITEM = 2
"""Bytes of an element of weights, activations and pages."""
COMPILER_OPTIONS = {"xla_gpu_experimental_force_split_k": 1}
"""To compile what is counted. On a card XLA times how to split each product over its inputs; without one it splits many into parts that are
added up in float32 through memory. Unsplit, a product moves its operands and its result."""
OURS = frozenset(("attend", "add_splits", "write", "multiply_blocks"))


@dataclass(frozen=True, slots=True)
class Attention:
    """What `attend` and `add_splits` depend on, for rows of one token; see `api.paged_attention`."""

    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parts: int
    page_size: int
    max_keys: int
    window: int | None = None
    item: int = ITEM

    def visible(self, context: int) -> int:
        """Keys that a token sees."""
        return context if self.window is None else min(context, self.window)

    def cost(self, contexts: Sequence[int]) -> hlo.Cost:
        """Bytes loaded and stored, and operations, of rows that hold `contexts` keys; a row without keys is padding."""
        group = self.num_heads // self.num_kv_heads
        sizes = single_token_sizes(
            num_rows=self.num_rows, num_kv_heads=self.num_kv_heads, group=group, num_parts=self.num_parts, head_dim=self.head_dim,
            page_bytes=self.item, dot_bytes=self.item, max_keys=self.max_keys,
        )  # fmt: skip
        walks = self.num_kv_heads * -(-group // sizes.heads)  # programs that each walk a row's keys
        queries = self.num_heads * self.head_dim * self.item
        num_bytes = num_operations = 0
        for context in contexts:
            keys = self.visible(context)
            first_tile, end_tile = (context - keys) // sizes.tile, -(-context // sizes.tile)
            tiles_of_split = max(-(-(end_tile - first_tile) // sizes.num_splits), sizes.min_tiles)
            num_splits = max(1, -(-(end_tile - first_tile) // tiles_of_split))
            keys_bytes = keys * self.num_parts * self.head_dim * self.item
            # Each tile looks its pages up; where pages are larger, one entry.
            table_bytes = 4 * max(-(-keys // self.page_size), end_tile - first_tile)
            num_bytes += walks * (keys_bytes + table_bytes + 4 * num_splits) + num_splits * queries + queries
            if sizes.num_splits > 1:  # sums and two figures of each part, stored and loaded again
                num_bytes += 2 * num_splits * self.num_heads * (self.head_dim + 2) * 4 + 4 * self.num_heads
            num_operations += 4 * self.num_heads * keys * self.head_dim
        return hlo.Cost(num_bytes, num_operations)


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """What `multiply_blocks` depends on; see `api.grouped_linear`."""

    num_inputs: int
    num_outputs: int
    item: int = ITEM
    tile_out: int = 128

    def cost(self, num_rows: float, num_blocks: int, num_used: float, block_size: int) -> hlo.Cost:
        """Bytes and operations; `num_rows` of blocks in use have a copy. That, and `num_used`, may be an expectation.

        Rows, which all tiles of outputs read again, count once, as they do in XLA's own products (`reread_bytes` has the rest).
        """
        tiles = -(-self.num_outputs // self.tile_out)
        loaded = (num_used * self.num_outputs + num_rows) * self.num_inputs * self.item
        looked_up = 4 * tiles * (num_blocks + num_used * (1 + block_size))  # is it in use, whose is it, which copies
        stored = num_rows * self.num_outputs * self.item
        return hlo.Cost(loaded + looked_up + stored, 2 * num_used * block_size * self.num_inputs * self.num_outputs)

    def reread_bytes(self, num_rows: float) -> float:
        """What further tiles load of rows that the first has loaded: a few MB, which the second-level cache holds."""
        return (-(-self.num_outputs // self.tile_out) - 1) * num_rows * self.num_inputs * self.item


def write_cost(num_tokens: int, vector_elements: int, num_parts: int, item: int = ITEM) -> hlo.Cost:
    """Of `write`: a token's keys and values (`vector_elements` each) loaded, stored, and where they go."""
    return hlo.Cost(num_tokens * num_parts * (2 * vector_elements * item + 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """One decode step of `batch` rows that each hold `context` keys, on each card.

    Attributes:
        needed_bytes: Every weight that the step uses read once, keys and values read, new ones and logits written; of each sum over
            several cards what one must tell the others, and they it.
        moved_bytes: What the program loads and stores.
        num_operations: Of its products.
        held_bytes: Weights and pages: they may be more than the card has.
    """

    batch: int
    context: int
    needed_bytes: float
    moved_bytes: float
    num_operations: float
    held_bytes: float

    @property
    def memory_s(self) -> float:
        """Seconds that moving the bytes takes at least."""
        return self.moved_bytes / BYTES_PER_S

    @property
    def compute_s(self) -> float:
        """Seconds that the operations take at least."""
        return self.num_operations / OPERATIONS_PER_S

    @property
    def floor_s(self) -> float:
        """The larger of the two."""
        return max(self.memory_s, self.compute_s)

    @property
    def ratio(self) -> float:
        """Moved / needed."""
        return self.moved_bytes / self.needed_bytes


def expected_experts(moe: MoESpec, num_tokens: int) -> float:
    """Experts that at least one of the tokens goes to, if each goes to `top_k` at random."""
    return moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** num_tokens)


def expected_blocks(moe: MoESpec, num_tokens: int, size: int) -> float:
    """Blocks of `size` rows that the tokens fill, likewise: an expert's share is binomial, and its last block may be part empty."""
    p = moe.top_k / moe.num_experts
    shares = (math.comb(num_tokens, n) * p**n * (1 - p) ** (num_tokens - n) * -(-n // size) for n in range(num_tokens + 1))
    return moe.num_experts * sum(shares)


def decode_floors(step: WholeStep, batch: int, module: hlo.Module) -> list[Floor]:
    """One floor for each of CONTEXTS.

    Args:
        step: The model and its cards.
        batch: Real rows.
        module: The decode program whose bucket takes them.
    """
    rows = decode_rows(step, batch)
    spec: ModelSpec = step.model.spec  # of one device
    program = module.cost(custom_call=_nothing_for_ours, trips=lambda _: 1.0)
    fixed = _expert_cost(spec, batch, rows)
    for layer in spec.layers:
        parts, heads, _ = _page_shape(layer.attention)
        fixed = fixed.plus(write_cost(rows, heads * layer.attention.head_dim, parts))  # type: ignore[union-attr]
    weights, unused = _weight_bytes(step, batch)
    floors = []
    for context in CONTEXTS:
        cost, kv_bytes = program.plus(fixed), 0.0
        for layer in spec.layers:
            parts, heads, window = _page_shape(layer.attention)
            attention = Attention(
                num_rows=rows, num_heads=layer.attention.num_heads, num_kv_heads=heads, head_dim=layer.attention.head_dim,  # type: ignore[union-attr]
                num_parts=parts, page_size=step.page_size, max_keys=step.max_model_len, window=window,
            )  # fmt: skip
            cost = cost.plus(attention.cost([context] * batch))
            kv_bytes += batch * (attention.visible(context) + 1) * parts * heads * attention.head_dim * ITEM
        logits = batch * step.spec.vocab_size // step.num_devices * 4
        held = weights + batch * pages_held(spec, context, step.page_size) * page_bytes(spec, step.page_size, "bfloat16")
        floors.append(
            Floor(
                batch=batch, context=context, needed_bytes=weights - unused + kv_bytes + logits + told_bytes(step, batch),
                moved_bytes=cost.num_bytes, num_operations=cost.num_operations, held_bytes=held,
            )
        )  # fmt: skip
    return floors


def told_bytes(step: WholeStep, batch: int) -> float:
    """Read to be sent, and written as received, by each of several cards: of every sum over them each has 1 / n to add up.

    The sums are those of attention and MLP (one for both in a parallel block) and of the embedding.
    """
    num_sums = 1 + step.spec.num_layers * (1 if step.spec.block.is_parallel else 2)
    return num_sums * batch * step.spec.hidden_size * ITEM * 2 * (step.num_devices - 1) / step.num_devices


def decode_rows(step: WholeStep, batch: int) -> int:
    """Rows of the smallest decode bucket that takes the batch."""
    return next(rows for rows in step.shape.buckets.decode_rows if rows >= batch)


def pages_held(spec: ModelSpec, context: int, page_size: int) -> int:
    """Pages of a sequence with `context` keys, of all its groups: those with a window or chunk have dropped what no token sees any more."""
    last = context - 1
    return sum(last // page_size - group.first_visible(last) // page_size + 1 for group in group_limits(spec))


def _nothing_for_ours(call: hlo.Instruction) -> hlo.Cost | None:
    if call.attribute("custom_call_target") != "triton_kernel_call_ffi":
        return None
    name, _ = deviceless.triton_kernel(call.payload("opaque"))
    assert name in OURS, f"no formula says what the kernel {name} moves"
    return hlo.Cost()


def _page_shape(attention: object) -> tuple[int, int, int | None]:
    """Parts, kv heads and window of a layer's pages."""
    if isinstance(attention, LatentAttentionSpec):
        return 1, 1, None
    assert isinstance(attention, AttentionSpec), "recurrent layers have no pages"
    return 2, attention.num_kv_heads, attention.window


def _expert_cost(spec: ModelSpec, batch: int, rows: int) -> hlo.Cost:
    """Of the products of all mixtures."""
    from jaxserve.models.moe import SPARE_ON_GPU, block_size

    cost = hlo.Cost()
    for layer in spec.layers:
        if isinstance(moe := layer.mlp, MoESpec):
            size = block_size(rows, moe.top_k, moe.num_experts, SPARE_ON_GPU)
            copies = rows * moe.top_k
            num_blocks = min(copies, copies // size + moe.num_experts)
            num_used = expected_blocks(moe, batch, size)
            for product in (GroupedProduct(spec.hidden_size, 2 * moe.size), GroupedProduct(moe.size, spec.hidden_size)):
                cost = cost.plus(product.cost(batch * moe.top_k, num_blocks, num_used, size))
    return cost


def _weight_bytes(step: WholeStep, batch: int) -> tuple[float, float]:
    """Of one device: all weights, and those that a step does not touch: rows of the embedding, experts that no token goes to."""
    spec: ModelSpec = step.model.spec
    weights = tree_bytes(split_model(step.model)[1]) / step.num_devices
    unused = 0.0
    if not spec.head.is_tied:
        unused += (step.spec.vocab_size / step.num_devices - batch) * spec.hidden_size * ITEM
    for layer in spec.layers:
        if isinstance(moe := layer.mlp, MoESpec):
            unused += (moe.num_experts - expected_experts(moe, batch)) * 3 * moe.size * spec.hidden_size * ITEM
    return weights, unused
