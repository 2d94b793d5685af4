// Fills the arrays of a batch from the token ranges of its spans, in one pass.
//
// assembly/array_filling.py has the same function in numpy, which defines the result, and packs the
// structures below; all their fields have 8 bytes.

#include <stdint.h>
#include <string.h>

// A mapped shard, or tokens in memory.
typedef struct {
    const uint8_t *pointers; // byte offset of each document, int64, not aligned
    const uint8_t *lengths;  // tokens of each document, uint32, not aligned
    const uint8_t *tokens;
    int64_t size; // number of tokens
    int64_t type; // index of the type of a token in FILLERS
} Shard;

// Flags of the tokens of a shard.
typedef struct {
    const uint8_t *codes; // NULL: every token is trained
    int64_t bits;         // 1: one bit per token, lowest first; 0: one byte per token
} Flags;

typedef struct {
    const Shard *shard;
    const Flags *flags; // NULL: every token is trained
    int64_t document;   // index of the document in its shard
    int64_t start;      // first token in the document
    int64_t count;      // number of tokens
} Span;

// Spans of a batch; the last four arrays have an entry for each.
typedef struct {
    const Shard *shards;
    const Flags *flags;     // of each shard; NULL: every token is trained
    const int64_t *numbers; // index of the shard
    const int64_t *documents, *starts, *lengths; // as in Span
} Spans;

typedef struct {
    int64_t rows, row_length, align, shifted, end_id;
    int64_t wide; // 1: ids and labels are int64; 0: int32
    uint8_t *ids, *labels;
    int64_t *positions;
    float *weights;        // NULL if the store has no weights
    const float *decoded;  // weight of each code
    int32_t *span_numbers; // NULL in the rows form
} Batch;

enum { IGNORE_INDEX = -100 };
enum { LINE_BYTES = 64, PAGE_BYTES = 4096, SPANS_AHEAD = 4, MOST_PREFETCHED_BYTES = 16384 };

// With glibc, the processor chooses between the versions of a function when the library is loaded.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif

// Identifies the source that the library was built from; see core/native.py.
int64_t batchloom_kernel_version(void)
{
    return KERNEL_VERSION;
}

VECTORIZED static void fill_positions(int64_t *positions, int64_t first, int64_t count)
{
    for (int64_t k = 0; k < count; k++)
        positions[k] = first + k;
}

VECTORIZED static void fill_int32(int32_t *cells, int64_t count, int32_t value)
{
    for (int64_t k = 0; k < count; k++)
        cells[k] = value;
}

// Copies a span, and returns its highest id, or INT64_MAX if it has a negative one.
#define DEFINE_FILL(NAME, TOKEN, CELL)                                                             \
    VECTORIZED static int64_t fill_##NAME(const uint8_t *source, int64_t count, uint8_t *id_cells, \
                                          uint8_t *label_cells, int64_t shifted)                   \
    {                                                                                              \
        const TOKEN *restrict tokens = (const TOKEN *)source;                                      \
        CELL *restrict ids = (CELL *)id_cells, *restrict labels = (CELL *)label_cells;             \
        TOKEN lowest = tokens[0], highest = tokens[0];                                             \
        for (int64_t k = 0; k < count; k++) {                                                      \
            lowest = tokens[k] < lowest ? tokens[k] : lowest;                                      \
            highest = tokens[k] > highest ? tokens[k] : highest;                                   \
        }                                                                                          \
        if (shifted) {                                                                             \
            ids[0] = (CELL)tokens[0];                                                              \
            for (int64_t k = 1; k < count; k++) {                                                  \
                ids[k] = (CELL)tokens[k];                                                          \
                labels[k - 1] = (CELL)tokens[k];                                                   \
            }                                                                                      \
            labels[count - 1] = IGNORE_INDEX;                                                      \
        } else {                                                                                   \
            for (int64_t k = 0; k < count; k++) {                                                  \
                ids[k] = (CELL)tokens[k];                                                          \
                labels[k] = (CELL)tokens[k];                                                       \
            }                                                                                      \
            labels[0] = IGNORE_INDEX;                                                              \
        }                                                                                          \
        return lowest < 0 ? INT64_MAX : (int64_t)highest;                                          \
    }

