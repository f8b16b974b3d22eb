// Attention of a step's ragged tokens over KV pages, for CPUs. The rules are those of api.py; reference.py is the oracle.
//
// The work is a list of items. An item is one row, one kv head and a block of "queries": the row's tokens times the G heads
// that share the kv head, numbered token * G + head. An item walks the KV tiles that its queries can see with an online softmax
// in float32. Blocks of many queries (prefill) hold queries in the vector lanes; blocks of few (decode) hold the head dim there.
// The keys of a row that is one block are split among several items, so that one long row keeps all threads busy; who finishes
// last adds their sums up (flash-decoding). Where a split lies follows from positions alone, so a row's bits do not depend on its
// batch. Threads of XLA's own pool take items from the list. Written with compiler vectors, so that one source serves AVX-512, AVX2,
// SSE and NEON. No fast-math: NaN in what a token sees must reach its output, and nowhere else.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRowsAtOnce = 8;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRowsAtOnce = 4;
#else
constexpr int kLanes = 4, kRowsAtOnce = 4;
#endif
constexpr int kMaxVecs = 3;  // vectors in a block of queries: kRowsAtOnce * kMaxVecs sums stay in registers
constexpr int kMaxQueries = kMaxVecs * kLanes;
constexpr int kFewQueries = kLanes / 2;  // up to here a dot product for each query costs less than a lane for each
constexpr int kTile = 64;                // keys at once
constexpr int kSplit = 1024;             // keys of an item, where its row is split
static_assert(kSplit % kTile == 0);
static_assert(kTile % kLanes == 0 && kLanes % kRowsAtOnce == 0);
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t ShortVec __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint8_t ByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef int8_t SignedByteVec __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Int8 {
  int8_t bits;
};
struct Float8 {  // e4m3fn: 4 bits of exponent around 7, 3 of mantissa, NaN but no infinity
  uint8_t bits;
};
template <typename T>
constexpr bool kHasScales = sizeof(T) == 1;

inline Vec splat(float x) { return x - Vec{}; }
inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline Vec load(const Bfloat16* p) {
  const ShortVec bits = *reinterpret_cast<const ShortVec*>(p);
  return reinterpret_cast<Vec>(__builtin_convertvector(bits, WordVec) << 16);
}
// By hand: not every compiler has _Float16. Subnormals go through an integer, because XLA's threads flush subnormal floats.
inline Vec load(const Float16* p) {
  const WordVec word = __builtin_convertvector(*reinterpret_cast<const ShortVec*>(p), WordVec);
  const WordVec exponent = word & 0x7c00, magnitude = word & 0x7fff;
  const WordVec rebias = WordVec{} + (112u << 23);  // from an exponent around 15 to one around 127
  const Vec normal = reinterpret_cast<Vec>((magnitude << 13) + rebias + (exponent == 0x7c00 ? rebias : WordVec{}));
  const Vec subnormal = __builtin_convertvector(reinterpret_cast<IntVec>(magnitude), Vec) * splat(0x1p-24f);
  const Vec absolute = exponent == 0 ? subnormal : normal;
  return reinterpret_cast<Vec>(reinterpret_cast<WordVec>(absolute) | ((word & 0x8000) << 16));
}
inline Vec load(const Int8* p) { return __builtin_convertvector(*reinterpret_cast<const SignedByteVec*>(p), Vec); }
inline Vec load(const Float8* p) {
  const WordVec word = __builtin_convertvector(*reinterpret_cast<const ByteVec*>(p), WordVec);
  const WordVec magnitude = word & 0x7f;
  const Vec normal = reinterpret_cast<Vec>((magnitude << 20) + (120u << 23));
  const Vec subnormal = __builtin_convertvector(reinterpret_cast<IntVec>(magnitude), Vec) * splat(0x1p-9f);
  const Vec absolute = magnitude < 8 ? subnormal : magnitude == 0x7f ? splat(std::numeric_limits<float>::quiet_NaN()) : normal;
  return reinterpret_cast<Vec>(reinterpret_cast<WordVec>(absolute) | ((word & 0x80) << 24));
}
inline void store(float* p, Vec v) { *reinterpret_cast<UnalignedVec*>(p) = v; }

