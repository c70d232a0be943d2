/* The adapters of a group of linears on a CPU: what cpu.py computes with a few products for each
   segment, in one call for all of them. float32 alone.

   A nano-batch has hundreds of products of some rows by a rank, most of which take less time than
   the call that asks for them. Here a nano-batch's table (tables.py) is read as it is, and the work
   of a group is cut over the threads once or twice, not at every product.

   Every sum has one order, whatever the neighbours and however many threads there are: a token's
   values are sums over features or ranks; a gradient's are sums over the tokens of its segment,
   blocks of them in their order, and segments in theirs. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

#define TOKENS 64  /* Of a block. */
#define FEATURES 64  /* That a thread takes of a gradient, or of an input under dropout. */

enum { DONE, NO_MEMORY, OUTSIDE };
enum { START, STOP, A_ROW, THRESHOLD, KEY, PAIRS };

#define FEATURE_SALT 0x03707344u
#define LINEAR_SALT 0x13198A2Eu

typedef struct {
    const int64_t *table;   /* [1 + segments, columns] */
    const float *scales;    /* [segments] */
    int64_t tokens, columns, linears, in;
    const int64_t *outs;    /* [linears] */
    const int32_t *places;  /* [tokens], which key dropout, with: */
    const int64_t *numbers; /* [linears] */
    const float *x;         /* [tokens, in] */
    const float *a;         /* [rank rows, in] */
    const float *const *b;  /* [linears] of [rank rows, out] */
    float *s;               /* [tokens, s_width] */
    int64_t s_width;
    int64_t threads;
} group;

typedef struct {
    int64_t segment, start, count;
} block;

typedef struct {
    int64_t start, stop, width;
    uint32_t threshold, key;
    const int64_t *pairs; /* rank and row of B, for each linear */
    float scale, keep;
    const float *a;
    int64_t a_row;
} segment;

typedef struct {
    int64_t num_segments, num_blocks;
    segment *segments;
    block *blocks;
    int64_t *turned_at; /* Where each segment's turned matrices begin: those of one job share them. */
    float *turned;
    uint32_t *factors, *terms; /* Of features, under dropout. */
} work;

/* The dropout stream of tlora/kernels/streams.py. */

static uint32_t mix(uint32_t value)
{
    value ^= value >> 16;
    value *= 0x7FEB352Du;
    value ^= value >> 15;
    value *= 0x846CA68Bu;
    return value ^ value >> 16;
}

static uint32_t linear_key(const group *g, const segment *own, int64_t linear)
{
    return mix(own->key ^ mix((uint32_t)g->numbers[linear] ^ LINEAR_SALT));
}

/* to [count, features] = what is kept of from, scaled, the rest zeros. */
static void drop(const group *g, const work *w, const segment *own, uint32_t key, int64_t start,
                 int64_t count, int64_t feature, int64_t features, const float *from,
                 int64_t from_width, float *to)
{
    const uint32_t *factors = w->factors + feature, *terms = w->terms + feature;
    for (int64_t t = 0; t < count; t++) {
        uint32_t hash = mix(mix((uint32_t)g->places[start + t]) ^ key);
        for (int64_t f = 0; f < features; f++) {
            float value = from[t * from_width + f] * own->keep;
            to[t * FEATURES + f] = hash * factors[f] + terms[f] >= own->threshold ? value : 0;
        }
    }
}

static int64_t rank_of(const segment *own, int64_t linear) { return own->pairs[2 * linear]; }

static int64_t row_of(const segment *own, int64_t linear) { return own->pairs[2 * linear + 1]; }

static void forget(work *w)
{
    free(w->segments);
    free(w->blocks);
    free(w->turned_at);
    free(w->turned);
    free(w->factors);
    free(w->terms);
}

/* Numbers that the turned matrices of a segment take: of A forward, of every B backward. */
static int64_t turned_size(const group *g, const segment *own, int is_forward)
{
    int64_t size = 0;
    if (is_forward && !own->threshold)
        return padded(own->width) * g->in;
    for (int64_t l = 0; l < g->linears; l++)
        size += padded(rank_of(own, l)) * (is_forward ? g->in : g->outs[l]);
    return size;
}

