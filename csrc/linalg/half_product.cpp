// Products of bfloat16 matrices with float32 sums, on x86 processors that multiply bfloat16: by AMX
// tiles, or by vectors of pairs (avx512_bf16).
//
// Both factors are packed into tiles of 16 × 16 words. A word is a pair of neighbours along the
// summed dimension: a left tile has 16 rows of 16 pairs, a right one 16 pairs of 16 columns. If the
// summed dimension is dense in memory, the source has the layout of a left tile, else of a right
// one; a transpose of words makes the other. Float32 numbers on the left are rounded to bfloat16,
// as on a GPU.
//
// The summed dimension is split into steps of kDepth, whose tiles stay in the second cache. On
// AMD's processors vectors take half the time of float32 products. On Intel's they took longer, so
// there `fastest` means tiles only. The bits depend on sizes, not on the number of threads.
#include "base/tensors.h"

// gcc before 11 has no intrinsics for tiles, gcc before 10 none for pairs of bfloat16.
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#include <cpuid.h>
#if defined(__GNUC__) && !defined(__clang__)  // gcc 12 warns about its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>

#define FASTKD_VECTORS __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define FASTKD_TILES __attribute__((target("amx-tile,amx-bf16")))
#endif

namespace fastkd {
namespace {

#ifdef FASTKD_VECTORS

constexpr int64_t kDepth = 256, kMostBlock = 512, kLeastBlock = 64, kTasks = 16;

struct alignas(64) Tile {
  uint32_t words[16][16];
};

constexpr struct alignas(64) {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} kEightTiles;

// A factor as ``lines`` of ``size`` numbers along the sum: rows of the left factor, columns of the
// right one.
struct Factor {
  const char* data;
  int64_t lines, size, stride;
  bool dense, left;  // dense: ``stride`` is between lines, else between the numbers of a line
  Type type;

  Factor(const Tensor& x, bool left)
      : data(fastkd::data<char>(x)), lines(x.size(!left)), size(x.size(left)), left(left),
        type(type_of(x)) {
    dense = x.stride(left) == 1 || size == 1;
    stride = dense ? x.stride(!left) : x.stride(left);
  }
};

FASTKD_VECTORS inline __mmask16 first(int64_t count) {
  return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1;
}

FASTKD_VECTORS inline __m512i lanes() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

FASTKD_VECTORS inline void transpose(__m512i* rows) {
  const __m512i lane = lanes();
#pragma GCC unroll 4
  for (int s = 8; s > 0; s /= 2) {
    const __mmask16 odd = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(s));
    const __m512i low = _mm512_mask_add_epi32(lane, odd, lane, _mm512_set1_epi32(16 - s));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(s));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i & s) continue;
      const __m512i upper = rows[i], lower = rows[i + s];
      rows[i] = _mm512_permutex2var_epi32(upper, low, lower);
      rows[i + s] = _mm512_permutex2var_epi32(upper, high, lower);
    }
  }
}

// Interleaves two runs of 16 halves: 0, 16, 1, 17, ...
FASTKD_VECTORS inline __m512i in_pairs(__m512i runs) {
  const __m512i step = _mm512_mullo_epi32(lanes(), _mm512_set1_epi32(1 << 16 | 1));
  return _mm512_permutexvar_epi16(_mm512_add_epi32(step, _mm512_set1_epi32(16 << 16)), runs);
}

// Loads two runs of 16 numbers as bfloat16, within masks.
template <bool kWide>
FASTKD_VECTORS inline __m512i load(const char* x, const char* y, __mmask16 some, __mmask16 more) {
  if constexpr (kWide) {
    const __m512 a = _mm512_maskz_loadu_ps(some, x), b = _mm512_maskz_loadu_ps(more, y);
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
  } else {
    const __m512i run = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(some, x));
    return _mm512_inserti64x4(run, _mm256_maskz_loadu_epi16(more, y), 1);
  }
}

