/* One pass over memory for a step of an optimizer, on flat buffers; plain C, called by ctypes.

   A buffer is taken in blocks that stay in the first-level cache: gradients are widened and scaled
   into a local array, the optimizer runs on it, and what it leaves is rounded to 16 bits if asked.
   Every element meets the same IEEE operations in the same order wherever it lies, in whatever
   vectors (no contraction to fused products), so bits depend neither on cuts nor on threads. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024
#define SQUARES_BLOCK 4096
#define LANES 8
#define MIN_PER_THREAD 32768

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(SW_PORTABLE)
#define CLONES __attribute__((target_clones("arch=haswell", "default")))
#else
#define CLONES
#endif

#if defined(__FLT16_MAX__)
#define HAS_HALF 1
typedef _Float16 half;
#else
#define HAS_HALF 0
#endif

enum { KIND_f32 = 0, KIND_f64 = 1, KIND_BF16 = 2, KIND_F16 = 3, KIND_NONE = 4 };

int sw_has_half(void) { return HAS_HALF; }

static inline float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

static inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : (uint16_t)rounded;
}

CLONES static void widen_bf16(const uint16_t *from, float *to, int n) {
  for (int i = 0; i < n; i++) to[i] = from_bf16(from[i]);
}

CLONES static void narrow_bf16(const float *from, uint16_t *to, int n) {
  for (int i = 0; i < n; i++) to[i] = to_bf16(from[i]);
}

#if HAS_HALF
CLONES static void widen_f16(const half *from, float *to, int n) {
  for (int i = 0; i < n; i++) to[i] = (float)from[i];
}

CLONES static void narrow_f16(const float *from, half *to, int n) {
  for (int i = 0; i < n; i++) to[i] = (half)from[i];
}
#endif

static void load_f32(const void *from, int kind, int64_t at, float *to, int n) {
  if (kind == KIND_f32) memcpy(to, (const float *)from + at, (size_t)n * 4);
  if (kind == KIND_BF16) widen_bf16((const uint16_t *)from + at, to, n);
#if HAS_HALF
  if (kind == KIND_F16) widen_f16((const half *)from + at, to, n);
#endif
}

static void load_f64(const void *from, int kind, int64_t at, double *to, int n) {
  if (kind == KIND_f64) {
    memcpy(to, (const double *)from + at, (size_t)n * 8);
    return;
  }
  float narrow[BLOCK];
  load_f32(from, kind, at, narrow, n);
  for (int i = 0; i < n; i++) to[i] = narrow[i];
}

static void store_f32(const float *from, void *to, int kind, int64_t at, int n) {
  if (kind == KIND_BF16) narrow_bf16(from, (uint16_t *)to + at, n);
#if HAS_HALF
  if (kind == KIND_F16) narrow_f16(from, (half *)to + at, n);
#endif
}

static void store_f64(const double *from, void *to, int kind, int64_t at, int n) {
  if (kind == KIND_NONE) return;
  float narrow[BLOCK];
  for (int i = 0; i < n; i++) narrow[i] = (float)from[i];
  store_f32(narrow, to, kind, at, n);
}

/* Constants of a step, by place; each optimizer names its own. */
typedef struct {
  double c[8];
  int flags;
} Settings;