/* As a job's sequences have, where each is a segment. */
static int has_matrices_of(const group *g, const segment *own, const segment *other)
{
    return own->a_row == other->a_row && !own->threshold == !other->threshold &&
           !memcmp(own->pairs, other->pairs, sizeof(int64_t) * 2 * g->linears);
}

static int prepare(const group *g, work *w, int is_forward)
{
    int64_t count = g->table[0], blocks = 0, size = 0;
    int any_dropout = 0;
    *w = (work){0};
    w->segments = malloc(sizeof(segment) * (count + 1));
    w->turned_at = malloc(sizeof(int64_t) * (count + 1));
    if (!w->segments || !w->turned_at)
        return NO_MEMORY;
    for (int64_t i = 0; i < count; i++) {
        const int64_t *row = g->table + (i + 1) * g->columns;
        segment own = {.start = row[START], .stop = row[STOP], .a_row = row[A_ROW],
                       .threshold = (uint32_t)row[THRESHOLD], .key = (uint32_t)row[KEY],
                       .pairs = row + PAIRS, .scale = g->scales[i]};
        for (int64_t l = 0; l < g->linears; l++)
            own.width += rank_of(&own, l);
        if (!own.width || own.stop <= own.start)
            continue;
        if (own.start < 0 || own.stop > g->tokens || own.width > g->s_width)
            return OUTSIDE;
        own.keep = (float)(1.0 / (1.0 - own.threshold / 4294967296.0));
        own.a = g->a + own.a_row * g->in;
        any_dropout |= own.threshold > 0;
        int64_t last = w->num_segments - 1;
        int shares = last >= 0 && has_matrices_of(g, &own, &w->segments[last]);
        w->turned_at[last + 1] = shares ? w->turned_at[last] : size;
        w->segments[w->num_segments++] = own;
        size += shares ? 0 : turned_size(g, &own, is_forward);
        blocks += (own.stop - own.start + TOKENS - 1) / TOKENS;
    }
    w->blocks = malloc(sizeof(block) * (blocks + 1));
    w->turned = malloc(sizeof(float) * (size + LANES));
    if (any_dropout) {
        w->factors = malloc(sizeof(uint32_t) * g->in);
        w->terms = malloc(sizeof(uint32_t) * g->in);
    }
    if (!w->blocks || !w->turned || (any_dropout && !(w->factors && w->terms)))
        return NO_MEMORY;
    for (int64_t f = 0; any_dropout && f < g->in; f++) {
        uint32_t hash = mix((uint32_t)f ^ FEATURE_SALT);
        w->factors[f] = hash | 1;
        w->terms[f] = hash >> 16 | hash << 16;
    }
    for (int64_t i = 0; i < w->num_segments; i++)
        for (int64_t t = w->segments[i].start; t < w->segments[i].stop; t += TOKENS)
            w->blocks[w->num_blocks++] =
                (block){i, t, least(TOKENS, w->segments[i].stop - t)};
    return DONE;
}

static int is_turned_before(const work *w, int64_t i)
{
    return i && w->turned_at[i] == w->turned_at[i - 1];
}

/* A of the segment turned: as one matrix, or under dropout as one for each linear. */
static void turn_a(const group *g, const work *w, int64_t i)
{
    const segment *own = &w->segments[i];
    float *to = w->turned + w->turned_at[i];
    if (!own->threshold) {
        turn(own->a, g->in, own->width, g->in, to, padded(own->width));
        return;
    }
    const float *from = own->a;
    for (int64_t l = 0; l < g->linears; l++) {
        int64_t rank = rank_of(own, l), width = padded(rank);
        turn(from, g->in, rank, g->in, to, width);
        from += rank * g->in;
        to += width * g->in;
    }
}