// The first `count` lanes from memory, 0 in the others.
template <typename T>
inline Vec load_part(const T* p, int64_t count) {
  T values[kLanes] = {};
  std::copy_n(p, count, values);
  return load(values);
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// e^x for x <= 80, relative error 2e-7 (Cephes' expf): 2^n times a polynomial on [-ln2/2, ln2/2]. Below -87 it is 0.
inline Vec exponential(Vec x) {
  const IntVec is_tiny = x < splat(-87.0f);
  x = is_tiny ? Vec{} : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * splat(1.44269504f) + magic) - magic;
  const Vec r = (x - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
  Vec p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  p = p * reinterpret_cast<Vec>(exponent);
  return is_tiny ? Vec{} : p;
}

inline Vec soft_capped(Vec score, float cap) {
  Vec x = score / splat(cap);
  x = x > splat(15.0f) ? splat(15.0f) : x;  // tanh is 1 there; keeps exponential in range
  x = x < splat(-15.0f) ? splat(-15.0f) : x;
  return splat(cap) * (splat(1.0f) - splat(2.0f) / (exponential(x + x) + splat(1.0f)));
}

// One vector whose lane i is the sum of all lanes of v[i]: a tree that halves the number of vectors, one index bit at a time.
template <int kBit, int... I>
inline Vec merge_sums(Vec a, Vec b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  const Vec own = __builtin_shufflevector(a, b, ((I & kBit) ? kLanes + I : I)...);
  const Vec other = __builtin_shufflevector(a, b, ((I & kBit) ? kLanes + (I ^ kBit) : (I ^ kBit))...);
#else
  const Vec own = __builtin_shuffle(a, b, IntVec{((I & kBit) ? kLanes + I : I)...});
  const Vec other = __builtin_shuffle(a, b, IntVec{((I & kBit) ? kLanes + (I ^ kBit) : (I ^ kBit))...});
#endif
  return own + other;
}
template <int kBit = 1>
inline Vec sum_each(Vec* v) {
  if constexpr (kBit == kLanes) {
    return v[0];
  } else {
    for (int i = 0; i < kLanes / (2 * kBit); ++i) {
      v[i] = merge_sums<kBit>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, kLanes>());
    }
    return sum_each<2 * kBit>(v);
  }
}

// c[i, :] += sum over k of a[i * a_row + k * a_k] * b[k, :], for kRows rows and kVecs vectors of columns.
template <int kRows, int kVecs>
inline void multiply_tile(float* c, int c_stride, const float* a, int a_row, int a_k, const float* b, int b_stride, int num_k) {
  Vec sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) sum[i][j] = load(c + i * c_stride + j * kLanes);
  for (int k = 0; k < num_k; ++k) {
    Vec column[kVecs];
    for (int j = 0; j < kVecs; ++j) column[j] = load(b + k * b_stride + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const Vec factor = splat(a[i * a_row + k * a_k]);
      for (int j = 0; j < kVecs; ++j) sum[i][j] += factor * column[j];
    }
  }
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVecs; ++j) store(c + i * c_stride + j * kLanes, sum[i][j]);
}

// The call's arguments in plain form. Strides are in elements.
template <typename T>
struct Step {
  const float* q;
  const T* pages;
  const float* scales;  // of 8-bit pages: one for each vector
  const int32_t* page_tables;
  const int32_t* row_start;  // unused in decode
  const int32_t* kv_length;
  const int32_t* position;
  const float* sinks;  // null: none
  float* out;
  int64_t num_parts, num_heads, num_kv_heads, group, head_dim, page_size, max_pages;
  float scale, soft_cap;  // soft_cap 0: none
  int32_t window, chunk;  // 0: none

