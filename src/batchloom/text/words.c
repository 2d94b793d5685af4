// Splits texts into words, counts these, and finds repeated n-grams.
//
// text/words.py has the same functions in Python, which define the results. Most segments between white space are split
// here: prefixes, words of ASCII between infixes, and suffixes. The words of the others come from Python, once each.
//
// The state is static: words.py calls these functions in one thread at a time.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// Classes of bytes. LEAD bytes begin a character that may be white space, and OTHER bytes are control characters and
// bytes outside ASCII.
enum { SPACE = 1, LEAD = 2, LETTER = 4, DIGIT = 8, PUNCTUATION = 16, PREFIX = 32, SUFFIX = 64, OTHER = 128 };
// Kinds of words, as in words.py.
enum { SYMBOL = 1, HAS_LETTER = 2 };
enum { MOST_SEGMENTS = 1 << 17, MOST_SEGMENT_BYTES = 1 << 23, MOST_UNKNOWN = 1 << 12, MOST_RESERVED = 1 << 12 };
// Memory beyond this is released before the next text.
enum { MOST_KEPT_BYTES = 1 << 24 };
// Length of the prefix by which longer n-grams are compared first.
enum { BEGINNING_BYTES = 16 };
enum { NO_EXCESS = -1, OUT_OF_MEMORY = -2 };

typedef struct {
    void *data;
    int64_t capacity;
} Memory;

// A segment and its words, or a word.
typedef struct {
    uint64_t hash;
    uint32_t key, size; // first byte in the table's bytes, and their number
    uint32_t first_word, word_count;
} Entry;

typedef struct {
    uint32_t *slots; // index of an entry + 1, at its hash or the next free slot
    uint32_t mask, count;
    Entry *entries;
    Memory bytes;
    int64_t size;
} Table;

// Number of words of a text, of those of each kind, and characters of words that are not symbols.
typedef struct {
    int64_t words, symbols, letter_words, characters;
} Counts;

typedef struct {
    uint32_t tag;   // upper half of the hash
    uint32_t first; // index of the first word of the first such n-gram + 1; 0: the slot is free
} Slot;

static uint8_t classes[256];
// Pairs of affixes that may be one word together.
static uint8_t is_joined[128][128];

static uint32_t reserved_slots[2 * MOST_RESERVED], segment_slots[2 * MOST_SEGMENTS];
static Entry reserved_entries[MOST_RESERVED], segment_entries[MOST_SEGMENTS];
static Table reserved = {reserved_slots, 2 * MOST_RESERVED - 1, 0, reserved_entries, {0, 0}, 0};
static Table segments = {segment_slots, 2 * MOST_SEGMENTS - 1, 0, segment_entries, {0, 0}, 0};
// For each word of a segment 4 x bytes + kind.
static Memory segment_words;
static int64_t segment_word_count;

// The text: its bytes without white space, and the first byte of each word and of the next one.
static Memory letter_memory, bound_memory;
static uint8_t *letters;
static uint32_t *bounds;
static Counts counts;
static int64_t position; // in the text, after the words
static int is_ascii;
// Segments whose words Python has not defined yet, each followed by a space.
static Memory unknown;
static int64_t unknown_size, unknown_count;

// N-grams are named by their first words. Of each: the first equal one, and its count. And those that may be repeated.
static Memory first_memory, times_memory, candidate_memory;
static int64_t candidate_count;
// Slots of different n-grams.
static Memory slot_memory;
static uint64_t slot_mask;

// Identifies the source that the library was built from; see core/native.py.
int64_t batchloom_kernel_version(void)
{
    return KERNEL_VERSION;
}

// Makes room for a number of bytes, and keeps those that are there. Returns 0 without memory.
static int reserve(Memory *memory, int64_t bytes)
{
    if (bytes <= memory->capacity)
        return 1;
    bytes += bytes / 4;
    void *data = realloc(memory->data, bytes);
    if (!data)
        return 0;
    memory->data = data;
    memory->capacity = bytes;
    return 1;
}

static void release_large(Memory *memory)
{
    if (memory->capacity > MOST_KEPT_BYTES) {
        free(memory->data);
        *memory = (Memory){0, 0};
    }
}

static uint64_t read_bytes(const uint8_t *bytes, int64_t size)
{
    uint64_t value = 0;
    if (size >= 4) {
        uint32_t low, high;
        memcpy(&low, bytes, 4);
        memcpy(&high, bytes + size - 4, 4);
        value = (uint64_t)high << 32 | low;
    } else if (size > 0) {
        value = bytes[0] | bytes[size / 2] << 8 | bytes[size - 1] << 16;
    }
    return value;
}

