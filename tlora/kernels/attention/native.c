/* Causal attention over sequences packed one after another, on a CPU: forward and backward in one
   call for all sequences and heads. float32 alone.

   torch's attention takes sequences of one length, so a nano-batch is cut by length, copied apart
   and put back (packed.py), and half of every square of scores is computed for nothing. Here each
   sequence is read where it lies: a strip of queries meets the keys that it sees, block by block.
   A row of scores is a key's and has a query in each lane, so that maxima and sums of a query run
   down the rows and never across a vector.

   Every sum has one order, whatever the neighbours and however many threads there are: a query's
   are sums over its keys from the first on, a key's over strips of queries likewise, and over the
   heads that share it in theirs. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

#define QUERIES 32    /* Of a strip. */
#define KEYS 64       /* Of a block. */
#define MOST_SIZE 256 /* Of a head, as in native.py. */
#define VECTORS (QUERIES / LANES)

enum { DONE, NO_MEMORY, OUTSIDE };

typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    const float *at;     /* [tokens, heads, size] */
    int64_t token, head; /* Steps from one to the next. */
} rows;

typedef struct {
    const int32_t *starts; /* [sequences + 1] */
    int64_t sequences, tokens, heads, kv_heads, size;
    int64_t window; /* Keys that a query sees, its own among them. */
    rows q, k, v;
    double scale;
    int64_t threads;
} attention;

typedef struct {
    int64_t start, first, count; /* Of its sequence; its first query there, and how many. */
} strip;

/* Of a strip and a block, [keys, queries]. */
typedef float square[KEYS * QUERIES];

static const float *row(const rows *x, int64_t token, int64_t head)
{
    return x->at + token * x->token + head * x->head;
}

static int64_t kv_head(const attention *t, int64_t head) { return head * t->kv_heads / t->heads; }

static int64_t length_of(const attention *t, int64_t sequence)
{
    return t->starts[sequence + 1] - t->starts[sequence];
}

static vec chosen(ivec where, vec these, vec others)
{
    return (vec)((where & (ivec)these) | (~where & (ivec)others));
}

/* e to the x for x up to 0; below -87, where floats end, of -87. NaN stays. */
static vec power(vec x)
{
    const float to_integer = 12582912.0f; /* 1.5 * 2^23: adding it rounds. */
    x = chosen(x < -87.0f, (vec){0} - 87.0f, x);
    vec n = (x * 1.44269504088896341f + to_integer) - to_integer;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}

static int64_t first_key(const attention *t, int64_t query)
{
    return query < t->window ? 0 : query - t->window + 1;
}

/* Whether all queries of a strip see a key. */
static int is_seen(const attention *t, const strip *own, int64_t key)
{
    return key <= own->first && key >= first_key(t, own->first + own->count - 1);
}

/* Which of a strip's queries from the n-th vector of them on see a key. */
static ivec seeing(const attention *t, const strip *own, int n, int64_t key)
{
    ivec queries;
    for (int i = 0; i < LANES; i++)
        queries[i] = i;
    queries += (int32_t)(own->first + n * LANES);
    return (queries >= (int32_t)key) & (queries - (int32_t)key < (int32_t)t->window);
}

/* to [size, queries] of a strip. */
static void turn_strip(const attention *t, const strip *own, const rows *from, int64_t head,
                       float *to)
{
    turn(row(from, own->start + own->first, head), from->token, own->count, t->size, to, QUERIES);
}

/* found [keys, queries] = scale times products of a block of keys, or values, with turned ones. */
static void meet(const attention *t, const strip *own, const rows *x, int64_t first, int64_t count,
                 int64_t head, const float *turned, float scale, float *found)
{
    product(count, padded(own->count), t->size, row(x, own->start + first, head), x->token, 1,
            turned, QUERIES, 1, found, QUERIES, scale, 0);
}

/* Scores become powers of what they are above `base`, and 0 where a query does not see the key. */
static void raise(const attention *t, const strip *own, int64_t first, int64_t count,
                  const vec *base, float *scores)
{
    for (int64_t j = 0; j < count; j++) {
        int all = is_seen(t, own, first + j);
        for (int n = 0; n * LANES < own->count; n++) {
            vec *at = (vec *)(scores + j * QUERIES + n * LANES), value = power(*at - base[n]);
            *at = all ? value : chosen(seeing(t, own, n, first + j), value, (vec){0});
        }
    }
}