static void turn_b(const group *g, const work *w, int64_t i)
{
    const segment *own = &w->segments[i];
    float *to = w->turned + w->turned_at[i];
    for (int64_t l = 0; l < g->linears; l++) {
        int64_t rank = rank_of(own, l), width = padded(rank), out = g->outs[l];
        turn(g->b[l] + row_of(own, l) * out, out, rank, out, to, width);
        to += width * out;
    }
}

/* S of a block, its linears' columns side by side. */
static void shrink(const group *g, const work *w, const block *here)
{
    const segment *own = &w->segments[here->segment];
    const float *x = g->x + here->start * g->in, *turned = w->turned + w->turned_at[here->segment];
    float *s = g->s + here->start * g->s_width;
    if (!own->threshold) {
        product(here->count, own->width, g->in, x, g->in, 1, turned, padded(own->width), 1, s,
                g->s_width, 1, 0);
        return;
    }
    float kept[TOKENS * FEATURES];
    for (int64_t l = 0; l < g->linears; l++) {
        int64_t rank = rank_of(own, l), width = padded(rank);
        uint32_t key = linear_key(g, own, l);
        for (int64_t f = 0; rank && f < g->in; f += FEATURES) {
            int64_t features = least(FEATURES, g->in - f);
            drop(g, w, own, key, here->start, here->count, f, features, x + f, g->in, kept);
            product(here->count, rank, features, kept, FEATURES, 1, turned + f * width, width, 1, s,
                    g->s_width, 1, f > 0);
        }
        turned += width * g->in;
        s += rank;
    }
}

static void expand(const group *g, const work *w, const block *here, float *const *y)
{
    const segment *own = &w->segments[here->segment];
    const float *s = g->s + here->start * g->s_width;
    for (int64_t l = 0; l < g->linears; l++) {
        int64_t rank = rank_of(own, l), out = g->outs[l];
        if (rank)
            product(here->count, out, rank, s, g->s_width, 1, g->b[l] + row_of(own, l) * out, out,
                    0, y[l] + here->start * out, out, own->scale, 1);
        s += rank;
    }
}

/* dS of a block, without the scale. */
static void shrink_back(const group *g, const work *w, const block *here, const float *const *dy,
                        float *ds)
{
    const segment *own = &w->segments[here->segment];
    const float *turned = w->turned + w->turned_at[here->segment];
    for (int64_t l = 0; l < g->linears; l++) {
        int64_t rank = rank_of(own, l), width = padded(rank), out = g->outs[l];
        if (rank)
            product(here->count, rank, out, dy[l] + here->start * out, out, 1, turned, width, 1, ds,
                    g->s_width, 1, 0);
        turned += width * out;
        ds += rank;
    }
}

static void expand_back(const group *g, const work *w, const block *here, const float *ds,
                        float *dx)
{
    const segment *own = &w->segments[here->segment];
    const float *a = own->a;
    if (!own->threshold) {
        product(here->count, g->in, own->width, ds, g->s_width, 1, a, g->in, 0, dx, g->in,
                own->scale, 1);
        return;
    }
    float back[TOKENS * FEATURES];
    for (int64_t l = 0; l < g->linears; l++) {
        int64_t rank = rank_of(own, l);
        uint32_t key = linear_key(g, own, l);
        for (int64_t f = 0; rank && f < g->in; f += FEATURES) {
            int64_t features = least(FEATURES, g->in - f);
            product(here->count, features, rank, ds, g->s_width, 1, a + f, g->in, 0, back, FEATURES,
                    own->scale, 0);
            drop(g, w, own, key, here->start, here->count, f, features, back, FEATURES, back);
            for (int64_t t = 0; t < here->count; t++)
                for (int64_t i = 0; i < features; i++)
                    dx[t * g->in + f + i] += back[t * FEATURES + i];
        }
        ds += rank;
        a += rank * g->in;
    }
}

/* Some columns of dB of a linear, for all segments in turn. */
static void reduce_b(const group *g, const work *w, int64_t linear, int64_t first, int64_t columns,
                     const float *dy, float *grad)
{
    int64_t out = g->outs[linear];
    for (int64_t i = 0; i < w->num_segments; i++) {
        const segment *own = &w->segments[i];
        const float *s = g->s + own->start * g->s_width;
        for (int64_t l = 0; l < linear; l++)
            s += rank_of(own, l);
        product(rank_of(own, linear), columns, own->stop - own->start, s, 1, g->s_width,
                dy + own->start * out + first, out, 0, grad + row_of(own, linear) * out + first,
                out, own->scale, 1);
    }
}

