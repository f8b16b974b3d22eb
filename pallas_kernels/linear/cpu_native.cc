// Activations times a bfloat16 weight matrix, for CPUs. The rules are those of api.py; reference.py is the oracle.
//
// The weights lie as checkpoints store them, [outputs, inputs], and are read once in a call: an item of work is a block of
// kBlock outputs, and takes all tokens. Threads of XLA's own pool take items. With few tokens the memory decides, so a thread
// asks for its next block while it works on this one. Two ways to multiply a block:
//  - AMX: 16 weight rows of 32 inputs are an A tile as they lie, so no weight is packed. B tiles want pairs of inputs of 16 tokens
//    side by side: the few activations are packed so, once in a call.
//  - Elsewhere a dot product of each weight row and each token: with AVX512-BF16 one instruction for 32 products, otherwise in
//    float32 with compiler vectors, so that one source serves AVX-512, AVX2, SSE and NEON.
// Sums are float32 in both. A token is a lane or a row of its own, so its NaN reaches no other.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define JAXSERVE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kTile = 16;            // rows of an AMX tile, and 32-bit columns
constexpr int kBlock = 2 * kTile;    // outputs at once
constexpr int kTokens = 2 * kTile;   // tokens at once
constexpr int kPair = 2;             // inputs that are multiplied together: bfloat16 halves of a 32-bit word
constexpr int kTileInputs = kTile * kPair;
constexpr int kChunk = 256;          // tokens of an item: many tokens are work for many threads even where outputs are few

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint32_t UnalignedWords __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));
typedef uint16_t ShortVec __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

struct Bfloat16 {
  uint16_t bits;
};

inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline WordVec load(const Bfloat16* p) { return *reinterpret_cast<const UnalignedWords*>(p); }
inline float to_float(float x) { return x; }
inline float to_float(Bfloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }
inline void store(Bfloat16* p, Vec v) {  // rounds to even; NaN stays NaN
  const WordVec bits = reinterpret_cast<WordVec>(v), upper = bits >> 16;
  const WordVec rounded = (bits + 0x7fff + (upper & 1)) >> 16;
  *reinterpret_cast<ShortVec*>(p) = __builtin_convertvector(v == v ? rounded : upper | 0x40, ShortVec);
}

// The first `count` elements from memory, then 0.
template <typename T>
inline auto load_part(const T* p, int64_t count) {
  T values[kLanes * 4 / sizeof(T)] = {};
  std::copy_n(p, count, values);
  return load(values);
}

// sum + a * b, lane by lane. A lane of bfloat16 is a pair of inputs.
inline Vec multiply_add(Vec sum, Vec a, Vec b) { return sum + a * b; }
inline Vec multiply_add(Vec sum, WordVec a, WordVec b) {
#if defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const auto low = [](WordVec words) { return reinterpret_cast<Vec>(words << 16); };
  const auto high = [](WordVec words) { return reinterpret_cast<Vec>(words & 0xffff0000u); };
  return sum + low(a) * low(b) + high(a) * high(b);
#endif
}

template <int kBit, int... I>
inline std::pair<Vec, Vec> exchange(Vec a, Vec b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return {__builtin_shufflevector(a, b, ((I & kBit) ? kLanes + (I ^ kBit) : I)...),
          __builtin_shufflevector(a, b, ((I & kBit) ? kLanes + I : (I ^ kBit))...)};
#else
  return {__builtin_shuffle(a, b, IntVec{((I & kBit) ? kLanes + (I ^ kBit) : I)...}),
          __builtin_shuffle(a, b, IntVec{((I & kBit) ? kLanes + I : (I ^ kBit))...})};
#endif
}
// Transposes kLanes vectors: for each index bit, exchanges the off-diagonal halves.
template <int kBit = 1>
inline void transpose(Vec* v) {
  if constexpr (kBit < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if (i & kBit) continue;
      std::tie(v[i], v[i | kBit]) = exchange<kBit>(v[i], v[i | kBit], std::make_integer_sequence<int, kLanes>());
    }
    transpose<2 * kBit>(v);
  }
}
// One vector whose lane i is the sum of all lanes of v[i]: as above, but each exchange adds its two results.
template <int kBit = 1>
inline Vec sum_each(Vec* v) {
  if constexpr (kBit == kLanes) {
    return v[0];
  } else {
    for (int i = 0; i < kLanes / (2 * kBit); ++i) {
      const auto [a, b] = exchange<kBit>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, kLanes>());
      v[i] = a + b;
    }
    return sum_each<2 * kBit>(v);
  }
}