// Packs a tile of 16 lines and 32 numbers of the sum, with zeros from ``end`` on; a whole tile has
// none. Properties of the factor are template arguments: that halves the time.
template <bool kWide, bool kDense, bool kTurned, bool kWhole>
FASTKD_VECTORS void pack(const Factor& of, int64_t line, int64_t k, int64_t end, Tile& tile) {
  constexpr int64_t kSize = kWide ? 4 : 2;
  const int64_t row = kDense ? line : k, column = kDense ? k : line;
  const int64_t height = (kDense ? of.lines : end) - row;
  const int64_t width = (kDense ? end : of.lines) - column;
  const char* x = of.data + (row * of.stride + column) * kSize;
  const int64_t other = kSize * (kDense ? 16 : of.stride);
  const int64_t next = kSize * of.stride * (kDense ? 1 : 2);
  __m512i rows[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r, x += next) {
    __mmask16 some = 0xffff, more = 0xffff;
    if constexpr (!kWhole) {
      some = first((kDense ? r : 2 * r) < height ? width : 0);
      more = kDense ? first(r < height ? width - 16 : 0) : first(2 * r + 1 < height ? width : 0);
    }
    rows[r] = load<kWide>(x, x + other, some, more);
    if constexpr (!kDense) rows[r] = in_pairs(rows[r]);
  }
  if constexpr (kTurned) transpose(rows);
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) _mm512_store_si512(tile.words[r], rows[r]);
}

using Pack = void (*)(const Factor&, int64_t line, int64_t k, int64_t end, Tile&);

template <bool kWide, bool kDense>
Pack pack_of(bool turned, bool whole) {
  if (turned) return whole ? pack<kWide, kDense, true, true> : pack<kWide, kDense, true, false>;
  return whole ? pack<kWide, kDense, false, true> : pack<kWide, kDense, false, false>;
}
Pack pack_of(const Factor& of, bool whole) {
  const bool turned = of.dense != of.left;
  if (of.type == Type::kFloat) {
    return of.dense ? pack_of<true, true>(turned, whole) : pack_of<true, false>(turned, whole);
  }
  return of.dense ? pack_of<false, true>(turned, whole) : pack_of<false, false>(turned, whole);
}

// Memory to prefetch: rows of ``lines`` cache lines each, ``stride`` bytes apart.
struct Lines {
  const char* row = nullptr;
  int64_t rows = 0, lines = 0, stride = 0, line = 0;

  int64_t share(int64_t shares) const { return (rows * lines + shares - 1) / shares; }
  template <bool kToWrite>
  void fetch(int64_t most) {
    for (; most > 0 && rows > 0; --most) {
      __builtin_prefetch(row + 64 * line, kToWrite, 2);
      if (++line == lines) line = 0, row += stride, --rows;
    }
  }
};

// Prefetches into the second cache while tiles are multiplied: the next step's part of both
// factors, and the memory this product is written to. Hardware does not prefetch that many rows. A
// few lines at a time, since a processor has few outstanding loads.
struct Ahead {
  Lines left, right, sums;
  int64_t of_left, of_right, of_sums = 0;

  Ahead(const Lines& left, const Lines& right, int64_t calls)
      : left(left), right(right), of_left(left.share(calls)), of_right(right.share(calls)) {}
  void write(const Lines& to, int64_t calls) { sums = to, of_sums = to.share(calls); }
  void fetch() {
    left.fetch<false>(of_left);
    right.fetch<false>(of_right);
    sums.fetch<true>(of_sums);
  }
};

// Number of calls of `Ahead::fetch` in a product of ``depth`` tiles.
constexpr int64_t calls(int64_t depth) { return 4 * depth; }

// sums (2 × 2 tiles) = two tiles of rows times two tiles of columns, over ``depth`` tiles, by AMX.
FASTKD_TILES void multiply_tiles(const Tile* a, const Tile* b, int64_t depth, Ahead& ahead,
                                 Tile* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < depth; ++k) {
    _tile_loadd(4, a + k, 64);
    _tile_loadd(5, a + depth + k, 64);
    _tile_loadd(6, b + k, 64);
    _tile_loadd(7, b + depth + k, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    for (int64_t n = 0; n < calls(1); ++n) ahead.fetch();
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 1, 64);
  _tile_stored(2, sums + 2, 64);
  _tile_stored(3, sums + 3, 64);
}