  int32_t first_visible(int32_t at) const { return window ? std::max(0, at - window + 1) : chunk ? at / chunk * chunk : 0; }
};

struct Item {
  int32_t row, kv_head;
  int32_t first_token;         // the row's first token in the step
  int32_t first_query, count;  // of the row's tokens x group
  int32_t first_key, end_key;  // what it walks
  int32_t split = -1;          // the index of its `Split`, where others walk the rest of the keys
  int32_t part = 0;            // which part of that
};

// Items that share their queries. Each leaves a record of every query: largest score, sum of weights, weighted sum of values.
struct Split {
  int64_t offset;  // of the first record
  int32_t num_parts, num_left;
};

// Scratch memory of one thread, kept between calls.
struct Scratch {
  std::vector<float> q, k, v, scores, out;
  void resize(int padded_dim) {
    const auto grow = [](std::vector<float>& a, size_t size) {
      if (a.size() < size) a.resize(size);
    };
    grow(q, size_t{kMaxQueries} * padded_dim);
    grow(out, size_t{kMaxQueries} * padded_dim);
    grow(k, size_t{kTile} * padded_dim);
    grow(v, size_t{kTile} * padded_dim);
    grow(scores, size_t{kTile} * kMaxQueries);
  }
};

// Walks the keys of one item.
template <typename T>
class Walk {
 public:
  // `next` is the item that this thread will walk afterwards. `records` takes what the item leaves, if its row is split.
  Walk(const Step<T>& step, const Item& item, const Item& next, float* records, Scratch& scratch)
      : step_(step),
        item_(item),
        next_(next),
        records_(records),
        s_(scratch),
        padded_dim_((static_cast<int>(step.head_dim) + kLanes - 1) / kLanes * kLanes),
        begin_(item.first_key),
        end_(item.end_key) {
    s_.resize(padded_dim_);
    for (int i = 0; i < kMaxQueries; ++i) {
      last_[i] = first_[i] = -1;
      if (i >= item.count) continue;
      const int32_t position = step.position[token(i)];
      last_[i] = std::min(position, step.kv_length[item.row] - 1);
      first_[i] = step.first_visible(position);
    }
  }

  void run() {
    if (item_.count <= kFewQueries) return few();
    if (item_.count <= kLanes) return many<1>();
    if (item_.count <= 2 * kLanes) return many<2>();
    many<3>();
  }

 private:
  int64_t token(int i) const { return item_.first_token + (item_.first_query + i) / step_.group; }
  int64_t head(int i) const { return item_.kv_head * step_.group + (item_.first_query + i) % step_.group; }
  int64_t query_offset(int i) const { return (token(i) * step_.num_heads + head(i)) * step_.head_dim; }

  // Which of all vectors of the pages is the key (which = 0) or value (1) of one position of an item's row, and how many more
  // follow it in the same page.
  std::pair<int64_t, int32_t> place(const Item& item, int which, int32_t at) const {
    const int32_t page_size = step_.page_size, offset = at % page_size;
    const int64_t page = step_.page_tables[item.row * step_.max_pages + at / page_size];
    const int64_t part = std::min<int64_t>(which, step_.num_parts - 1);  // with one part, keys are the values too
    const int64_t index = ((page * step_.num_parts + part) * step_.num_kv_heads + item.kv_head) * page_size + offset;
    return {index, page_size - offset};
  }

