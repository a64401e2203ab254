// Matrix-vector products of generated tokens, for whatever weights: the file that includes this says
// how a row of the matrix is multiplied,
//   template <int N> DEVICE void products(const u8* matrix, const u8* x, int x_stride, int n_in, int n_out,
//                                         int out_row, int n_heads, int head, const int (&rows)[N], float (&sums)[N])
// whose sums are those of out_row with N rows of x, on lane 0 at least.

// grid (n_out / 4, row tiles, heads), block 128. Head h has its own matrix and its part of a row.
template <int N>
DEVICE void matvec(const u8* matrix, int matrix_units, const u8* x, int x_stride, const float* bias, float* out,
                   const int* count, int n_in, int n_out, int n_heads, int accumulate) {
  const int out_row = blockIdx.x * 4 + WARP, head = blockIdx.z, first = blockIdx.y * N;
  const int n_rows = *count;
  if (out_row >= n_out || first >= n_rows) return;
  int rows[N];
#pragma unroll
  for (int i = 0; i < N; i++) rows[i] = min(first + i, n_rows - 1);
  float sums[N];
  products<N>(matrix + (size_t)matrix_units * 256 * head, x, x_stride, n_in, n_out, out_row, n_heads, head, rows, sums);
  if (LANE) return;
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (first + i >= n_rows) break;
    float* y = out + ((size_t)(first + i) * n_heads + head) * n_out + out_row;
    const float sum = bias ? sums[i] + bias[head * n_out + out_row] : sums[i];
    *y = accumulate ? *y + sum : sum;
  }
}

#define MATVEC_PARAMETERS                                                                            \
  const u8 *__restrict__ matrix, int matrix_units, const u8 *__restrict__ x, int x_stride,           \
      const float *__restrict__ bias, float *__restrict__ out, const int *__restrict__ count,        \
      int n_in, int n_out, int n_heads, int accumulate
#define MATVEC_ARGUMENTS matrix, matrix_units, x, x_stride, bias, out, count, n_in, n_out, n_heads, accumulate

extern "C" __global__ void __launch_bounds__(128) matvec_1(MATVEC_PARAMETERS) { matvec<1>(MATVEC_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128) matvec_2(MATVEC_PARAMETERS) { matvec<2>(MATVEC_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128) matvec_4(MATVEC_PARAMETERS) { matvec<4>(MATVEC_ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(128) matvec_8(MATVEC_PARAMETERS) { matvec<8>(MATVEC_ARGUMENTS); }