static uint64_t mix(uint64_t hash)
{
    hash *= 0x9E3779B97F4A7C15;
    return hash ^ hash >> 32;
}

static uint64_t hash_bytes(const uint8_t *bytes, int64_t size)
{
    uint64_t hash = size, value;
    for (; size > 8; bytes += 8, size -= 8) {
        memcpy(&value, bytes, 8);
        hash = mix(hash ^ value);
    }
    return mix(mix(hash ^ read_bytes(bytes, size)));
}

static void clear_table(Table *table)
{
    memset(table->slots, 0, sizeof(uint32_t) * (table->mask + 1));
    table->count = table->size = 0;
    release_large(&table->bytes);
}

static Entry *find_entry(const Table *table, const uint8_t *key, int64_t size, uint64_t hash)
{
    for (uint32_t slot = hash & table->mask; table->slots[slot]; slot = (slot + 1) & table->mask) {
        Entry *entry = table->entries + table->slots[slot] - 1;
        const uint8_t *bytes = table->bytes.data;
        if (entry->hash == hash && entry->size == size && !memcmp(bytes + entry->key, key, size))
            return entry;
    }
    return NULL;
}

// Adds an entry for the last bytes of the table, unless there is one.
static void add_entry(Table *table, uint32_t size, uint32_t first_word, uint32_t word_count)
{
    uint32_t key = table->size - size, slot;
    const uint8_t *bytes = table->bytes.data;
    uint64_t hash = hash_bytes(bytes + key, size);
    if (find_entry(table, bytes + key, size, hash))
        return;
    for (slot = hash & table->mask; table->slots[slot]; slot = (slot + 1) & table->mask)
        ;
    table->entries[table->count++] = (Entry){hash, key, size, first_word, word_count};
    table->slots[slot] = table->count;
}

// Sets the rules: ASCII characters that are a prefix, or a suffix, in any context; pairs of them that may be one word
// together; and lines of words of ASCII that depend on what is before or after them.
// Returns OUT_OF_MEMORY without memory, as the other functions do.
int64_t batchloom_set_rules(const char *prefixes, const char *suffixes, const char *pairs, const char *words)
{
    memset(classes, OTHER, 256);
    for (int byte = 0; byte < 128; byte++)
        if ((byte | 32) >= 'a' && (byte | 32) <= 'z')
            classes[byte] = LETTER;
        else if (byte >= '0' && byte <= '9')
            classes[byte] = DIGIT;
        else if (byte > ' ' && byte < 127)
            classes[byte] = PUNCTUATION;
        else if ((byte >= '\t' && byte <= '\r') || (byte >= 0x1C && byte <= ' '))
            classes[byte] = SPACE;
    classes[0xC2] = classes[0xE1] = classes[0xE2] = classes[0xE3] = OTHER | LEAD;
    for (; *prefixes; prefixes++)
        classes[(uint8_t)*prefixes] |= PREFIX;
    for (; *suffixes; suffixes++)
        classes[(uint8_t)*suffixes] |= SUFFIX;
    for (; *pairs; pairs += 2)
        is_joined[(uint8_t)pairs[0]][(uint8_t)pairs[1]] = 1;
    clear_table(&reserved);
    if (!reserve(&reserved.bytes, strlen(words)))
        return OUT_OF_MEMORY;
    for (int64_t size; *words; words += size + 1) {
        if (reserved.count == MOST_RESERVED)
            return OUT_OF_MEMORY;
        size = strchr(words, '\n') - words;
        memcpy((uint8_t *)reserved.bytes.data + reserved.size, words, size);
        reserved.size += size;
        add_entry(&reserved, size, 0, 0);
    }
    return 0;
}

// Returns the bytes of the white space that a text begins with, or 0: that of Python's str.isspace.
static int64_t measure_space(const uint8_t *text, int64_t size)
{
    uint8_t byte = text[0];
    if (!(classes[byte] & (SPACE | LEAD)))
        return 0;
    if (classes[byte] & SPACE)
        return 1;
    if (byte == 0xC2)
        return size > 1 && (text[1] == 0x85 || text[1] == 0xA0) ? 2 : 0;
    if (size < 3)
        return 0;
    uint8_t second = text[1], third = text[2];
    int is_space = byte == 0xE1 && second == 0x9A && third == 0x80;
    if (byte == 0xE2 && second == 0x80)
        is_space = third <= 0x8A || third == 0xA8 || third == 0xA9 || third == 0xAF;
    else if (byte == 0xE2)
        is_space = second == 0x81 && third == 0x9F;
    else if (byte == 0xE3)
        is_space = second == 0x80 && third == 0x80;
    return is_space ? 3 : 0;
}