/* The largest scores that queries see. NaN may be passed over: its power is NaN. */
static void find_largest(const attention *t, const strip *own, int64_t first, int64_t count,
                         const float *scores, vec *found)
{
    for (int64_t j = 0; j < count; j++) {
        int all = is_seen(t, own, first + j);
        for (int n = 0; n * LANES < own->count; n++) {
            vec value = *(const vec *)(scores + j * QUERIES + n * LANES);
            ivec larger = value > found[n];
            if (!all)
                larger &= seeing(t, own, n, first + j);
            found[n] = chosen(larger, value, found[n]);
        }
    }
}

/* y [tokens, heads, size] of a strip and head, and the logarithms of the sums of powers. */
static void attend(const attention *t, const strip *own, int64_t head, float *y, float *sums)
{
    float queries[MOST_SIZE * QUERIES], factor[QUERIES];
    square scores;
    vec base[VECTORS], sum[VECTORS];
    int64_t last = own->first + own->count, kv = kv_head(t, head), y_row = t->heads * t->size;
    y += (own->start + own->first) * y_row + head * t->size;
    turn_strip(t, own, &t->q, head, queries);
    for (int n = 0; n < VECTORS; n++) {
        base[n] = (vec){0} - INFINITY;
        sum[n] = (vec){0};
    }
    int64_t begin = first_key(t, own->first);
    for (int64_t first = begin; first < last; first += KEYS) {
        int64_t count = least(KEYS, last - first);
        vec before[VECTORS];
        memcpy(before, base, sizeof(base));
        meet(t, own, &t->k, first, count, kv, queries, (float)t->scale, scores);
        find_largest(t, own, first, count, scores, base);
        raise(t, own, first, count, base, scores);
        for (int n = 0; n * LANES < own->count; n++) {
            vec shrunk = chosen(base[n] > before[n], power(before[n] - base[n]), (vec){0} + 1.0f);
            *(vec *)(factor + n * LANES) = shrunk;
            sum[n] *= shrunk;
            for (int64_t j = 0; j < count; j++)
                sum[n] += *(vec *)(scores + j * QUERIES + n * LANES);
        }
        for (int64_t m = 0; first > begin && m < own->count; m++)
            for (int64_t f = 0; f < t->size; f++)
                y[m * y_row + f] *= factor[m];
        product(own->count, t->size, count, scores, 1, QUERIES, row(&t->v, own->start + first, kv),
                t->v.token, 0, y, y_row, 1, first > begin);
    }
    for (int64_t m = 0; m < own->count; m++) {
        float whole = sum[m / LANES][m % LANES], part = 1 / whole;
        for (int64_t f = 0; f < t->size; f++)
            y[m * y_row + f] *= part;
        sums[(own->start + own->first + m) * t->heads + head] =
            base[m / LANES][m % LANES] + logf(whole);
    }
}

/* What a strip and head add to the gradients of its keys and values, and dQ: [tokens, heads, size]
   all. dY Y, summed, is in `inner`. */
static void attend_back(const attention *t, const strip *own, int64_t head, const rows *dy,
                        const float *sums, const float *inner, float *dq, float *dk, float *dv)
{
    float queries[MOST_SIZE * QUERIES], upstream[MOST_SIZE * QUERIES];
    square powers, ds;
    vec sum[VECTORS], of_y[VECTORS];
    int64_t last = own->first + own->count, kv = kv_head(t, head), to_row = t->heads * t->size;
    int64_t own_token = own->start + own->first;
    for (int64_t m = 0; m < QUERIES; m++) {
        int64_t place = (own_token + least(m, own->count - 1)) * t->heads + head;
        sum[m / LANES][m % LANES] = sums[place];
        of_y[m / LANES][m % LANES] = inner[place];
    }
    turn_strip(t, own, &t->q, head, queries);
    turn_strip(t, own, dy, head, upstream);
    int64_t begin = first_key(t, own->first);
    for (int64_t first = begin; first < last; first += KEYS) {
        int64_t count = least(KEYS, last - first);
        int64_t to = (own->start + first) * to_row + head * t->size;
        meet(t, own, &t->k, first, count, kv, queries, (float)t->scale, powers);
        meet(t, own, &t->v, first, count, kv, upstream, 1, ds);
        raise(t, own, first, count, sum, powers);
        for (int64_t j = 0; j < count; j++)
            for (int n = 0; n * LANES < own->count; n++) {
                int64_t at = j * QUERIES + n * LANES;
                vec *value = (vec *)(ds + at);
                *value = *(vec *)(powers + at) * (*value - of_y[n]);
            }
        product(count, t->size, own->count, powers, QUERIES, 1, row(dy, own_token, head), dy->token,
                0, dv + to, to_row, 1, 1);
        product(count, t->size, own->count, ds, QUERIES, 1, row(&t->q, own_token, head), t->q.token,
                0, dk + to, to_row, (float)t->scale, 1);
        product(own->count, t->size, count, ds, 1, QUERIES, row(&t->k, own->start + first, kv),
                t->k.token, 0, dq + own_token * to_row + head * t->size, to_row, (float)t->scale,
                first > begin);
    }
}