#define DEFINE_STEPS(T, NAME, SQRT)                                                               \
  CLONES static void scale_##NAME(T *g, T scale, int n) {                                         \
    for (int i = 0; i < n; i++) g[i] = g[i] * scale;                                              \
  }                                                                                               \
  /* c: beta1 complement, beta2, beta2 complement, decay, step size, root's factor, eps */      \
  CLONES static void adamw_##NAME(T *restrict p, T *restrict m, T *restrict v,                    \
                                  const T *restrict g, const Settings *s, int n) {                \
    const T w1 = (T)s->c[0], b2 = (T)s->c[1], w2 = (T)s->c[2], keep = (T)s->c[3];                 \
    const T size = (T)s->c[4], root = (T)s->c[5], eps = (T)s->c[6];                               \
    for (int i = 0; i < n; i++) {                                                                 \
      T grad = g[i];                                                                              \
      T mean = m[i] + (grad - m[i]) * w1;                                                         \
      T square = v[i] * b2 + (grad * grad) * w2;                                                  \
      m[i] = mean;                                                                                \
      v[i] = square;                                                                              \
      p[i] = p[i] * keep - (mean * size) / (SQRT(square) * root + eps);                           \
    }                                                                                             \
  }                                                                                               \
  /* c: beta1 complement, beta2 complement, decay, rate */                                        \
  CLONES static void lion_##NAME(T *restrict p, T *restrict m, T *restrict v,                     \
                                 const T *restrict g, const Settings *s, int n) {                 \
    const T w1 = (T)s->c[0], w2 = (T)s->c[1], keep = (T)s->c[2], rate = (T)s->c[3];               \
    (void)v;                                                                                      \
    for (int i = 0; i < n; i++) {                                                                 \
      T mix = m[i] + (g[i] - m[i]) * w1;                                                          \
      T sign = (T)((mix > 0) - (mix < 0));                                                        \
      p[i] = p[i] * keep - sign * rate;                                                           \
      m[i] = m[i] + (g[i] - m[i]) * w2;                                                           \
    }                                                                                             \
  }                                                                                               \
  /* c: rate, weight decay, momentum; flags: 1 momentum, 2 nesterov */                             \
  CLONES static void sgd_##NAME(T *restrict p, T *restrict m, T *restrict v,                      \
                                const T *restrict g, const Settings *s, int n) {                  \
    const T rate = (T)s->c[0], decay = (T)s->c[1], momentum = (T)s->c[2];                         \
    const int moves = s->flags & 1, ahead = s->flags & 2;                                         \
    (void)v;                                                                                      \
    for (int i = 0; !moves && i < n; i++) p[i] = p[i] - (g[i] + p[i] * decay) * rate;             \
    for (int i = 0; moves && i < n; i++) {                                                        \
      T grad = g[i] + p[i] * decay;                                                               \
      T sum = m[i] * momentum + grad;                                                             \
      m[i] = sum;                                                                                 \
      p[i] = p[i] - (ahead ? grad + sum * momentum : sum) * rate;                                 \
    }                                                                                             \
  }                                                                                               \
  /* c: rate, weight decay, eps */                                                                \
  CLONES static void adagrad_##NAME(T *restrict p, T *restrict m, T *restrict v,                  \
                                    const T *restrict g, const Settings *s, int n) {              \
    const T rate = (T)s->c[0], decay = (T)s->c[1], eps = (T)s->c[2];                              \
    (void)v;                                                                                      \
    for (int i = 0; i < n; i++) {                                                                 \
      T grad = g[i] + p[i] * decay;                                                               \
      T sum = m[i] + grad * grad;                                                                 \
      m[i] = sum;                                                                                 \
      p[i] = p[i] - (grad * rate) / (SQRT(sum) + eps);                                            \
    }                                                                                             \
  }                                                                                               \
  typedef void (*step_##NAME)(T *restrict, T *restrict, T *restrict, const T *restrict,           \
                              const Settings *, int);                                             \
  static void run_##NAME(step_##NAME step, T *p, const void *g, T *m, T *v, void *shadow,         \
                         int64_t length, int grad_kind, int shadow_kind, double scale,            \
                         const Settings *s, int threads) {                                        \
    int64_t blocks = (length + BLOCK - 1) / BLOCK;                                                \
    _Pragma("omp parallel for num_threads(threads) schedule(static) if (threads > 1)")            \
    for (int64_t b = 0; b < blocks; b++) {                                                        \
      T grads[BLOCK];                                                                             \
      int64_t at = b * BLOCK;                                                                     \
      int n = (int)(length - at < BLOCK ? length - at : BLOCK);                                   \
      const T *own = (const T *)g + at;                                                           \
      if (scale != 1.0 || grad_kind != KIND_##NAME) {                                             \
        load_##NAME(g, grad_kind, at, grads, n);                                                  \
        if (scale != 1.0) scale_##NAME(grads, (T)scale, n);                                       \
        own = grads;                                                                              \
      }                                                                                           \
      step(p + at, m ? m + at : 0, v ? v + at : 0, own, s, n);                                    \
      if (shadow_kind != KIND_NONE) store_##NAME(p + at, shadow, shadow_kind, at, n);             \
    }                                                                                             \
  }

DEFINE_STEPS(float, f32, sqrtf)
DEFINE_STEPS(double, f64, sqrt)

static const step_f32 STEPS_F32[] = {adamw_f32, lion_f32, sgd_f32, adagrad_f32};
static const step_f64 STEPS_F64[] = {adamw_f64, lion_f64, sgd_f64, adagrad_f64};

/* Steps `count` groups: pointers come five to a group (parameter, gradient, two states, shadow). */
void sw_step(int which, int count, void **at, const int64_t *lengths, int kind, int grad_kind,
             int shadow_kind, double scale, const double *constants, int flags, int threads) {
  Settings s;
  memcpy(s.c, constants, sizeof s.c);
  s.flags = flags;
  for (int i = 0; i < count; i++, at += 5) {
    int64_t most = lengths[i] / MIN_PER_THREAD;
    int used = most < 1 ? 1 : most < threads ? (int)most : threads;
    if (kind == KIND_f32)
      run_f32(STEPS_F32[which], at[0], at[1], at[2], at[3], at[4], lengths[i], grad_kind,
              shadow_kind, scale, &s, used);
    else
      run_f64(STEPS_F64[which], at[0], at[1], at[2], at[3], at[4], lengths[i], grad_kind,
              shadow_kind, scale, &s, used);
  }
}

CLONES static double block_squares(const double *x, int n) {
  double sums[LANES] = {0};
  int whole = n - n % LANES;
  for (int i = 0; i < whole; i += LANES)
    for (int j = 0; j < LANES; j++) sums[j] += x[i + j] * x[i + j];
  for (int i = whole; i < n; i++) sums[i - whole] += x[i] * x[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* The sum of squares in double, block by block; infinite or not a number if some element is. */
double sw_squares(const void *x, int64_t length, int kind, int threads, double *partial) {
  int64_t blocks = (length + SQUARES_BLOCK - 1) / SQUARES_BLOCK;
  int64_t most = length / MIN_PER_THREAD;
  int used = most < 1 ? 1 : most < threads ? (int)most : threads;
  _Pragma("omp parallel for num_threads(used) schedule(static) if (used > 1)")
  for (int64_t b = 0; b < blocks; b++) {
    double sum = 0;
    int64_t start = b * SQUARES_BLOCK;
    int64_t stop = length - start < SQUARES_BLOCK ? length : start + SQUARES_BLOCK;
    for (int64_t at = start; at < stop; at += BLOCK) {
      double wide[BLOCK];
      int n = (int)(stop - at < BLOCK ? stop - at : BLOCK);
      load_f64(x, kind, at, wide, n);
      sum += block_squares(wide, n);
    }
    partial[b] = sum;
  }
  double total = 0;
  for (int64_t b = 0; b < blocks; b++) total += partial[b];
  return total;
}
