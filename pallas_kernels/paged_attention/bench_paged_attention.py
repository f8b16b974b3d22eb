"""Times the implementations of `paged_attention` on this machine: a card for people, then one JSON line.

    python -m pallas_kernels.paged_attention.bench_paged_attention [--layers 30] [--repeats 20] [--implementation NAME ...]
    python -m pallas_kernels.paged_attention.bench_paged_attention --ragged

A program calls attention once for each layer, and each layer has its own pages: on shared pages XLA would gather once for all
layers, and the pages would stay in the CPU's caches, as they never do in a model. The best of the repeats counts.

`--ragged` measures what rows of different lengths cost: the implementation that a run here would use, on 32 rows of 1 to 4,096 keys,
against the same on 32 rows of equal length with the same keys in all (a dense batch), and against the form that gathers every row's
whole page table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch, paged_attention
from pallas_kernels.paged_attention.arg_specs import BENCH_SPECS, AttentionSpec, dense_batch, make_args, ragged_batch

RAGGED_LAYERS = 6
"""50 MB of pages a layer."""


def make_step(
    spec: AttentionSpec, implementation: str, *, num_layers: int, attention: Callable[..., jax.Array] = paged_attention
) -> Callable[[], None]:
    """A compiled step of this shape, run once already; calling it runs it and waits."""
    q, pages, *places = (jnp.asarray(array) for array in make_args(spec))
    # A layer differs from the next in its values only, which time does not depend on.
    layers = [pages + layer for layer in range(num_layers)]

    @jax.jit
    def step(q: jax.Array, layers: list[jax.Array]) -> jax.Array:
        for pages in layers:  # one layer's output is the next one's query, so that layers cannot run side by side
            q = attention(q, pages, *places, is_decode=spec.is_decode, scale=spec.head_dim**-0.5, implementation=implementation)
        return q

    def run() -> None:
        step(q, layers).block_until_ready()

    run()
    return run


def best_ms(steps: Sequence[Callable[[], None]], *, num_repeats: int) -> list[float]:
    """Milliseconds of the best run of each; they run by turns, so that what disturbs one disturbs all."""
    best = [float("inf")] * len(steps)
    for _ in range(num_repeats):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            step()
            best[i] = min(best[i], (time.perf_counter() - start) * 1e3)
    return best


def gathered_attention(
    q: jax.Array,
    pages: jax.Array,
    page_tables: jax.Array,
    row_start: jax.Array,
    kv_length: jax.Array,
    token_row: jax.Array,
    position: jax.Array,
    *,
    is_decode: bool,
    scale: float,
    implementation: str,
) -> jax.Array:
    """What a reader compares with: every row's whole page table is gathered, padding and all. Plain causal attention only.

    Sums are right, but NaN in places that a row does not own reaches its output.
    """
    del kv_length, row_start, implementation, is_decode
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    num_rows, max_pages = page_tables.shape
    kv = pages[page_tables].transpose(2, 0, 3, 1, 4, 5).reshape(2, num_rows, num_kv_heads, max_pages * page_size, head_dim)
    grouped = q.reshape(num_rows, -1, num_kv_heads, q.shape[1] // num_kv_heads, head_dim).astype(pages.dtype)  # rows have equal tokens
    scores = jnp.einsum("bmkgh,bksh->bkgms", grouped, kv[0]).astype(jnp.float32) * scale
    is_visible = jnp.arange(max_pages * page_size)[None] <= position[:, None]  # [T, S]
    scores = jnp.where(is_visible.reshape(num_rows, 1, 1, -1, max_pages * page_size), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(pages.dtype)
    out = jnp.einsum("bkgms,bksh->bmkgh", weights, kv[1])
    return out.reshape(q.shape).astype(q.dtype)


def bench_shapes(names: Sequence[str], *, num_layers: int, num_repeats: int) -> list[dict[str, object]]:
    """Prints and returns the times of all implementations for `BENCH_SPECS`, milliseconds a layer."""
    print(f"{'shape':<18}{'MB':>8}" + "".join(f"{name:>14}" for name in names))
    results: list[dict[str, object]] = []
    for spec in BENCH_SPECS:
        steps = [make_step(spec, name, num_layers=num_layers) for name in names]
        ms = {name: best / num_layers for name, best in zip(names, best_ms(steps, num_repeats=num_repeats), strict=True)}
        print(f"{spec.name:<18}{spec.kv_bytes / 1e6:>8.1f}" + "".join(f"{ms[name]:>14.3f}" for name in names))
        ratio = {name: ms[name] / min(ms.values()) for name in names}
        results.append({"shape": spec.name, "kv_bytes": spec.kv_bytes, "ms_a_layer": ms, "ratio_to_best": ratio})
    return results


def bench_ragged(name: str, *, num_repeats: int) -> list[dict[str, object]]:
    """Prints and returns the times of ragged batches, of dense ones with the same keys and of the gather form, milliseconds a layer."""
    print(f"{'batch':<18}{'MB':>8}{'ragged':>10}{'dense':>10}{'gather':>10}{'ragged/dense':>14}{'ragged/gather':>15}")
    results: list[dict[str, object]] = []
    for num_tokens in (1, 16):
        ragged = ragged_batch(num_tokens)
        steps = [
            make_step(ragged, name, num_layers=RAGGED_LAYERS),
            make_step(dense_batch(ragged), name, num_layers=RAGGED_LAYERS),
            make_step(ragged, name, num_layers=RAGGED_LAYERS, attention=gathered_attention),
        ]
        # Gathering sweeps the caches: whoever runs after it in turn would pay for that.
        ms = [best / RAGGED_LAYERS for part in (steps[:2], steps[2:]) for best in best_ms(part, num_repeats=num_repeats)]
        to_dense, to_gather = ms[0] / ms[1], ms[0] / ms[2]
        print(
            f"{ragged.name:<18}{ragged.kv_bytes / 1e6:>8.1f}" + "".join(f"{x:>10.2f}" for x in ms) + f"{to_dense:>14.2f}{to_gather:>15.3f}"
        )
        times = {"ragged_ms": ms[0], "dense_ms": ms[1], "gather_ms": ms[2]}
        results.append({"shape": ragged.name, **times, "ratio_to_dense": to_dense, "ratio_to_gather": to_gather})
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the bench and prints its card and its JSON line."""
    usable = [name for name, reason in dispatch.available().items() if reason is None]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="layers in a program (30)")
    parser.add_argument("--repeats", type=int, default=20, help="runs of each program; the best counts (20)")
    parser.add_argument("--implementation", action="append", choices=usable, help="may be given more than once (all)")
    parser.add_argument("--ragged", action="store_true", help="rows of 1 to 4,096 keys against a dense batch and against the gather form")
    args = parser.parse_args(argv)

    chosen, why = dispatch.choose(dispatch.this_device())
    num_layers = RAGGED_LAYERS if args.ragged else args.layers
    print(f"paged attention on {jax.default_backend()}, {num_layers} layers, ms a layer; a run here would use {chosen} ({why})")
    if args.ragged:
        results = bench_ragged(chosen, num_repeats=args.repeats)
    else:
        results = bench_shapes(args.implementation or usable, num_layers=num_layers, num_repeats=args.repeats)
    name = "ragged_attention" if args.ragged else "paged_attention"
    print(json.dumps({"bench": name, "platform": jax.default_backend(), "layers": num_layers, "results": results}))


if __name__ == "__main__":
    main()