  // Fills `to` with positions [from, from + count), converted; 0 outside [begin_, end_), so that neither a page nobody may read nor
  // the unwritten rest of a page is touched. Head dims are padded with 0.
  void load_keys(int which, int32_t from, int count, float* to) const {
    const int64_t dim = step_.head_dim;
    const int32_t begin = std::clamp(begin_, from, from + count), end = std::clamp(end_, from, from + count);
    std::fill(to, to + int64_t{begin - from} * padded_dim_, 0.0f);
    for (int32_t at = begin; at < end;) {
      auto [index, run] = place(item_, which, at);
      run = std::min(run, end - at);
      for (int32_t i = 0; i < run; ++i, ++index) {
        const T* source = step_.pages + index * dim;
        Vec scale = splat(1.0f);
        if constexpr (kHasScales<T>) scale = splat(step_.scales[index]);
        const auto scaled = [&](Vec v) { return kHasScales<T> ? v * scale : v; };
        float* target = to + int64_t{at + i - from} * padded_dim_;
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) store(target + d, scaled(load(source + d)));
        if (d < dim) store(target + d, scaled(load_part(source + d, dim - d)));
      }
      at += run;
    }
    std::fill(to + int64_t{end - from} * padded_dim_, to + int64_t{count} * padded_dim_, 0.0f);
  }

  // Asks the memory for what load_keys will read later. Decode waits for memory most of the time, and hardware does not see the
  // next page coming.
  // Inlined always: GCC takes a function of prefetches for one without effect, and drops calls of it.
  __attribute__((always_inline)) inline void prefetch_keys(const Item& item, int which, int32_t from, int count) const {
    const int32_t end = std::min(from + count, step_.kv_length[item.row]);
    for (int32_t at = from; at < end;) {
      auto [index, run] = place(item, which, at);
      run = std::min(run, end - at);
      const char* first = reinterpret_cast<const char*>(step_.pages + index * step_.head_dim);
      for (int64_t i = 0; i < run * step_.head_dim * static_cast<int64_t>(sizeof(T)); i += 64) __builtin_prefetch(first + i);
      at += run;
    }
  }

  // Few queries: [query][dim] vectors, a dot product for each key.
  void few() {
    const int count = item_.count, dim = padded_dim_;
    float peak[kFewQueries], total[kFewQueries];
    std::fill(s_.out.begin(), s_.out.begin() + count * dim, 0.0f);
    for (int i = 0; i < count; ++i) {
      float* q = s_.q.data() + i * dim;
      std::copy_n(step_.q + query_offset(i), step_.head_dim, q);
      std::fill(q + step_.head_dim, q + dim, 0.0f);
      peak[i] = has_sinks() ? step_.sinks[head(i)] : -kInfinity;
      total[i] = has_sinks() ? 1.0f : 0.0f;
    }
    for (int32_t tile = begin_ / kTile * kTile; tile < end_; tile += kTile) {
      const int num_keys = (std::min(tile + kTile, end_) - tile + kLanes - 1) / kLanes * kLanes;
      const bool is_last = tile + kTile >= end_;
      for (int t = 0; t < num_keys; t += kLanes) {
        prefetch_keys(item_, 1, tile + t, kLanes);
        load_keys(0, tile + t, kLanes, s_.k.data());
        for (int i = 0; i < count; ++i) few_scores(i, tile + t, s_.scores.data() + i * kTile + t);
      }
      for (int i = 0; i < count; ++i) few_softmax(i, num_keys, peak[i], total[i]);
      for (int t = 0; t < num_keys; t += kLanes) {
        prefetch_keys(is_last ? next_ : item_, 0, (is_last ? next_.first_key : tile + kTile) + t, kLanes);
        load_keys(1, tile + t, kLanes, s_.v.data());
        for (int i = 0; i < count; i += 4) few_values(i, std::min(4, count - i), t);
      }
    }
    for (int i = 0; i < count; ++i) finish(i, peak[i], total[i], s_.out.data() + i * dim, 1);
  }

  // Scores of one query against the kLanes keys in s_.k, the first of which is at position `from`.
  void few_scores(int i, int32_t from, float* scores) const {
    const int dim = padded_dim_;
    const float* q = s_.q.data() + i * dim;
    Vec sum[kLanes] = {};
    for (int d = 0; d < dim; d += kLanes) {
      const Vec factor = load(q + d);
      for (int j = 0; j < kLanes; ++j) sum[j] += factor * load(s_.k.data() + j * dim + d);
    }
    Vec score = sum_each(sum) * splat(step_.scale);
    if (step_.soft_cap != 0.0f) score = soft_capped(score, step_.soft_cap);
    IntVec at;
    for (int j = 0; j < kLanes; ++j) at[j] = from + j;
    store(scores, (at >= first_[i]) & (at <= last_[i]) ? score : splat(-kInfinity));
  }

  // Takes a tile's scores of one query into its running softmax and leaves weights in their place.
  void few_softmax(int i, int num_keys, float& peak, float& total) {
    float* scores = s_.scores.data() + i * kTile;
    Vec highest = splat(peak);
    for (int t = 0; t < num_keys; t += kLanes) highest = larger(load(scores + t), highest);
    float new_peak = peak;
    for (int j = 0; j < kLanes; ++j) new_peak = std::max(new_peak, highest[j]);
    const float shift = new_peak == -kInfinity ? 0.0f : new_peak;
    const Vec decay = exponential(splat(peak - shift));
    Vec sum = {};
    for (int t = 0; t < num_keys; t += kLanes) {
      const Vec weight = exponential(load(scores + t) - splat(shift));
      store(scores + t, weight);
      sum += weight;
    }
    float added = 0.0f;
    for (int j = 0; j < kLanes; ++j) added += sum[j];
    total = total * decay[0] + added;
    peak = new_peak;
    float* out = s_.out.data() + i * padded_dim_;
    for (int d = 0; d < padded_dim_; d += kLanes) store(out + d, load(out + d) * decay);
  }

  // Adds the kLanes values in s_.v, with the weights of the tile's keys t and following, to the outputs of queries [i, i + count).
  void few_values(int i, int count, int t) {
    const auto rows = [&](auto num_rows) {
      constexpr int kRows = decltype(num_rows)::value;
      const int dim = padded_dim_;
      const float* weights = s_.scores.data() + i * kTile + t;
      float* out = s_.out.data() + i * dim;
      int d = 0;
      for (; d + 4 * kLanes <= dim; d += 4 * kLanes) multiply_tile<kRows, 4>(out + d, dim, weights, kTile, 1, s_.v.data() + d, dim, kLanes);
      for (; d < dim; d += kLanes) multiply_tile<kRows, 1>(out + d, dim, weights, kTile, 1, s_.v.data() + d, dim, kLanes);
    };
    if (count == 1) rows(std::integral_constant<int, 1>());
    if (count == 2) rows(std::integral_constant<int, 2>());
    if (count == 3) rows(std::integral_constant<int, 3>());
    if (count == 4) rows(std::integral_constant<int, 4>());
  }

  // Many queries, one in each lane: q, scores and out are transposed, [dim or key][query], so the softmax needs no sum over lanes.
  template <int kVecs>
  void many() {
    constexpr int kWidth = kVecs * kLanes;
    const int dim = padded_dim_;
    Vec peak[kVecs], total[kVecs];
    IntVec first[kVecs], last[kVecs];
    std::fill(s_.q.begin(), s_.q.begin() + dim * kWidth, 0.0f);
    std::fill(s_.out.begin(), s_.out.begin() + dim * kWidth, 0.0f);
    for (int i = 0; i < kWidth; ++i) {
      const bool has_sink = has_sinks() && i < item_.count;
      peak[i / kLanes][i % kLanes] = has_sink ? step_.sinks[head(i)] : -kInfinity;
      total[i / kLanes][i % kLanes] = has_sink ? 1.0f : 0.0f;
      first[i / kLanes][i % kLanes] = first_[i];
      last[i / kLanes][i % kLanes] = last_[i];
      if (i >= item_.count) continue;
      const float* q = step_.q + query_offset(i);
      for (int64_t d = 0; d < step_.head_dim; ++d) s_.q[d * kWidth + i] = q[d];
    }
    for (int32_t tile = begin_ / kTile * kTile; tile < end_; tile += kTile) {
      const int num_keys = (std::min(tile + kTile, end_) - tile + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
      load_keys(0, tile, num_keys, s_.k.data());
      load_keys(1, tile, num_keys, s_.v.data());
      std::fill(s_.scores.begin(), s_.scores.begin() + num_keys * kWidth, 0.0f);
      for (int t = 0; t < num_keys; t += kRowsAtOnce) {
        multiply_tile<kRowsAtOnce, kVecs>(s_.scores.data() + t * kWidth, kWidth, s_.k.data() + t * dim, dim, 1, s_.q.data(), kWidth, dim);
      }
      many_softmax<kVecs>(tile, num_keys, first, last, peak, total);
      for (int d = 0; d < dim; d += kRowsAtOnce) {
        multiply_tile<kRowsAtOnce, kVecs>(s_.out.data() + d * kWidth, kWidth, s_.v.data() + d, 1, dim, s_.scores.data(), kWidth, num_keys);
      }
    }
    for (int i = 0; i < item_.count; ++i) {
      finish(i, peak[i / kLanes][i % kLanes], total[i / kLanes][i % kLanes], s_.out.data() + i, kWidth);
    }
  }

  template <int kVecs>
  void many_softmax(int32_t tile, int num_keys, const IntVec* first, const IntVec* last, Vec* peak, Vec* total) {
    constexpr int kWidth = kVecs * kLanes;
    for (int j = 0; j < kVecs; ++j) {
      Vec highest = peak[j];
      float* scores = s_.scores.data() + j * kLanes;
      for (int t = 0; t < num_keys; ++t) {
        Vec score = load(scores + t * kWidth) * splat(step_.scale);
        if (step_.soft_cap != 0.0f) score = soft_capped(score, step_.soft_cap);
        const IntVec at = IntVec{} + (tile + t);
        score = (at >= first[j]) & (at <= last[j]) ? score : splat(-kInfinity);
        store(scores + t * kWidth, score);
        highest = larger(score, highest);
      }
      const Vec shift = highest == splat(-kInfinity) ? Vec{} : highest;
      const Vec decay = exponential(peak[j] - shift);
      Vec sum = {};
      for (int t = 0; t < num_keys; ++t) {
        const Vec weight = exponential(load(scores + t * kWidth) - shift);
        store(scores + t * kWidth, weight);
        sum += weight;
      }
      total[j] = total[j] * decay + sum;
      peak[j] = highest;
      float* out = s_.out.data() + j * kLanes;
      for (int d = 0; d < padded_dim_; ++d) store(out + d * kWidth, load(out + d * kWidth) * decay);
    }
  }

  // Of a row that is split, one item counts the sinks.
  bool has_sinks() const { return step_.sinks && item_.part == 0; }

  // Writes a query's output, or what the item knows of it.
  void finish(int i, float peak, float total, const float* values, int stride) const {
    if (records_ == nullptr) {
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      float* to = step_.out + query_offset(i);
      for (int64_t d = 0; d < step_.head_dim; ++d) to[d] = values[d * stride] * inverse;
      return;
    }
    float* to = records_ + i * (step_.head_dim + 2);
    *to++ = peak;
    *to++ = total;
    for (int64_t d = 0; d < step_.head_dim; ++d) to[d] = values[d * stride];
  }

  const Step<T>& step_;
  const Item& item_;
  const Item& next_;
  float* const records_;
  Scratch& s_;
  const int padded_dim_;
  const int32_t begin_, end_;                       // keys that the item walks
  int32_t first_[kMaxQueries], last_[kMaxQueries];  // keys that each query sees
};