static int64_t count_characters(const uint8_t *bytes, int64_t size)
{
    int64_t characters = size;
    for (int64_t k = 0; k < size; k++)
        characters -= (bytes[k] & 0xC0) == 0x80;
    return characters;
}

static void add_word(int64_t size, int64_t characters, int kind)
{
    bounds[counts.words + 1] = bounds[counts.words] + size;
    counts.words++;
    counts.symbols += kind & SYMBOL;
    counts.letter_words += kind >> 1;
    counts.characters += kind & SYMBOL ? 0 : characters;
}

// Adds a word of ASCII; returns 0 if an exception may apply to it.
static int add_ascii_word(const uint8_t *word, int64_t size)
{
    int any = 0, all = PUNCTUATION;
    for (int64_t k = 0; k < size; k++) {
        any |= classes[word[k]];
        all &= classes[word[k]];
    }
    if (find_entry(&reserved, word, size, hash_bytes(word, size)))
        return 0;
    add_word(size, size, (all ? SYMBOL : 0) | (any & LETTER ? HAS_LETTER : 0));
    return 1;
}

// Returns the bytes of the infix at a byte of a core, or 0.
static int64_t measure_infix(const uint8_t *core, int64_t size, int64_t at)
{
    if (at == 0 || at + 1 >= size || !(classes[core[at]] & PUNCTUATION))
        return 0;
    uint8_t byte = core[at], previous = classes[core[at - 1]], next = classes[core[at + 1]];
    int is_after_word = previous & (LETTER | DIGIT);
    if (strchr("+-*^", byte) && previous & DIGIT && (next & DIGIT || core[at + 1] == '-'))
        return 1;
    if (byte == ',')
        return previous & LETTER && next & LETTER;
    if (strchr("~:<>=/", byte))
        return is_after_word && next & LETTER;
    if (byte != '-' || !is_after_word)
        return 0;
    int64_t dashes = 1;
    while (dashes < 3 && at + dashes < size && core[at + dashes] == '-')
        dashes++;
    return at + dashes < size && classes[core[at + dashes]] & LETTER ? dashes : 0;
}

// Returns whether a full stop in a core is neither an infix nor at an edge of a word: between letters or digits, but
// not after a lowercase letter and before a capital one.
static int is_inner_stop(const uint8_t *core, int64_t size, int64_t at)
{
    uint8_t previous = at ? core[at - 1] : 0, next = at + 1 < size ? core[at + 1] : 0;
    int is_infix = previous >= 'a' && previous <= 'z' && next >= 'A' && next <= 'Z';
    return classes[previous] & (LETTER | DIGIT) && classes[next] & (LETTER | DIGIT) && !is_infix;
}

// Adds the words of a segment without affixes; returns 0 if exceptions, units or URLs may apply.
static int add_core(const uint8_t *core, int64_t size)
{
    int has_stops = 0;
    for (int64_t k = 0; k < size; k++) {
        if (core[k] == '$' || (core[k] == '.' && !is_inner_stop(core, size, k)))
            return 0;
        has_stops |= core[k] == '.';
    }
    // Other characters are affixes that depend on their neighbors.
    for (int end = 0; end < 2; end++) {
        uint8_t byte = core[end ? size - 1 : 0];
        if (!(classes[byte] & (LETTER | DIGIT)) && (!byte || !strchr("-/=@\\^|~", byte)))
            return 0;
    }
    // 5km, 5km/h, it's
    int64_t stop = size;
    while (stop > 0 && (classes[core[stop - 1]] & LETTER || core[stop - 1] == '/'))
        stop--;
    if (stop > 0 && stop < size && classes[core[stop - 1]] & DIGIT)
        return 0;
    if (size > 1 && core[size - 2] == '\'' && (core[size - 1] | 32) == 's')
        return 0;
    int64_t start = 0, infix;
    for (int64_t at = 1; at < size; at += infix ? infix : 1) {
        infix = measure_infix(core, size, at);
        if (infix) {
            // URLs are not split at infixes.
            if (has_stops || !add_ascii_word(core + start, at - start))
                return 0;
            add_word(infix, infix, SYMBOL);
            start = at + infix;
        }
    }
    return add_ascii_word(core + start, size - start);
}