// The same by vectors, eight rows at a time, so that their sums (two vectors each) stay in
// registers. Only ``rows`` rows and ``words`` words of the sum are computed.
FASTKD_VECTORS void multiply_vectors(const Tile* a, const Tile* b, int64_t depth, int64_t rows,
                                     int64_t words, Ahead& ahead, Tile* sums) {
  constexpr int kRows = 8;
  for (int side = 0; side < 2; ++side) {
    for (int top = 0; top < 16 && 16 * side + top < rows; top += kRows) {
      __m512 found[kRows][2] = {};
      for (int64_t k = 0; k < depth; ++k) {
        const auto *left = &a[side * depth + k].words[top], *right = b[k].words;
        const auto* const more = b[depth + k].words;
        const int64_t here = std::min<int64_t>(16, words - 16 * k);
        ahead.fetch();
        for (int64_t word = 0; word < here; ++word) {
          const __m512bh x = (__m512bh)_mm512_load_si512(right[word]);
          const __m512bh y = (__m512bh)_mm512_load_si512(more[word]);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(int(left[r][word]));
            found[r][0] = _mm512_dpbf16_ps(found[r][0], pair, x);
            found[r][1] = _mm512_dpbf16_ps(found[r][1], pair, y);
          }
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int half = 0; half < 2; ++half) {
          _mm512_store_ps(sums[2 * side + half].words[top + r], found[r][half]);
        }
      }
    }
  }
}

bool has_vectors() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq");
}

bool find_tiles() {
  constexpr unsigned kBits = 1 << 22 | 1 << 24;  // of bfloat16 in tiles, and of tiles
  constexpr long kAskForState = 0x1023, kTileData = 18;
  unsigned a, b, c, d = 0;
  const bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBits) == kBits;
  // Packing uses avx512_bf16. Linux enables tiles for processes that request them.
  return has && has_vectors() && syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

bool has_tiles() {
  static const bool found = find_tiles();
  return found;
}

// A step of a task: numbers k to ``last`` of a slice of the sum that ends at ``end``, for one block
// of ``out``.
struct Step {
  int64_t task, row, column, part, k, last, end;
};

struct Product {
  Factor a, b;
  float* out;  // (slices, rows, columns), one slice of the sum each
  int64_t stride, slice_stride, slices, slice;
  bool add;
  uint16_t* halves = nullptr;  // bfloat16 output, instead of ``out``
  bool by_tiles = true;
  int64_t block = kMostBlock, most = kDepth;

  int64_t tasks() const { return blocks(a) * blocks(b) * slices; }
  int64_t blocks(const Factor& of) const { return (of.lines + block - 1) / block; }

  int64_t room(const Factor& of) const {
    const int64_t depth = (std::min(most, of.size) + 31) / 32;
    return (std::min(block, of.lines) + 31) / 32 * 2 * depth;
  }

  // Packs the tiles of a block, in the order of memory. Returns the number of lines, a multiple of
  // 32.
  FASTKD_VECTORS int64_t pack_block(const Factor& of, int64_t line, int64_t k, int64_t end,
                                    Tile* tiles) const {
    const int64_t lines = (std::min(block, of.lines - line) + 31) / 32 * 2;
    const int64_t depth = (end - k + 31) / 32, outer = of.dense ? lines : depth;
    const Pack packs[] = {pack_of(of, false), pack_of(of, true)};
    for (int64_t n = 0; n < lines * depth; ++n) {
      const int64_t inner = lines * depth / outer, i = of.dense ? n / inner : n % inner;
      const int64_t j = of.dense ? n % inner : n / inner;
      const int64_t at = line + 16 * i, begin = k + 32 * j;
      const bool whole = at + 16 <= of.lines && begin + 32 <= end;
      packs[whole](of, at, begin, end, tiles[i * depth + j]);
    }
    return 16 * lines;
  }

  // Stores 32 × 32 sums at a row and column, plus the previous ones if kAdds, as float32 or
  // rounded.
  template <bool kAdds, bool kNarrow>
  FASTKD_VECTORS void write(const Tile* sums, int64_t row, int64_t column, float* wide,
                            int64_t wide_stride, uint16_t* narrow) const {
    const __mmask16 left = first(b.lines - column), right = first(b.lines - column - 16);
    for (int64_t r = 0; r < std::min<int64_t>(32, a.lines - row); ++r, wide += wide_stride) {
      __m512 x = _mm512_load_ps(sums[r / 16 * 2].words[r % 16]);
      __m512 y = _mm512_load_ps(sums[r / 16 * 2 + 1].words[r % 16]);
      if constexpr (kAdds) {
        x = _mm512_add_ps(_mm512_maskz_loadu_ps(left, wide), x);
        y = _mm512_add_ps(_mm512_maskz_loadu_ps(right, wide + 16), y);
      }
      if constexpr (kNarrow) {
        const __mmask32 both = __mmask32(right) << 16 | left;
        _mm512_mask_storeu_epi16(narrow + r * stride, both, (__m512i)_mm512_cvtne2ps_pbh(y, x));
      } else {
        _mm512_mask_storeu_ps(wide, left, x);
        _mm512_mask_storeu_ps(wide + 16, right, y);
      }
    }
  }