// The list of items and how far it is. Shared with helpers that may start after the call is over and find nothing left.
template <typename T>
struct Work {
  Step<T> step;
  std::vector<Item> items;
  std::vector<Split> splits;
  int64_t num_records = 0;
  std::unique_ptr<float[]> records;
  std::atomic<int64_t> next{0}, done{0};

  int64_t record_size() const { return step.head_dim + 2; }

  // Adds the items of one block of queries: those that walk its keys.
  void add(Item item, bool may_split) {
    const int32_t first_token = item.first_token + item.first_query / step.group;
    const int32_t last_token = item.first_token + (item.first_query + item.count - 1) / step.group;
    const int32_t begin = step.first_visible(step.position[first_token]);
    const int32_t end = std::min(step.position[last_token], step.kv_length[item.row] - 1) + 1;
    const int32_t num_parts = may_split && end > begin ? (end - 1) / kSplit - begin / kSplit + 1 : 1;
    if (num_parts > 1) {
      item.split = splits.size();
      splits.push_back({num_records * record_size(), num_parts, num_parts});
      num_records += int64_t{num_parts} * item.count;
    }
    for (; item.part < num_parts; ++item.part) {
      const int32_t from = (begin / kSplit + item.part) * kSplit;
      item.first_key = std::max(begin, from);
      item.end_key = num_parts > 1 ? std::min(end, from + kSplit) : end;
      items.push_back(item);
    }
  }