// The call's arguments in plain form.
template <typename T>
struct Step {
  const T* x;        // [tokens, inputs]
  const T* weight;   // [outputs, inputs]
  const T* bias;     // [outputs], or null
  uint32_t* packed;  // AMX: [tokens / kTile, inputs / kPair, kTile] words of two inputs; padding tokens are 0. Otherwise null
  int64_t num_tokens, num_inputs, num_outputs;
};

// A block of outputs: the first rows of its two tiles. All of a tile's rows exist, unless the matrix has fewer than kTile.
struct Block {
  int64_t row[2];
};

// Products of a block with up to kTokens tokens.
struct alignas(64) Sums {
  float at[kTokens][kBlock];
};

// Asks for `count` cache lines. Inlined always: GCC takes a function of prefetches for one without effect, and drops calls of it.
__attribute__((always_inline)) inline void prefetch(const void* from, int count) {
  for (int i = 0; i < count; ++i) __builtin_prefetch(static_cast<const char*>(from) + i * 64, 0, 2);
}

// Products of kRows weight rows with kCount tokens, into `sums` from (first_t, column) on. `next` is what the thread will read later, or null.
template <int kCount, typename T>
void multiply_rows(const Step<T>& step, int64_t first_row, const T* next, int64_t token, int first_t, int column,
                   Sums& sums) {
  constexpr int kRows = kLanes / kCount, kStep = kLanes * 4 / sizeof(T);
  const T *row[kRows], *x[kCount];
  for (int r = 0; r < kRows; ++r) row[r] = step.weight + std::min(first_row + r, step.num_outputs - 1) * step.num_inputs;
  for (int t = 0; t < kCount; ++t) x[t] = step.x + (token + first_t + t) * step.num_inputs;
  Vec sum[kLanes] = {};
  const auto add = [&](const auto& load) {
    decltype(load(x[0])) factor[kCount];
    for (int t = 0; t < kCount; ++t) factor[t] = load(x[t]);
    for (int r = 0; r < kRows; ++r) {
      const auto weights = load(row[r]);
      for (int t = 0; t < kCount; ++t) sum[t * kRows + r] = multiply_add(sum[t * kRows + r], weights, factor[t]);
    }
  };
  int64_t k = 0;
  for (; k + kStep <= step.num_inputs; k += kStep) {
    add([k](const T* p) { return load(p + k); });
    if (next) prefetch(next + k * kRows, kRows * kLanes / 16);
  }
  if (k < step.num_inputs) add([&](const T* p) { return load_part(p + k, step.num_inputs - k); });
  alignas(64) float total[kCount][kRows];
  store(total[0], sum_each(sum));
  for (int t = 0; t < kCount; ++t) std::copy_n(total[t], kRows, &sums.at[first_t + t][column]);
}

template <typename T>
void multiply_by_rows(const Step<T>& step, const Block& block, const Block* next, int64_t token, int count, Sums& sums) {
  for (int tile = 0; tile < 2; ++tile) {
    const auto rows = [&](auto num_tokens, int t) {
      constexpr int kCount = decltype(num_tokens)::value, kRows = kLanes / kCount;
      for (int r = 0; r < kTile; r += kRows) {
        const T* ahead = next && t == 0 ? step.weight + (next->row[tile] + r) * step.num_inputs : nullptr;
        multiply_rows<kCount>(step, block.row[tile] + r, ahead, token, t, tile * kTile + r, sums);
      }
    };
    int t = 0;
    for (; t + 4 <= count; t += 4) rows(std::integral_constant<int, 4>(), t);
    for (; t + 2 <= count; t += 2) rows(std::integral_constant<int, 2>(), t);
    if (t < count) rows(std::integral_constant<int, 1>(), t);
  }
}

#if JAXSERVE_AMX
// The kernel grants a process the use of the tiles' state when asked.
bool has_amx() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool has = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return has;
}

template <int kReg>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kReg));
}
template <int kReg>
inline void tile_load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kReg), "r"(p), "r"(stride) : "memory");
}
template <int kReg>
inline void tile_store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kReg), "r"(p), "r"(stride) : "memory");
}
template <int kTo, int kA, int kB>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kA), "i"(kB));
}

// The thread's tile registers, all of full size, for as long as it lives.
struct TileState {
  TileState() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    std::fill_n(config.row_bytes, 8, 64);
    std::fill_n(config.rows, 8, kTile);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~TileState() { asm volatile("tilerelease"); }
};