// Returns whether a full stop after some bytes is a word.
static int is_suffix_stop(const uint8_t *bytes, int64_t size)
{
    uint8_t last = bytes[size - 1], before = size > 1 ? bytes[size - 2] : 0;
    int is_capital = last >= 'A' && last <= 'Z', is_capital_before = before >= 'A' && before <= 'Z';
    return is_capital ? is_capital_before : classes[last] & (LETTER | DIGIT | SUFFIX);
}

// Adds the words of a segment of ASCII; returns 0 if they depend on more than these rules.
static int add_ascii_segment(const uint8_t *segment, int64_t size)
{
    int64_t start = 0, stop = size;
    while (start < stop && (classes[segment[start]] & (PREFIX | SUFFIX) || segment[start] == '.'))
        start++;
    while (start < stop && (classes[segment[stop - 1]] & (PREFIX | SUFFIX) || segment[stop - 1] == '.'))
        stop--;
    if (start == stop)
        return 0;
    for (int64_t k = 0; k < start; k++) {
        if (!(classes[segment[k]] & PREFIX) || (k && is_joined[segment[k - 1]][segment[k]]))
            return 0;
        add_word(1, 1, SYMBOL);
    }
    if (!add_core(segment + start, stop - start))
        return 0;
    for (int64_t k = stop; k < size; k++) {
        if (k > stop && is_joined[segment[k - 1]][segment[k]])
            return 0;
        if (!(classes[segment[k]] & SUFFIX) && !(segment[k] == '.' && is_suffix_stop(segment, k)))
            return 0;
        add_word(1, 1, SYMBOL);
    }
    return 1;
}

// Adds the words of a segment whose bytes are of some classes; returns 0 if they are unknown.
static int add_segment(const uint8_t *segment, int64_t size, int all_classes)
{
    int is_plain = !(all_classes & OTHER);
    if (all_classes == LETTER && add_ascii_word(segment, size))
        return 1;
    if (is_plain) {
        Counts before = counts;
        if (add_ascii_segment(segment, size))
            return 1;
        counts = before;
    }
    const Entry *entry = find_entry(&segments, segment, size, hash_bytes(segment, size));
    if (!entry)
        return 0;
    const uint32_t *words = (const uint32_t *)segment_words.data + entry->first_word;
    for (uint32_t k = 0; k < entry->word_count; k++) {
        int64_t bytes = words[k] >> 2;
        add_word(bytes, is_plain ? bytes : count_characters(segment, bytes), words[k] & 3);
        segment += bytes;
    }
    return 1;
}

static int start_text(int64_t size)
{
    Memory *memories[] = {&letter_memory, &bound_memory,     &unknown,    &first_memory,
                          &times_memory,  &candidate_memory, &slot_memory};
    for (size_t k = 0; k < sizeof(memories) / sizeof(*memories); k++)
        release_large(memories[k]);
    // A text has at most as many words as bytes. The system allocates pages only when they are written.
    if (!reserve(&letter_memory, size + BEGINNING_BYTES) || !reserve(&bound_memory, 4 * (size + 1)))
        return 0;
    letters = letter_memory.data;
    bounds = bound_memory.data;
    bounds[0] = 0;
    counts = (Counts){0, 0, 0, 0};
    position = 0;
    is_ascii = 1;
    return 1;
}

static int add_unknown(const uint8_t *segment, int64_t size)
{
    if (!reserve(&unknown, unknown_size + size + 1))
        return 0;
    uint8_t *end = (uint8_t *)unknown.data + unknown_size;
    memcpy(end, segment, size);
    end[size] = ' ';
    unknown_size += size + 1;
    unknown_count++;
    return 1;
}

// Splits a text of UTF-8 from its start, or from where an earlier call has stopped, and counts its words.
// Returns 0 at its end, or else the bytes of the unknown segments.
int64_t batchloom_split(const uint8_t *text, int64_t size, int64_t is_new, Counts *text_counts)
{
    if (is_new && !start_text(size))
        return OUT_OF_MEMORY;
    unknown_size = unknown_count = 0;
    int64_t at = position, start, space;
    while (at < size && unknown_count < MOST_UNKNOWN) {
        space = measure_space(text + at, size - at);
        if (space) {
            at += space;
            continue;
        }
        int all_classes = 0;
        for (start = at; at < size && !measure_space(text + at, size - at); at++)
            all_classes |= classes[text[at]];
        Counts before = counts;
        int is_known = add_segment(text + start, at - start, all_classes);
        if (is_known && !unknown_count) {
            memcpy(letters + bounds[before.words], text + start, at - start);
            is_ascii &= !(all_classes & OTHER);
            position = at;
            continue;
        }
        counts = before;
        if (!is_known && !add_unknown(text + start, at - start))
            return OUT_OF_MEMORY;
    }
    memset(letters + bounds[counts.words], 0, BEGINNING_BYTES);
    *text_counts = counts;
    return unknown_size;
}

