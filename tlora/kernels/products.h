/* Products of small matrices in float32 on one thread, which the kernels in C are made of. */

#ifndef TLORA_PRODUCTS_H
#define TLORA_PRODUCTS_H

#include <stdint.h>

#ifdef __AVX512F__
#define LANES 16
#define ROWS 8
#else
#define LANES 8
#define ROWS 4
#endif

#define DEPTH 256  /* Of a sum at once: two vectors of so many rows fit into a small L1. */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static int64_t least(int64_t left, int64_t right) { return left < right ? left : right; }

static int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* c[m, n] = alpha * sum over k of p[m, k] q[k, n], or added to it. */
static inline __attribute__((always_inline)) void
tile(const int M, const int N, int64_t depth, const float *p, int64_t pm, int64_t pk,
     const float *q, int64_t qk, float *c, int64_t cm, float alpha, int add)
{
    vec sums[ROWS][2];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++)
            sums[m][n] = (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec row[2];
        for (int n = 0; n < N; n++)
            row[n] = *(const vec *)(q + k * qk + n * LANES);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                sums[m][n] += p[m * pm + k * pk] * row[n];
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            vec *to = (vec *)(c + m * cm + n * LANES);
            *to = add ? *to + alpha * sums[m][n] : alpha * sums[m][n];
        }
}

#define TILE(M, N) \
    case M: \
        tile(M, N, depth, p, pm, pk, q, qk, c, cm, alpha, add); \
        break;

#define TILES(NAME, N) \
    static void NAME(int64_t rows, int64_t depth, const float *p, int64_t pm, int64_t pk, \
                     const float *q, int64_t qk, float *c, int64_t cm, float alpha, int add) \
    { \
        switch (rows) { \
            TILE(1, N) TILE(2, N) TILE(3, N) TILE(4, N) MORE_TILES(N) \
        } \
    }

#if ROWS == 8
#define MORE_TILES(N) TILE(5, N) TILE(6, N) TILE(7, N) TILE(8, N)
#else
#define MORE_TILES(N)
#endif

TILES(one_vector, 1)
TILES(two_vectors, 2)

/* Columns that fill no vector, of q padded so that a whole one may be read. */
static void rest(int64_t rows, int64_t columns, int64_t depth, const float *p, int64_t pm,
                 int64_t pk, const float *q, int64_t qk, float *c, int64_t cm, float alpha, int add)
{
    float found[ROWS * LANES];
    one_vector(rows, depth, p, pm, pk, q, qk, found, LANES, alpha, 0);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < columns; n++) {
            float value = found[m * LANES + n];
            c[m * cm + n] = add ? c[m * cm + n] + value : value;
        }
}

/* to [depth, LANES] = some columns, and zeros. */
static void pad(const float *from, int64_t stride, int64_t depth, int64_t columns, float *to)
{
    for (int64_t k = 0; k < depth; k++)
        for (int64_t n = 0; n < LANES; n++)
            to[k * LANES + n] = n < columns ? from[k * stride + n] : 0;
}

/* c [rows, columns] = alpha p q, or added to it. p's elements lie pm and pk apart, q's columns side
   by side, as c's do. */
static void product(int64_t rows, int64_t columns, int64_t depth, const float *p, int64_t pm,
                    int64_t pk, const float *q, int64_t qk, int is_padded, float *c, int64_t cm,
                    float alpha, int add)
{
    for (int64_t k = 0; k < depth; k += DEPTH) {
        int64_t now = least(DEPTH, depth - k);
        const float *p_k = p + k * pk, *q_k = q + k * qk;
        float whole[DEPTH * LANES];
        for (int64_t n = 0; n < columns;) {
            int64_t left = columns - n, step = qk;
            int64_t take = left >= 2 * LANES ? 2 * LANES : least(left, LANES);
            const float *q_n = q_k + n;
            if (take < LANES && !is_padded) {
                pad(q_n, qk, now, take, whole);
                q_n = whole;
                step = LANES;
            }
            for (int64_t m = 0; m < rows; m += ROWS) {
                int64_t some = least(ROWS, rows - m);
                const float *p_m = p_k + m * pm;
                float *c_m = c + m * cm + n;
                int adds = add || k > 0;
                if (take == 2 * LANES)
                    two_vectors(some, now, p_m, pm, pk, q_n, step, c_m, cm, alpha, adds);
                else if (take == LANES)
                    one_vector(some, now, p_m, pm, pk, q_n, step, c_m, cm, alpha, adds);
                else
                    rest(some, take, now, p_m, pm, pk, q_n, step, c_m, cm, alpha, adds);
            }
            n += take;
        }
    }
}

/* to [columns, width] = from [rows, columns] turned, with zeros up to the width. In squares: rows
   of 4,096 features, read one number each, push each other out of the cache. */
static void turn(const float *from, int64_t stride, int64_t rows, int64_t columns, float *to,
                 int64_t width)
{
    for (int64_t first = 0; first < columns; first += LANES) {
        int64_t last = least(first + LANES, columns);
        for (int64_t some = 0; some < width; some += LANES)
            for (int64_t row = some; row < some + LANES; row++)
                for (int64_t column = first; column < last; column++)
                    to[column * width + row] = row < rows ? from[row * stride + column] : 0;
    }
}

#endif