// Packs the tile of tokens that begins at `token`.
void pack(const Step<Bfloat16>& step, int64_t token) {
  const int64_t num_words = step.num_inputs / kPair, count = std::min<int64_t>(kTile, step.num_tokens - token);
  uint32_t* to = step.packed + token * num_words;
  const Bfloat16* from = step.x + token * step.num_inputs;
  for (int64_t word = 0; word < num_words; word += kLanes) {
    Vec v[kLanes] = {};
    for (int i = 0; i < count; ++i) v[i] = reinterpret_cast<Vec>(load(from + i * step.num_inputs + word * kPair));
    transpose(v);
    for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(to + (word + i) * kTile), v[i]);
  }
}

template <int kTokenTiles>
void multiply_tiles(const Step<Bfloat16>& step, const Block& block, const Block* next, int64_t token, Sums& sums) {
  const int64_t num_words = step.num_inputs / kPair, row_bytes = step.num_inputs * sizeof(Bfloat16);
  const auto tile = [&](const Block& of, int i) { return step.weight + of.row[i] * step.num_inputs; };
  const Bfloat16 *upper = tile(block, 0), *lower = tile(block, 1);
  const uint32_t* x = step.packed + token * num_words;
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t word = 0; word < num_words; word += kTile) {
    tile_load<4>(upper + word * kPair, row_bytes);
    tile_load<5>(lower + word * kPair, row_bytes);
    tile_load<6>(x + word * kTile, 64);
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 5, 6>();
    if constexpr (kTokenTiles == 2) {
      tile_load<7>(x + (num_words + word) * kTile, 64);
      tile_multiply<2, 4, 7>();
      tile_multiply<3, 5, 7>();
    }
    if (next) {
      prefetch(tile(*next, 0) + word * kPair * kTile, kTile);
      prefetch(tile(*next, 1) + word * kPair * kTile, kTile);
    }
  }
  alignas(64) float products[4][kTile][kTile];  // [output][token]
  tile_store<0>(products[0], 64);
  tile_store<1>(products[1], 64);
  if constexpr (kTokenTiles == 2) tile_store<2>(products[2], 64), tile_store<3>(products[3], 64);
  for (int j = 0; j < 2 * kTokenTiles; ++j) {
    Vec v[kTile];
    for (int i = 0; i < kTile; ++i) v[i] = load(products[j][i]);
    transpose(v);
    for (int i = 0; i < kTile; ++i) store(&sums.at[j / 2 * kTile + i][j % 2 * kTile], v[i]);
  }
}
#endif

template <typename T, typename Out>
struct Work {
  Step<T> step;
  Out* out;  // [tokens, outputs]
  std::unique_ptr<uint32_t[], void (*)(uint32_t*)> packed{nullptr, [](uint32_t* p) { ::operator delete[](p, std::align_val_t(64)); }};
  int64_t num_blocks, num_chunks, num_packs = 0;
  std::atomic<int64_t> next_pack{0}, num_packed{0}, next{0}, num_done{0};

  // Any thread may come, even when the call is over: it finds nothing left.
  void help() {
    const int64_t count = num_blocks * num_chunks;
    if (next.load() >= count) return;
#if JAXSERVE_AMX
    if constexpr (std::is_same_v<T, Bfloat16>) {
      for (int64_t i; (i = next_pack.fetch_add(1)) < num_packs;) {
        pack(step, i * kTile);
        if (num_packed.fetch_add(1) + 1 == num_packs) num_packed.notify_all();
      }
      for (int64_t packed; (packed = num_packed.load()) < num_packs;) num_packed.wait(packed);
      if (num_packs) {
        const TileState tiles;
        return multiply();
      }
    }
#endif
    multiply();
  }

  void multiply() {
    const int64_t count = num_blocks * num_chunks;
    for (int64_t i = next.fetch_add(1); i < count;) {
      const int64_t following = next.fetch_add(1);
      const Block own = block(i / num_chunks), ahead = block(following / num_chunks);
      const bool is_new = following < count && following / num_chunks != i / num_chunks;
      const int64_t begin = i % num_chunks * kChunk, end = std::min(begin + kChunk, step.num_tokens);
      Sums sums;
      for (int64_t token = begin; token < end; token += kTokens) {
        const int num_tokens = std::min<int64_t>(kTokens, end - token);
        multiply_block(own, is_new && token == begin ? &ahead : nullptr, token, num_tokens, sums);
        put(i / num_chunks, own, token, num_tokens, sums);
      }
      if (num_done.fetch_add(1) + 1 == count) num_done.notify_all();
      i = following;
    }
  }

  Block block(int64_t index) const {
    const int64_t last = std::max<int64_t>(0, step.num_outputs - kTile);
    return {{std::min(index * kBlock, last), std::min(index * kBlock + kTile, last)}};
  }