const void *batchloom_get_unknown(void)
{
    return unknown.data;
}

// Defines the words of at most MOST_UNKNOWN segments: each word ends with a space, and each segment with a line break.
int64_t batchloom_define(const uint8_t *words, int64_t size, const uint8_t *kinds)
{
    if (segments.count + MOST_UNKNOWN > MOST_SEGMENTS || segments.size + size > MOST_SEGMENT_BYTES) {
        clear_table(&segments);
        segment_word_count = 0;
        release_large(&segment_words);
    }
    if (!reserve(&segments.bytes, segments.size + size) || !reserve(&segment_words, 4 * (segment_word_count + size)))
        return OUT_OF_MEMORY;
    uint8_t *bytes = segments.bytes.data;
    uint32_t *word_sizes = segment_words.data;
    int64_t first_byte = segments.size, first_word = segment_word_count, first_of_word = segments.size;
    for (int64_t k = 0; k < size; k++) {
        if (words[k] == ' ') {
            word_sizes[segment_word_count++] = 4 * (segments.size - first_of_word) + *kinds++;
            first_of_word = segments.size;
        } else if (words[k] == '\n') {
            add_entry(&segments, segments.size - first_byte, first_word, segment_word_count - first_word);
            first_byte = segments.size;
            first_word = segment_word_count;
        } else {
            bytes[segments.size++] = words[k];
        }
    }
    return 0;
}

// Returns a word of the text, and its bytes in `size`.
const void *batchloom_get_word(int64_t word, int64_t *size)
{
    *size = bounds[word + 1] - bounds[word];
    return letters + bounds[word];
}

// Makes free slots for a number of n-grams; returns 0 without memory.
static int clear_slots(int64_t ngrams)
{
    int64_t slots = 16;
    while (slots < ngrams + ngrams / 2)
        slots *= 2;
    if (!reserve(&slot_memory, slots * sizeof(Slot)))
        return 0;
    memset(slot_memory.data, 0, slots * sizeof(Slot));
    slot_mask = slots - 1;
    return 1;
}

// N-grams are equal if they have the same bytes, and, where `same_words` is set, the same words.
static int are_equal(int64_t word, int64_t other, int64_t n, int same_words)
{
    uint32_t size = bounds[word + n] - bounds[word];
    if (bounds[other + n] - bounds[other] != size || memcmp(letters + bounds[word], letters + bounds[other], size))
        return 0;
    for (int64_t k = 1; same_words && k < n; k++)
        if (bounds[word + k] - bounds[word] != bounds[other + k] - bounds[other])
            return 0;
    return 1;
}

// Returns the first word of the first n-gram that equals that of a word, which may be this one itself.
static int64_t find_first(int64_t word, int64_t n, int same_words)
{
    uint64_t hash = hash_bytes(letters + bounds[word], bounds[word + n] - bounds[word]);
    Slot *slots = slot_memory.data;
    uint32_t tag = hash >> 32;
    uint64_t slot = hash & slot_mask;
    for (; slots[slot].first; slot = (slot + 1) & slot_mask)
        if (slots[slot].tag == tag && are_equal(word, slots[slot].first - 1, n, same_words))
            return slots[slot].first - 1;
    slots[slot] = (Slot){tag, word + 1};
    return word;
}

static int64_t measure_ngram(int64_t word, int64_t n)
{
    uint32_t size = bounds[word + n] - bounds[word];
    return is_ascii ? size : count_characters(letters + bounds[word], size);
}

// Counts equal n-grams; returns 0 without memory.
static int count_ngrams(int64_t n)
{
    int64_t bytes = 4 * counts.words;
    if (!clear_slots(counts.words) || !reserve(&first_memory, bytes) || !reserve(&times_memory, bytes))
        return 0;
    uint32_t *firsts = first_memory.data, *times = times_memory.data;
    memset(times, 0, bytes);
    for (int64_t word = 0; word <= counts.words - n; word++) {
        firsts[word] = find_first(word, n, 1);
        times[firsts[word]]++;
    }
    return 1;
}

