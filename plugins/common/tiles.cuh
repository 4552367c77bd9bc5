// How a block multiplies a tile of rows by a tile of columns: with tensor cores (16-bit types) or with plain FMAs.
//
// Both keep this order of additions for every element of the product, whatever the tile's size: the chunks of kChunk
// along the depth each from zero and in ascending order, then the chunks' sums in ascending order. So a row's result
// does not depend on how many rows are computed beside it, bit for bit.
#pragma once

#include <type_traits>

#include "common/dtype.cuh"

#if defined(__CUDACC__)
#include <mma.h>
#endif

namespace tide {

constexpr int kChunk = 256;

// ---- 16 x 16 x 16 on tensor cores, or the same in plain C++ for the emulation ----

#if defined(__CUDACC__)

template <class T>
struct TensorOps {
  using Sum = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;
  static TIDE_DEVICE void clear(Sum& sum) { nvcuda::wmma::fill_fragment(sum, 0.0f); }
  static TIDE_DEVICE void add(Sum& sum, const Sum& other) {
    TIDE_UNROLL
    for (int i = 0; i < sum.num_elements; ++i) sum.x[i] += other.x[i];
  }
  template <int kRows, int kColumns>
  static TIDE_DEVICE void multiply(Sum (&sum)[kRows][kColumns], const T* x, int x_stride, const T* w, int w_stride) {
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> a[kRows];
    TIDE_UNROLL
    for (int i = 0; i < kRows; ++i) wmma::load_matrix_sync(a[i], x + i * 16 * x_stride, x_stride);
    TIDE_UNROLL
    for (int j = 0; j < kColumns; ++j) {
      wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> b;
      wmma::load_matrix_sync(b, w + j * 16, w_stride);
      TIDE_UNROLL
      for (int i = 0; i < kRows; ++i) wmma::mma_sync(sum[i][j], a[i], b, sum[i][j]);
    }
  }
  static TIDE_DEVICE void store(float* out, const Sum& sum, int stride) {
    nvcuda::wmma::store_matrix_sync(out, sum, stride, nvcuda::wmma::mem_row_major);
  }
  static TIDE_DEVICE bool takes_part(int) { return true; }
};

#else

template <class T>
struct TensorOps {
  struct Sum {
    float at[16][16];
  };
  static void clear(Sum& sum) { std::memset(&sum, 0, sizeof(sum)); }
  static void add(Sum& sum, const Sum& other) {
    for (int i = 0; i < 256; ++i) sum.at[i / 16][i % 16] += other.at[i / 16][i % 16];
  }
  template <int kRows, int kColumns>
  static void multiply(Sum (&sum)[kRows][kColumns], const T* x, int x_stride, const T* w, int w_stride) {
    for (int row = 0; row < kRows * 16; ++row) {
      for (int k = 0; k < 16; ++k) {
        const float a = to_float(x[row * x_stride + k]);
        for (int column = 0; column < kColumns * 16; ++column)
          sum[row / 16][column / 16].at[row % 16][column % 16] += a * to_float(w[k * w_stride + column]);
      }
    }
  }
  static void store(float* out, const Sum& sum, int stride) {
    for (int i = 0; i < 256; ++i) out[i / 16 * stride + i % 16] = sum.at[i / 16][i % 16];
  }
  static bool takes_part(int thread) { return thread % 32 == 0; }  // one thread does its warp's work
};

#endif

// kRows x kColumns of the product, kStep of the depth at a time; a warp owns kWarpRows x kWarpColumns squares of 16, and
// warps for which no square is left only help to read.
template <class Type, int kRowCount, int kColumnCount, int kStepSize, int kWarpRows, int kWarpColumns, int kThreadCount>
struct TensorTile {
  // The architectures on which `project` launches it: bfloat16 from compute capability 8.0 on.
  static constexpr int kFirstArch = std::is_same<Type, __half>::value ? 0 : 800, kLastArch = 9999;
  using X = Type;
  using W = Type;
  static constexpr int kRows = kRowCount, kColumns = kColumnCount, kStep = kStepSize;
  static constexpr int kRowTiles = kRows / (16 * kWarpRows), kColumnTiles = kColumns / (16 * kWarpColumns);
  static constexpr int kThreads = kThreadCount;
  static_assert(kThreads >= 32 * kRowTiles * kColumnTiles, "every square has its warp");
  static constexpr int kXStride = kStep + 8, kWStride = kColumns + 8, kOutStride = kColumns + 4;  // off the banks
  using Ops = TensorOps<Type>;

  struct Sum {
    typename Ops::Sum square[kWarpRows][kWarpColumns];
  };
  union Shared {
    struct {
      alignas(32) Type x[kRows * kXStride];
      alignas(32) Type w[kStep * kWStride];
    } in;
    alignas(32) float out[kRows * kOutStride];
  };