/* Some columns of dA, for all segments in turn. */
static void reduce_a(const group *g, const work *w, int64_t first, int64_t columns, const float *ds,
                     float *grad)
{
    float kept[TOKENS * FEATURES];
    for (int64_t i = 0; i < w->num_segments; i++) {
        const segment *own = &w->segments[i];
        const float *own_ds = ds + own->start * g->s_width;
        const float *x = g->x + own->start * g->in + first;
        float *to = grad + own->a_row * g->in + first;
        int64_t tokens = own->stop - own->start;
        if (!own->threshold) {
            product(own->width, columns, tokens, own_ds, 1, g->s_width, x, g->in, 0, to, g->in,
                    own->scale, 1);
            continue;
        }
        for (int64_t l = 0; l < g->linears; l++) {
            int64_t rank = rank_of(own, l);
            uint32_t key = linear_key(g, own, l);
            for (int64_t t = 0; rank && t < tokens; t += TOKENS) {
                int64_t count = least(TOKENS, tokens - t);
                drop(g, w, own, key, own->start + t, count, first, columns, x + t * g->in, g->in,
                     kept);
                product(rank, columns, count, own_ds + t * g->s_width, 1, g->s_width, kept,
                        FEATURES, 0, to, g->in, own->scale, 1);
            }
            own_ds += rank;
            to += rank * g->in;
        }
    }
}

/* y += S B, and S is written, or read if it is there. */
int forward(const group *g, float *const *y, int is_written)
{
    work w;
    int outcome = prepare(g, &w, 1);
    if (outcome == DONE) {
#pragma omp parallel num_threads(g->threads) if (g->threads > 1)
        {
            if (!is_written) {
#pragma omp for schedule(dynamic)
                for (int64_t i = 0; i < w.num_segments; i++)
                    if (!is_turned_before(&w, i))
                        turn_a(g, &w, i);
            }
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < w.num_blocks; i++) {
                if (!is_written)
                    shrink(g, &w, &w.blocks[i]);
                expand(g, &w, &w.blocks[i], y);
            }
        }
    }
    forget(&w);
    return outcome;
}

/* dx += ..., grad_a += ..., grad_b += ...; dx may be NULL. ds is room like s. */
int backward(const group *g, const float *const *dy, float *ds, float *dx, float *grad_a,
             float *const *grad_b)
{
    work w;
    int outcome = prepare(g, &w, 0);
    int64_t tasks = (g->in + FEATURES - 1) / FEATURES;
    for (int64_t l = 0; l < g->linears; l++)
        tasks += (g->outs[l] + FEATURES - 1) / FEATURES;
    if (outcome == DONE) {
#pragma omp parallel num_threads(g->threads) if (g->threads > 1)
        {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < w.num_segments; i++)
                if (!is_turned_before(&w, i))
                    turn_b(g, &w, i);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < w.num_blocks; i++) {
                const block *here = &w.blocks[i];
                float *own_ds = ds + here->start * g->s_width;
                shrink_back(g, &w, here, dy, own_ds);
                if (dx)
                    expand_back(g, &w, here, own_ds, dx + here->start * g->in);
            }
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; task++) {
                int64_t first = task * FEATURES, linear = -1;
                /* Those of A, then those of each B. */
                for (int64_t size = g->in; first >= size; size = g->outs[linear])
                    first -= (size + FEATURES - 1) / FEATURES * FEATURES, linear++;
                if (linear < 0)
                    reduce_a(g, &w, first, least(FEATURES, g->in - first), ds, grad_a);
                else
                    reduce_b(g, &w, linear, first, least(FEATURES, g->outs[linear] - first),
                             dy[linear], grad_b[linear]);
            }
        }
    }
    forget(&w);
    return outcome;
}