#define DEFINE_FILLS(TYPE)                    \
    DEFINE_FILL(TYPE##_wide, TYPE##_t, int64_t) \
    DEFINE_FILL(TYPE##_narrow, TYPE##_t, int32_t)

DEFINE_FILLS(uint8)
DEFINE_FILLS(int8)
DEFINE_FILLS(int16)
DEFINE_FILLS(int32)
DEFINE_FILLS(int64)
DEFINE_FILLS(uint16)
DEFINE_FILLS(uint32)

typedef int64_t (*Filler)(const uint8_t *, int64_t, uint8_t *, uint8_t *, int64_t);

// Types of tokens and their sizes, in the order of _TOKEN_TYPES in store/read/mapped_shards.py.
static const Filler FILLERS[][2] = {
    {fill_uint8_narrow, fill_uint8_wide},   {fill_int8_narrow, fill_int8_wide},
    {fill_int16_narrow, fill_int16_wide},   {fill_int32_narrow, fill_int32_wide},
    {fill_int64_narrow, fill_int64_wide},   {fill_uint16_narrow, fill_uint16_wide},
    {fill_uint32_narrow, fill_uint32_wide},
};
static const int64_t SIZES[] = {1, 1, 2, 4, 8, 2, 4};

static void fill_cells(uint8_t *cells, int64_t wide, int64_t begin, int64_t count, int64_t value)
{
    if (wide)
        for (int64_t k = begin; k < begin + count; k++)
            ((int64_t *)cells)[k] = value;
    else
        fill_int32((int32_t *)cells + begin, count, (int32_t)value);
}

static void fill_padding(const Batch *batch, int64_t cell, int64_t first_position, int64_t count)
{
    fill_cells(batch->ids, batch->wide, cell, count, batch->end_id);
    fill_cells(batch->labels, batch->wide, cell, count, IGNORE_INDEX);
    fill_positions(batch->positions + cell, first_position, count);
    if (batch->weights)
        memset(batch->weights + cell, 0, sizeof(float) * count);
}

// Returns the flag of a token: 0 or 1, or the code of its loss weight.
static inline uint8_t read_flag(const Flags *flags, int64_t token)
{
    if (!flags || !flags->codes)
        return 1;
    return flags->bits ? flags->codes[token >> 3] >> (token & 7) & 1 : flags->codes[token];
}

// Counts the tokens from one on that are known to have its flag: at least one, and of bits those of whole bytes.
static int64_t count_run(const Flags *flags, int64_t token, int64_t most)
{
    if (!flags || !flags->codes)
        return most;
    const uint8_t *codes = flags->codes + (flags->bits ? token >> 3 : token), code = *codes;
    if (flags->bits && (token & 7 || (code != 0 && code != UINT8_MAX)))
        return 1;
    int64_t size = flags->bits ? 8 : 1, run = 0;
    while (run + size <= most && *codes++ == code)
        run += size;
    return run ? run : 1;
}

// Removes the labels of untrained tokens, and fills in loss weights; the first token of a span has no label.
static void apply_flags(const Batch *batch, const Flags *flags, int64_t token, int64_t cell, int64_t count)
{
    int64_t shift = batch->shifted ? 1 : 0, run;
    if (batch->weights)
        batch->weights[batch->shifted ? cell + count - 1 : cell] = 0;
    for (int64_t k = 1; k < count; k += run) {
        uint8_t flag = read_flag(flags, token + k);
        run = count_run(flags, token + k, count - k);
        if (!flag)
            fill_cells(batch->labels, batch->wide, cell + k - shift, run, IGNORE_INDEX);
        for (int64_t cell_of_run = 0; batch->weights && cell_of_run < run; cell_of_run++)
            batch->weights[cell + k - shift + cell_of_run] = batch->decoded[flag];
    }
}

static Span get_span(const Spans *spans, int64_t number)
{
    int64_t shard = spans->numbers[number];
    return (Span){spans->shards + shard, spans->flags ? spans->flags + shard : NULL, spans->documents[number],
                  spans->starts[number], spans->lengths[number]};
}

// Returns the index of the first token of a span in its shard; any number if the index of the shard is damaged.
static int64_t find_token(const Span *span)
{
    int64_t pointer;
    memcpy(&pointer, span->shard->pointers + 8 * span->document, 8);
    return (int64_t)((uint64_t)(pointer / SIZES[span->shard->type]) + (uint64_t)span->start);
}

// Prefetches a span: one byte in every `step`, and the last one. Of longer spans, the processor fetches the rest itself.
static void prefetch_tokens(const Span *span, int64_t step)
{
    int64_t size = SIZES[span->shard->type], token = find_token(span);
    if (token < 0 || token > span->shard->size - span->count)
        return;
    int64_t bytes = size * span->count;
    const uint8_t *tokens = span->shard->tokens + size * token;
    bytes = bytes < MOST_PREFETCHED_BYTES ? bytes : MOST_PREFETCHED_BYTES;
    for (int64_t k = 0; k < bytes; k += step)
        __builtin_prefetch(tokens + k);
    __builtin_prefetch(tokens + bytes - 1);
}

// Fills in a span from a cell on; returns as batchloom_fill.
static int64_t fill_span(const Batch *batch, const Span *span, int64_t cell)
{
    const Shard *shard = span->shard;
    int64_t token = find_token(span), count = span->count, cell_size = batch->wide ? 8 : 4;
    uint32_t length;
    memcpy(&length, shard->lengths + 4 * span->document, 4);
    if (span->start < 0 || count > length || span->start > length - count || token < 0 ||
        token > shard->size - count)
        return -1;
    int64_t highest = FILLERS[shard->type][batch->wide](
        shard->tokens + token * SIZES[shard->type], count, batch->ids + cell_size * cell,
        batch->labels + cell_size * cell, batch->shifted);
    fill_positions(batch->positions + cell, 0, count);
    if (batch->weights || (span->flags && span->flags->codes))
        apply_flags(batch, span->flags, token, cell, count);
    return highest;
}

// Fills the arrays of a batch. Row r has the spans pointers[r] to pointers[r + 1] - 1; for the other arrays see Spans.
// Returns the highest id or the end id, INT64_MAX if one is negative; -1 if a span is not inside its document and its
// row.
int64_t batchloom_fill(const Batch *batch, const int64_t *pointers, const Shard *shards, const Flags *flags,
                       const int64_t *numbers, const int64_t *documents, const int64_t *starts,
                       const int64_t *lengths)
{
    Spans spans = {shards, flags, numbers, documents, starts, lengths};
    int64_t highest = batch->end_id, count = pointers[batch->rows];
    // Documents are far from each other in memory. Prefetch what their addresses are read from, then one line of each
    // page, and all lines a few spans ahead: a prefetch that has to look up its page delays the others.
    for (int64_t number = 0; number < count; number++) {
        Span span = get_span(&spans, number);
        __builtin_prefetch(span.shard->pointers + 8 * span.document);
        __builtin_prefetch(span.shard->lengths + 4 * span.document);
    }
    for (int64_t number = 0; number < count; number++) {
        Span span = get_span(&spans, number);
        prefetch_tokens(&span, PAGE_BYTES);
        int64_t token = find_token(&span);
        if (span.flags && span.flags->codes && token >= 0 && token < span.shard->size)
            __builtin_prefetch(span.flags->codes + (token >> (span.flags->bits ? 3 : 0)));
    }
    for (int64_t row = 0; row < batch->rows; row++) {
        int64_t cell = row * batch->row_length, end = cell + batch->row_length;
        for (int64_t number = pointers[row]; number < pointers[row + 1]; number++) {
            if (number + SPANS_AHEAD < count) {
                Span later = get_span(&spans, number + SPANS_AHEAD);
                prefetch_tokens(&later, LINE_BYTES);
            }
            Span span = get_span(&spans, number);
            if (span.count < 1 || span.count > end - cell)
                return -1;
            int64_t aligned = (span.count + batch->align - 1) / batch->align * batch->align;
            if (aligned > end - cell)
                return -1;
            int64_t highest_of_span = fill_span(batch, &span, cell);
            if (highest_of_span < 0)
                return -1;
            highest = highest_of_span > highest ? highest_of_span : highest;
            fill_padding(batch, cell + span.count, span.count, aligned - span.count);
            if (batch->span_numbers)
                fill_int32(batch->span_numbers + cell, aligned, (int32_t)number);
            cell += aligned;
        }
        fill_padding(batch, cell, 0, end - cell);
        if (batch->span_numbers)
            fill_int32(batch->span_numbers + cell, end - cell, 0);
    }
    return highest;
}