  void walk(const Item& item, const Item& next_item, Scratch& scratch) {
    if (item.split < 0) return Walk<T>(step, item, next_item, nullptr, scratch).run();
    Split& split = splits[item.split];
    float* first = records.get() + split.offset;
    const int64_t size = item.count * record_size();
    Walk<T>(step, item, next_item, first + item.part * size, scratch).run();
    if (__atomic_sub_fetch(&split.num_left, 1, __ATOMIC_ACQ_REL) == 0) merge(item, split.num_parts, first, size);
  }

  // Adds up the parts of a row's keys, in their order whoever finished last.
  void merge(const Item& item, int num_parts, const float* first, int64_t size) {
    for (int i = 0; i < item.count; ++i, first += record_size()) {
      float peak = -kInfinity, total = 0.0f;
      for (int part = 0; part < num_parts; ++part) peak = std::max(peak, first[part * size]);
      const float shift = peak == -kInfinity ? 0.0f : peak;
      const int64_t token = item.first_token + (item.first_query + i) / step.group;
      const int64_t head = item.kv_head * step.group + (item.first_query + i) % step.group;
      float* out = step.out + (token * step.num_heads + head) * step.head_dim;
      std::fill(out, out + step.head_dim, 0.0f);
      for (int part = 0; part < num_parts; ++part) {
        const float* record = first + part * size;
        const float decay = exponential(splat(record[0] - shift))[0];
        total += record[1] * decay;
        for (int64_t d = 0; d < step.head_dim; ++d) out[d] += record[2 + d] * decay;
      }
      const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
      for (int64_t d = 0; d < step.head_dim; ++d) out[d] *= inverse;
    }
  }