  Step first_step(int64_t task) const {
    const int64_t place = task / slices, part = task % slices, k = part * slice;
    const int64_t end = std::min(a.size, k + slice);
    return {task, place / blocks(b) * block, place % blocks(b) * block, part, k,
            std::min(end, k + most), end};
  }
  Step after(const Step& step) const {
    if (step.last == step.end) return first_step(step.task + 1);
    Step next = step;
    next.k = step.last;
    next.last = std::min(step.end, next.k + most);
    return next;
  }

  // The memory of a factor that a step packs.
  Lines packed(const Factor& of, int64_t line, const Step& step) const {
    const int64_t lines = std::min(block, of.lines - line), numbers = step.last - step.k;
    const int64_t size = size_of(of.type), rows = of.dense ? lines : numbers;
    const int64_t start = of.dense ? line * of.stride + step.k : step.k * of.stride + line;
    const int64_t bytes = (of.dense ? numbers : lines) * size;
    return {of.data + start * size, rows, (bytes + 63) / 64, of.stride * size};
  }

  void run(const Step& step, const Step* next, Tile* tiles, float* room_for_sums) const {
    Tile* const right = tiles + room(a);
    const int64_t row = step.row, column = step.column, depth = (step.last - step.k + 31) / 32;
    const int64_t rows = pack_block(a, row, step.k, step.last, tiles);
    const int64_t columns = pack_block(b, column, step.k, step.last, right);
    const int64_t words = (step.last - step.k + 1) / 2, products = rows / 32 * (columns / 32);
    Ahead ahead(next ? packed(a, next->row, *next) : Lines{},
                next ? packed(b, next->column, *next) : Lines{}, products * calls(depth));
    const bool begins = step.k == step.part * slice, ends = step.last == step.end;
    // Compilers do not know that AMX loads read the tiles.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    for (int64_t n = 0; n < products; ++n) {
      const int64_t i = n / (columns / 32) * 32, j = n % (columns / 32) * 32;
      const int64_t place = step.part * slice_stride + (row + i) * stride + column + j;
      uint16_t* const narrow = halves && ends ? halves + place : nullptr;
      float* const wide = halves ? room_for_sums + i * block + j : out + place;
      if (narrow || !halves) {
        const int64_t size = narrow ? sizeof(*narrow) : sizeof(*wide);
        const int64_t bytes = std::min<int64_t>(32, b.lines - column - j) * size;
        ahead.write({narrow ? (char*)narrow : (char*)wide,
                     std::min<int64_t>(32, a.lines - row - i), (bytes + 63) / 64, stride * size},
                    calls(depth));
      }
      Tile sums[4];
      const Tile *of_rows = tiles + i / 16 * depth, *of_columns = right + j / 16 * depth;
      if (by_tiles) {
        multiply_tiles(of_rows, of_columns, depth, ahead, sums);
      } else {
        multiply_vectors(of_rows, of_columns, depth, a.lines - row - i, words, ahead, sums);
      }
      const bool adds = !begins || (add && !halves);
      const auto put = narrow ? (adds ? &Product::write<true, true> : &Product::write<false, true>)
                              : (adds ? &Product::write<true, false> : &Product::write<false, false>);
      (this->*put)(sums, row + i, column + j, wide, halves ? block : stride, narrow);
    }
  }

  FASTKD_TILES static void configure() { _tile_loadconfig(&kEightTiles); }
  FASTKD_TILES static void release() { _tile_release(); }

  void run(int64_t begin, int64_t end) const {
    const std::unique_ptr<Tile[]> tiles(new Tile[room(a) + room(b)]);
    const std::unique_ptr<float[]> sums(new float[halves && slice > most ? block * block : 0]);
    if (by_tiles) configure();
    for (Step step = first_step(begin), next; step.task < end; step = next) {
      next = after(step);
      run(step, next.task < end ? &next : nullptr, tiles.get(), sums.get());
    }
    if (by_tiles) release();
  }
};

Tensor with_dense_lines(const Tensor& x) {
  return x.stride(0) == 1 || x.stride(1) == 1 ? x : torch::stable::contiguous(x);
}