// Returns whether the most frequent n-gram may have more than a number of characters: it is at most as frequent as the
// shorter one that it begins with, which has been counted.
static int may_exceed(int64_t n, double characters)
{
    const uint32_t *firsts = first_memory.data, *times = times_memory.data;
    for (int64_t word = 0; word <= counts.words - n; word++)
        if ((double)times[firsts[word]] * (bounds[word + n] - bounds[word] + n - 1) > characters)
            return 1;
    return 0;
}

// Lists the words that n-grams, of at least n words, may be repeated from: a long one repeats only if another one
// begins with the same bytes. Returns 0 without memory.
static int list_candidates(int64_t n)
{
    if (!clear_slots(counts.words) || !reserve(&candidate_memory, 4 * counts.words) ||
        !reserve(&times_memory, 4 * counts.words))
        return 0;
    // The counts are no longer needed.
    uint32_t *candidates = candidate_memory.data, *is_shared = times_memory.data;
    Slot *slots = slot_memory.data;
    for (int64_t word = 0; word < counts.words; word++) {
        uint64_t hash = hash_bytes(letters + bounds[word], BEGINNING_BYTES), slot = hash & slot_mask;
        uint32_t tag = hash >> 32;
        while (slots[slot].first &&
               (slots[slot].tag != tag ||
                memcmp(letters + bounds[word], letters + bounds[slots[slot].first - 1], BEGINNING_BYTES)))
            slot = (slot + 1) & slot_mask;
        is_shared[word] = slots[slot].first != 0;
        if (slots[slot].first)
            is_shared[slots[slot].first - 1] = 1;
        else
            slots[slot] = (Slot){tag, word + 1};
    }
    candidate_count = 0;
    for (int64_t word = 0; word <= counts.words - n; word++)
        if (is_shared[word] || bounds[word + n] - bounds[word] < BEGINNING_BYTES)
            candidates[candidate_count++] = word;
    return 1;
}

// Returns the characters of repeated n-grams, as datatrove's find_all_duplicate: their words are skipped, and n-grams
// that begin in them are not recorded. Returns OUT_OF_MEMORY without memory.
static int64_t measure_repeated_ngrams(int64_t n)
{
    if (!clear_slots(candidate_count))
        return OUT_OF_MEMORY;
    const uint32_t *candidates = candidate_memory.data;
    int64_t characters = 0, next = 0;
    for (int64_t k = 0; k < candidate_count && candidates[k] + n <= counts.words; k++)
        if (candidates[k] >= next && find_first(candidates[k], n, 0) != candidates[k]) {
            characters += measure_ngram(candidates[k], n);
            next = candidates[k] + n;
        }
    return characters;
}

// Finds the first limit that the text exceeds: first those of its most frequent n-gram, then those of all its repeated
// n-grams, each by ascending n. A limit is a share of the characters of the text. Returns the index of the limit, or
// NO_EXCESS. result[0] is the number of characters; of the most frequent n-gram, result[1] is its count, and result[2]
// its first word.
int64_t batchloom_find_excess(int64_t characters, int64_t tops, int64_t limit_count, const int64_t *sizes,
                              const double *limits, int64_t *result)
{
    int has_counts = 0;
    for (int64_t k = 0; k < tops; k++) {
        int64_t n = sizes[k], top = 0;
        // The margin is for rounding.
        if (n > counts.words || (has_counts && !may_exceed(n, limits[k] * characters * (1 - 1e-9))))
            continue;
        if (!count_ngrams(n))
            return OUT_OF_MEMORY;
        has_counts = 1;
        const uint32_t *times = times_memory.data;
        for (int64_t word = 1; word <= counts.words - n; word++)
            top = times[word] > times[top] ? word : top;
        result[0] = times[top] * (measure_ngram(top, n) + n - 1);
        result[1] = times[top];
        result[2] = top;
        if ((double)result[0] / characters > limits[k])
            return k;
    }
    if (tops < limit_count && !list_candidates(sizes[tops]))
        return OUT_OF_MEMORY;
    for (int64_t k = tops; k < limit_count; k++) {
        result[0] = measure_repeated_ngrams(sizes[k]);
        if (result[0] < 0)
            return OUT_OF_MEMORY;
        if ((double)result[0] / characters > limits[k])
            return k;
    }
    return NO_EXCESS;
}