  void help() {
    thread_local Scratch scratch;
    const int64_t count = items.size();
    // From the end: the rows with most tokens come last, and long items first balance the threads best.
    for (int64_t i = next.fetch_add(1); i < count;) {
      const int64_t following = next.fetch_add(1);
      const Item& item = items[count - 1 - i];
      walk(item, following < count ? items[count - 1 - following] : item, scratch);
      if (done.fetch_add(1) + 1 == count) done.notify_all();
      i = following;
    }
  }
};

template <typename T>
ffi::Error run(ffi::ThreadPool& pool, const Step<T>& step, int64_t num_rows, bool is_decode) {
  auto work = std::make_shared<Work<T>>();
  work->step = step;
  int64_t cost = 0;
  for (int32_t row = 0; row < num_rows; ++row) {
    const int32_t first_token = is_decode ? row : step.row_start[row];
    const int64_t num_queries = (is_decode ? 1 : step.row_start[row + 1] - first_token) * step.group;
    cost += num_queries * step.kv_length[row];
    for (int32_t query = 0; query < num_queries; query += kMaxQueries) {
      const int32_t count = std::min<int64_t>(kMaxQueries, num_queries - query);
      for (int32_t kv_head = 0; kv_head < step.num_kv_heads; ++kv_head) {
        work->add({row, kv_head, first_token, query, count}, num_queries <= kMaxQueries);
      }
    }
  }
  work->records.reset(new float[work->num_records * work->record_size()]);
  // Waking a thread costs some microseconds: small steps do not.
  constexpr int64_t kWorthAThread = 1 << 18;
  cost *= step.num_kv_heads * step.head_dim;
  const int64_t num_items = work->items.size();
  const int64_t num_helpers = std::min<int64_t>({pool.num_threads() - 1, num_items - 1, cost / kWorthAThread});
  for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule([work] { work->help(); });
  work->help();
  const int64_t count = work->items.size();
  for (int64_t done; (done = work->done.load()) < count;) work->done.wait(done);
  return ffi::Error::Success();
}