  static TIDE_DEVICE bool multiplies(int thread) {
    return thread < 32 * kRowTiles * kColumnTiles && Ops::takes_part(thread);
  }
  static TIDE_DEVICE void clear(Sum& sum, int thread) {
    if (!multiplies(thread)) return;
    TIDE_UNROLL
    for (int i = 0; i < kWarpRows; ++i)
      TIDE_UNROLL
      for (int j = 0; j < kWarpColumns; ++j) Ops::clear(sum.square[i][j]);
  }
  static TIDE_DEVICE void add(Sum& sum, const Sum& other, int thread) {
    if (!multiplies(thread)) return;
    TIDE_UNROLL
    for (int i = 0; i < kWarpRows; ++i)
      TIDE_UNROLL
      for (int j = 0; j < kWarpColumns; ++j) Ops::add(sum.square[i][j], other.square[i][j]);
  }
  static TIDE_DEVICE void put_x(Shared& shared, int row, int k, float value) {
    shared.in.x[row * kXStride + k] = from_float<Type>(value);
  }
  static TIDE_DEVICE void put_x(Shared& shared, int row, int k, const Pack<Type>& pack) {
    *reinterpret_cast<Pack<Type>*>(&shared.in.x[row * kXStride + k]) = pack;
  }
  static TIDE_DEVICE void put_w(Shared& shared, int k, int column, const Pack<Type>& pack) {
    *reinterpret_cast<Pack<Type>*>(&shared.in.w[k * kWStride + column]) = pack;
  }
  static TIDE_DEVICE void multiply(const Shared& shared, Sum& sum, int thread) {
    if (!multiplies(thread)) return;
    const int row = thread / 32 / kColumnTiles * kWarpRows * 16, column = thread / 32 % kColumnTiles * kWarpColumns * 16;
    TIDE_UNROLL_BY_4
    for (int k = 0; k < kStep; k += 16)
      Ops::multiply(sum.square, &shared.in.x[row * kXStride + k], kXStride, &shared.in.w[k * kWStride + column], kWStride);
  }
  static TIDE_DEVICE void put_out(Shared& shared, const Sum& sum, int thread) {
    if (!multiplies(thread)) return;
    const int row = thread / 32 / kColumnTiles * kWarpRows * 16, column = thread / 32 % kColumnTiles * kWarpColumns * 16;
    TIDE_UNROLL
    for (int i = 0; i < kWarpRows; ++i)
      TIDE_UNROLL
      for (int j = 0; j < kWarpColumns; ++j)
        Ops::store(&shared.out[(row + i * 16) * kOutStride + column + j * 16], sum.square[i][j], kOutStride);
  }
};

// The same with a kThreadRows x kThreadColumns square per thread, in float32 whatever the types in memory.
template <class XType, class WType, int kRowCount, int kColumnCount, int kStepSize, int kThreadRows, int kThreadColumns>
struct PlainTile {
  // The architectures on which `project` launches it: bfloat16 alone only where there are no tensor cores for it.
  static constexpr int kFirstArch = 0, kLastArch = std::is_same<WType, __nv_bfloat16>::value ? 799 : 9999;
  using X = XType;
  using W = WType;
  static constexpr int kRows = kRowCount, kColumns = kColumnCount, kStep = kStepSize;
  static constexpr int kAcross = kColumns / kThreadColumns;
  static constexpr int kThreads = kAcross * (kRows / kThreadRows);
  static constexpr int kXStride = kRows + 4, kWStride = kColumns, kOutStride = kColumns + 4;  // x is kept transposed

  struct Sum {
    float at[kThreadRows][kThreadColumns];
  };
  union Shared {
    struct {
      alignas(16) float x[kStep * kXStride];
      alignas(16) float w[kStep * kWStride];
    } in;
    alignas(16) float out[kRows * kOutStride];
  };

  static TIDE_DEVICE void clear(Sum& sum, int) {
    TIDE_UNROLL
    for (int i = 0; i < kThreadRows; ++i)
      TIDE_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) sum.at[i][j] = 0.0f;
  }
  static TIDE_DEVICE void add(Sum& sum, const Sum& other, int) {
    TIDE_UNROLL
    for (int i = 0; i < kThreadRows; ++i)
      TIDE_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) sum.at[i][j] += other.at[i][j];
  }
  static TIDE_DEVICE void put_x(Shared& shared, int row, int k, float value) { shared.in.x[k * kXStride + row] = value; }
  static TIDE_DEVICE void put_x(Shared& shared, int row, int k, const Pack<X>& pack) {
    TIDE_UNROLL
    for (int i = 0; i < Pack<X>::kCount; ++i) put_x(shared, row, k + i, to_float(pack.item[i]));
  }
  static TIDE_DEVICE void put_w(Shared& shared, int k, int column, const Pack<W>& pack) {
    TIDE_UNROLL
    for (int i = 0; i < Pack<W>::kCount; ++i) shared.in.w[k * kWStride + column + i] = to_float(pack.item[i]);
  }
  static TIDE_DEVICE void multiply(const Shared& shared, Sum& sum, int thread) {
    const int row = thread / kAcross * kThreadRows, column = thread % kAcross * kThreadColumns;
    TIDE_UNROLL_BY_8
    for (int k = 0; k < kStep; ++k) {
      float x[kThreadRows], w[kThreadColumns];
      TIDE_UNROLL
      for (int i = 0; i < kThreadRows; ++i) x[i] = shared.in.x[k * kXStride + row + i];
      TIDE_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) w[j] = shared.in.w[k * kWStride + column + j];
      TIDE_UNROLL
      for (int i = 0; i < kThreadRows; ++i)
        TIDE_UNROLL
        for (int j = 0; j < kThreadColumns; ++j) sum.at[i][j] = fmaf(x[i], w[j], sum.at[i][j]);
    }
  }
  static TIDE_DEVICE void put_out(Shared& shared, const Sum& sum, int thread) {
    const int row = thread / kAcross * kThreadRows, column = thread % kAcross * kThreadColumns;
    TIDE_UNROLL
    for (int i = 0; i < kThreadRows; ++i)
      TIDE_UNROLL
      for (int j = 0; j < kThreadColumns; ++j) shared.out[(row + i) * kOutStride + column + j] = sum.at[i][j];
  }
};

}  // namespace tide