/* The gradients of a sequence's head, strip by strip. */
static void attend_sequence_back(const attention *t, int64_t sequence, int64_t head, const rows *dy,
                                 const float *y, const float *sums, float *inner, float *dq,
                                 float *dk, float *dv)
{
    int64_t start = t->starts[sequence], length = length_of(t, sequence);
    for (int64_t m = start; m < start + length; m++) {
        int64_t place = m * t->heads + head;
        const float *d = row(dy, m, head);
        float sum = 0;
        for (int64_t f = 0; f < t->size; f++)
            sum += d[f] * y[place * t->size + f];
        inner[place] = sum;
        memset(dk + place * t->size, 0, sizeof(float) * t->size);
        memset(dv + place * t->size, 0, sizeof(float) * t->size);
    }
    for (int64_t first = 0; first < length; first += QUERIES) {
        strip own = {start, first, least(QUERIES, length - first)};
        attend_back(t, &own, head, dy, sums, inner, dq, dk, dv);
    }
}

/* Written to, memory of others would be in ruins. */
static int is_inside(const attention *t)
{
    if (t->starts[0] != 0 || t->starts[t->sequences] > t->tokens || t->size > MOST_SIZE)
        return 0;
    for (int64_t i = 0; i < t->sequences; i++)
        if (length_of(t, i) < 0)
            return 0;
    return 1;
}

/* y [tokens, heads, size] and sums [tokens, heads]. */
int forward(const attention *t, float *y, float *sums)
{
    int64_t count = 0;
    if (!is_inside(t))
        return OUTSIDE;
    strip *strips = malloc(sizeof(strip) * (t->starts[t->sequences] + 1));
    if (!strips)
        return NO_MEMORY;
    for (int64_t i = 0; i < t->sequences; i++)
        for (int64_t first = 0; first < length_of(t, i); first += QUERIES)
            strips[count++] =
                (strip){t->starts[i], first, least(QUERIES, length_of(t, i) - first)};
#pragma omp parallel for schedule(dynamic) num_threads(t->threads) if (t->threads > 1)
    for (int64_t i = 0; i < count * t->heads; i++)
        attend(t, &strips[i / t->heads], i % t->heads, y, sums);
    free(strips);
    return DONE;
}

/* dq [tokens, heads, size], dk and dv [tokens, kv_heads, size]. */
int backward(const attention *t, const rows *dy, const float *y, const float *sums, float *dq,
             float *dk, float *dv)
{
    if (!is_inside(t))
        return OUTSIDE;
    int64_t tokens = t->starts[t->sequences], shared = t->heads / t->kv_heads;
    int64_t size = tokens * t->heads * t->size;
    float *inner = malloc(sizeof(float) * (tokens * t->heads + 1));
    float *shares = shared > 1 ? malloc(sizeof(float) * (2 * size + 1)) : NULL;
    int outcome = inner && (shares || shared == 1) ? DONE : NO_MEMORY;
    if (outcome == DONE) {
        float *own_dk = shares ? shares : dk, *own_dv = shares ? shares + size : dv;
#pragma omp parallel num_threads(t->threads) if (t->threads > 1)
        {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < t->sequences * t->heads; i++)
                attend_sequence_back(t, i / t->heads, i % t->heads, dy, y, sums, inner, dq, own_dk,
                                     own_dv);
            if (shares) {
#pragma omp for
                for (int64_t i = 0; i < tokens * t->kv_heads; i++)
                    for (int64_t f = 0; f < t->size; f++) {
                        float sum_k = 0, sum_v = 0;
                        for (int64_t m = 0; m < shared; m++) {
                            int64_t from = (i * shared + m) * t->size + f;
                            sum_k += own_dk[from];
                            sum_v += own_dv[from];
                        }
                        dk[i * t->size + f] = sum_k;
                        dv[i * t->size + f] = sum_v;
                    }
            }
        }
    }
    free(inner);
    free(shares);
    return outcome;
}