void multiply(const Tensor& out, const Tensor& left, const Tensor& right, bool add, bool by_tiles) {
  const Tensor a = with_dense_lines(left), b = with_dense_lines(right);
  const int64_t size = a.size(1), rows = a.size(0), columns = b.size(1);
  Product of{{a, true}, {b, false}, data<float>(out), out.stride(0), 0, 1, size, add};
  of.by_tiles = by_tiles;
  if (type_of(out) == Type::kBFloat16) {
    of.halves = data<uint16_t>(out);
    // Sums that are complete after one step need no float32 buffer.
    if (size > kDepth) of.block /= 2, of.most *= 2;
  }
  if (of.tasks() == 0) return;
  // Enough tasks for threads: first slices of a long sum, while adding them costs less than packing
  // the factors, then smaller blocks.
  const int64_t least = std::max(4 * std::min(rows, columns), kDepth);
  const int64_t slices = of.halves ? 1 : std::min(kTasks / of.tasks(), size / least);
  if (slices > 1) of.slice = ((size + slices - 1) / slices + kDepth - 1) / kDepth * kDepth;
  of.slices = (size + of.slice - 1) / of.slice;
  while (of.block > kLeastBlock && of.tasks() < kTasks) of.block /= 2;
  const auto run = [&](int64_t begin, int64_t end) { of.run(begin, end); };
  if (of.slices == 1) return parallel_for(0, of.tasks(), 1, run);
  const Tensor parts = torch::stable::new_empty(out, {of.slices, rows, columns});
  of.out = data<float>(parts), of.stride = columns, of.slice_stride = rows * columns;
  of.add = false;
  parallel_for(0, of.tasks(), 1, run);
  each_row(rows, 4 * of.slices * columns, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* to = data<float>(out) + row * out.stride(0);
      for (int64_t part = 0; part < of.slices; ++part) {
        const float* from = of.out + part * of.slice_stride + row * columns;
        const bool adds = add || part > 0;
        for (int64_t j = 0; j < columns; ++j) to[j] = adds ? to[j] + from[j] : from[j];
      }
    }
  });
}

#else

bool has_tiles() { return false; }
bool has_vectors() { return false; }
void multiply(const Tensor&, const Tensor&, const Tensor&, bool, bool) {}

#endif

// Whether a ``unit`` multiplies bfloat16 here: "tiles", "vectors", or "fastest", the faster one of
// these if it is faster than float32 products.
bool has_half_product(const std::string& unit) {
  if (unit == "tiles") return has_tiles();
  if (unit == "vectors") return has_vectors();
  STD_TORCH_CHECK(unit == "fastest", "unit: must be fastest, tiles or vectors, got ", unit);
#ifdef FASTKD_VECTORS
  return has_tiles() || (has_vectors() && __builtin_cpu_is("amd"));
#else
  return false;
#endif
}

}  // namespace

void half_product(const Tensor& out, const Tensor& a, const Tensor& b, bool add,
                  const std::string& unit) {
  STD_TORCH_CHECK(has_half_product(unit), "this processor does not multiply bfloat16");
  const bool rounds = out.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(!add || !rounds, "sums are of float32");
  const bool wide = a.scalar_type() == ScalarType::Float;
  const ScalarType type = wide ? ScalarType::Float : ScalarType::BFloat16;
  check(a, "a", type, {kAnySize, kAnySize}, Strides::kAny);
  check(b, "b", ScalarType::BFloat16, {a.size(1), kAnySize}, Strides::kAny);
  check(out, "out", rounds ? ScalarType::BFloat16 : ScalarType::Float, {a.size(0), b.size(1)},
        Strides::kWritten);
  if (a.size(1) > 0) {
    multiply(out, a, b, add, unit != "vectors" && has_tiles());
  } else if (!add) {
    Tensor zeros = out;
    torch::stable::fill_(zeros, 0);
  }
}

}  // namespace fastkd

FASTKD_OPERATOR(half_product,
    "(Tensor(a!) out, Tensor a, Tensor b, bool add, str unit='fastest') -> ()")

STABLE_TORCH_LIBRARY_FRAGMENT(fastkd_cpp, m) {
  m.def("has_half_product(str unit='fastest') -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fastkd_cpp, CompositeExplicitAutograd, m) {
  m.impl("has_half_product", TORCH_BOX(&fastkd::has_half_product));
}