using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

template <typename T>
ffi::Error call(ffi::ThreadPool& pool, Floats q, ffi::AnyBuffer pages, Ints page_tables, Ints row_start, Ints kv_length, Ints position,
                Floats sinks, Floats kv_scales, float scale, float soft_cap, int32_t window, int32_t chunk, bool is_decode, float* out) {
  const int64_t num_rows = page_tables.dimensions()[0], num_kv_heads = pages.dimensions()[2];
  const int64_t num_tokens = q.dimensions()[0], num_heads = q.dimensions()[1], head_dim = q.dimensions()[2];
  const Step<T> step{.q = q.typed_data(),
                     .pages = static_cast<const T*>(pages.untyped_data()),
                     .scales = kv_scales.typed_data(),
                     .page_tables = page_tables.typed_data(),
                     .row_start = row_start.typed_data(),
                     .kv_length = kv_length.typed_data(),
                     .position = position.typed_data(),
                     .sinks = sinks.element_count() ? sinks.typed_data() : nullptr,
                     .out = out,
                     .num_parts = pages.dimensions()[1],
                     .num_heads = num_heads,
                     .num_kv_heads = num_kv_heads,
                     .group = num_heads / num_kv_heads,
                     .head_dim = head_dim,
                     .page_size = pages.dimensions()[3],
                     .max_pages = page_tables.dimensions()[1],
                     .scale = scale,
                     .soft_cap = soft_cap,
                     .window = window,
                     .chunk = chunk};
  const int64_t num_real = is_decode ? num_tokens : step.row_start[num_rows];
  std::fill(out + num_real * num_heads * head_dim, out + num_tokens * num_heads * head_dim, 0.0f);
  return run(pool, step, num_rows, is_decode);
}

ffi::Error paged_attention(ffi::ThreadPool pool, Floats q, ffi::AnyBuffer pages, Ints page_tables, Ints row_start, Ints kv_length,
                           Ints position, Floats sinks, Floats kv_scales, float scale, float soft_cap, int32_t window, int32_t chunk,
                           bool is_decode, ffi::ResultBuffer<ffi::F32> out) {
  const auto with = [&](auto element) {
    return call<decltype(element)>(pool, q, pages, page_tables, row_start, kv_length, position, sinks, kv_scales, scale, soft_cap, window,
                                   chunk, is_decode, out->typed_data());
  };
  switch (pages.element_type()) {
    case ffi::F32:
      return with(float{});
    case ffi::BF16:
      return with(Bfloat16{});
    case ffi::F16:
      return with(Float16{});
    case ffi::S8:
      return with(Int8{});
    case ffi::U8:
      return with(Float8{});
    default:
      return ffi::Error::InvalidArgument("pages must be float32, bfloat16, float16, int8 or uint8");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagedAttention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("window")
                                  .Attr<int32_t>("chunk")
                                  .Attr<bool>("is_decode")
                                  .Ret<Floats>());