  void multiply_block(const Block& own, const Block* ahead, int64_t token, int num_tokens, Sums& sums) const {
#if JAXSERVE_AMX
    if constexpr (std::is_same_v<T, Bfloat16>) {
      if (step.packed) return num_tokens > kTile ? multiply_tiles<2>(step, own, ahead, token, sums) : multiply_tiles<1>(step, own, ahead, token, sums);
    }
#endif
    multiply_by_rows(step, own, ahead, token, num_tokens, sums);
  }

  // Writes the sums of a block. A tile that was moved to end with the matrix leaves the outputs of the tile before it alone.
  void put(int64_t index, const Block& own, int64_t token, int num_tokens, Sums& sums) const {
    for (int tile = 0; tile < 2; ++tile) {
      const int64_t row = own.row[tile], begin = index * kBlock + tile * kTile - row;
      const int64_t end = std::min<int64_t>(kTile, step.num_outputs - row);
      for (int t = 0; t < num_tokens; ++t) {
        float* from = &sums.at[t][tile * kTile];
        Out* to = out + (token + t) * step.num_outputs + row;
        if (step.bias) for (int64_t i = begin; i < end; ++i) from[i] += to_float(step.bias[row + i]);
        if (begin == 0 && end == kTile) {
          for (int i = 0; i < kTile; i += kLanes) store(to + i, load(from + i));
        } else {
          Out rounded[kTile];
          for (int i = 0; i < kTile; i += kLanes) store(rounded + i, load(from + i));
          for (int64_t i = begin; i < end; ++i) to[i] = rounded[i];
        }
      }
    }
  }
};

template <typename T, typename Out>
ffi::Error run(ffi::ThreadPool& pool, const Step<T>& step, Out* out) {
  if (step.num_tokens * step.num_outputs == 0) return ffi::Error::Success();
  auto work = std::make_shared<Work<T, Out>>();
  work->step = step, work->out = out;
  work->num_blocks = (step.num_outputs + kBlock - 1) / kBlock;
  work->num_chunks = (step.num_tokens + kChunk - 1) / kChunk;
#if JAXSERVE_AMX
  if (std::is_same_v<T, Bfloat16> && step.num_inputs % kTileInputs == 0 && step.num_inputs && step.num_outputs >= kTile && has_amx()) {
    work->num_packs = (step.num_tokens + kTile - 1) / kTile;
    const size_t bytes = work->num_packs * kTile * step.num_inputs * sizeof(Bfloat16);
    work->packed.reset(static_cast<uint32_t*>(::operator new[](bytes, std::align_val_t(64))));
    work->step.packed = work->packed.get();
  }
#endif
  // Waking a thread costs some microseconds: small products do not.
  constexpr int64_t kWorthAThread = 1 << 18;
  const int64_t cost = step.num_outputs * step.num_inputs * (sizeof(T) + step.num_tokens / 8), count = work->num_blocks * work->num_chunks;
  const int64_t num_helpers = std::min<int64_t>({pool.num_threads() - 1, count - 1, cost / kWorthAThread});
  for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule([work] { work->help(); });
  work->help();
  for (int64_t done; (done = work->num_done.load()) < count;) work->num_done.wait(done);
  return ffi::Error::Success();
}

template <typename T>
Step<T> step_of(const ffi::AnyBuffer& x, const ffi::AnyBuffer& weight, const ffi::AnyBuffer& bias) {
  const auto data = [](const ffi::AnyBuffer& buffer) { return static_cast<const T*>(buffer.untyped_data()); };
  return {.x = data(x),
          .weight = data(weight),
          .bias = bias.element_count() ? data(bias) : nullptr,
          .packed = nullptr,
          .num_tokens = x.dimensions()[0],
          .num_inputs = x.dimensions()[1],
          .num_outputs = weight.dimensions()[0]};
}

ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> out) {
  if (weight.element_type() == ffi::F32) return run(pool, step_of<float>(x, weight, bias), static_cast<float*>(out->untyped_data()));
  if (weight.element_type() != ffi::BF16) return ffi::Error::InvalidArgument("weights must be float32 or bfloat16");
  const Step<Bfloat16> step = step_of<Bfloat16>(x, weight, bias);
  if (out->element_type() == ffi::F32) return run(pool, step, static_cast<float*>(out->untyped_data()));
  return run(pool, step, static_cast<Bfloat16*>(out->untyped_data()));
}

}  // namespace

// What multiplies bfloat16 here: 2 tiles (AMX), 1 dot-product instructions (AVX512-BF16), 0 float32 vectors.
extern "C" int LinearBfloat16Unit() {
#if JAXSERVE_AMX
  if (has_amx()) return 2;
#endif
#if defined(__AVX512BF16__)
  return 1;
#endif
  return 0;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(Linear, linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
