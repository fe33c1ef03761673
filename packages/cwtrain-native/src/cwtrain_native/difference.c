/* Where two versions of a tensor differ: XOR, and the runs of zeros in it as sequences for zstd.

   What the rules mean stands in cwtrain.snapshots._sequences, whose numpy code gives the same records byte for byte.
   Nothing is allocated and nothing is global: each caller brings its buffers, and several threads may be here at once.
*/

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* One build serves every x86-64: where the processor has AVX2, the loader takes the second copy of a function. */
#if defined(FOR_EACH_PROCESSOR)
/* said on the command line */
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

#if defined(__GNUC__)
#define VISIBLE __attribute__((visibility("default")))
#else
#define VISIBLE
#endif

enum { WORD = 8, GROUP = 64, GROUP_WORDS = GROUP / WORD };

/* A row of the caller's table: what it asks, and what it is told. */
enum { POSITION, LENGTH, CHANGED, FIRST, RECORDS, COLUMNS };

/* One sequence as zstd takes it. */
enum { OFFSET, LITERALS, MATCH, REPEAT, FIELDS };

#define EQUAL (-1)

static inline uint64_t load(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, WORD);
    return word;
}

/* Bit k: byte k of the word is not zero. */
static inline uint64_t byte_mask(uint64_t word)
{
    const uint64_t low = 0x7f7f7f7f7f7f7f7fu;
    uint64_t high_bits = (((word & low) + low) | word) & ~low;
    return (high_bits >> 7) * 0x0102040810204080u >> 56;
}

/* Set `old` to old XOR new for GROUP bytes. Bit k of the result: byte k is not zero. */
static inline uint64_t xor_group(uint8_t *restrict old, const uint8_t *restrict new)
{
#if defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128();
    uint64_t zeros = 0;
    for (int at = 0; at < GROUP; at += 16) {
        __m128i left = _mm_loadu_si128((const __m128i *)(old + at));
        __m128i both = _mm_xor_si128(left, _mm_loadu_si128((const __m128i *)(new + at)));
        _mm_storeu_si128((__m128i *)(old + at), both);
        zeros |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(both, zero)) << at;
    }
    return ~zeros;
#else
    uint64_t mask = 0;
    for (int at = 0; at < GROUP; at += WORD) {
        uint64_t both = load(old + at) ^ load(new + at);
        memcpy(old + at, &both, WORD);
        mask |= byte_mask(both) << at;
    }
    return mask;
#endif
}

/* The same for the last `words` words of a part, fewer than a group. */
static uint64_t xor_words(uint8_t *restrict old, const uint8_t *restrict new, int words)
{
    uint64_t mask = 0;
    for (int at = 0; at < words * WORD; at += WORD) {
        uint64_t both = load(old + at) ^ load(new + at);
        memcpy(old + at, &both, WORD);
        mask |= byte_mask(both) << at;
    }
    return mask;
}

/* Set `old` to old XOR new; `masks` gets which of its bytes are not zero. Return how many words have such a byte. */
FOR_EACH_PROCESSOR
static int64_t xor_part(uint8_t *restrict old, const uint8_t *restrict new, int64_t words, uint64_t *restrict masks,
                        int64_t *restrict changed)
{
    int64_t groups = words / GROUP_WORDS, bytes = 0, count = 0;
    for (int64_t group = 0; group < groups; group++) {
        uint64_t mask = xor_group(old + group * GROUP, new + group * GROUP);
        masks[group] = mask;
        bytes += __builtin_popcountll(mask);
        count += __builtin_popcountll(byte_mask(mask));
    }
    int rest = (int)(words % GROUP_WORDS);
    if (rest) {
        uint64_t mask = xor_words(old + groups * GROUP, new + groups * GROUP, rest);
        masks[groups] = mask;
        bytes += __builtin_popcountll(mask);
        count += __builtin_popcountll(byte_mask(mask));
    }
    *changed = bytes;
    return count;
}

static inline void write_record(uint32_t *record, int32_t literals, int32_t match)
{
    record[OFFSET] = 1;
    record[LITERALS] = (uint32_t)literals;
    record[MATCH] = (uint32_t)match;
    record[REPEAT] = 0;
}

/* Write a record for each run that is long enough, and return how many there are. */
FOR_EACH_PROCESSOR
static int64_t write_records(const uint64_t *restrict masks, int64_t words, int32_t length, int32_t shortest,
                             uint32_t *restrict records)
{
    int64_t count = 0;
    int32_t from = 1; /* where the next match may begin: after a byte that is not zero and one that is */
    int32_t end = 0;  /* where the last match ended */
    for (int64_t first = 0; first < words; first += GROUP) { /* as many words as a mask has bits */
        uint64_t here = 0;
        int64_t groups = (words - first + GROUP_WORDS - 1) / GROUP_WORDS;
        for (int64_t group = 0; group < GROUP_WORDS && group < groups; group++)
            here |= byte_mask(masks[first / GROUP_WORDS + group]) << group * GROUP_WORDS;
        for (; here; here &= here - 1) {
            int word = __builtin_ctzll(here);
            uint32_t bytes = (masks[first / GROUP_WORDS + word / GROUP_WORDS] >> word % GROUP_WORDS * 8) & 0xff;
            int32_t place = (int32_t)(first + word) * WORD;
            int32_t to = place + __builtin_ctz(bytes);
            int keep = to - from >= shortest;
            write_record(records + count * FIELDS, from - end, to - from); /* without a branch: kept or overwritten */
            count += keep;
            end = keep ? to : end;
            from = place + (31 - __builtin_clz(bytes)) + 2;
        }
    }
    if (length - from >= shortest) {
        write_record(records + count * FIELDS, from - end, length - from);
        count++;
    }
    return count;
}

/* Keep the records of the longer runs only: the others' zeros become literals. */
static int64_t keep_long(uint32_t *records, int64_t count, int32_t shortest)
{
    int64_t kept = 0;
    uint32_t pending = 0;
    for (int64_t at = 0; at < count; at++) {
        uint32_t literals = records[at * FIELDS + LITERALS] + pending, match = records[at * FIELDS + MATCH];
        if ((int32_t)match >= shortest) {
            write_record(records + kept * FIELDS, (int32_t)literals, (int32_t)match);
            kept++;
            pending = 0;
        } else {
            pending = literals + match;
        }
    }
    return kept;
}

/* What this library is asked and tells; a caller that knows another number does not use it. */
VISIBLE int32_t cwtrain_native_version(void)
{
    return 1;
}

/* Set each part of `old` to old XOR new, and find its runs.

   `table` has a row of COLUMNS numbers for each part: POSITION (in both buffers) and LENGTH are given; CHANGED bytes, the
   number of its FIRST record and how many RECORDS it has (EQUAL: all zero; 0: literals only) are told. A part takes up
   whole words, what is beyond its length is zero in both. `masks`: an uint64 for each started 64 bytes of the largest
   part. `records`: room for one of 16 bytes for each word, and one more for each part.
*/
VISIBLE void cwtrain_native_difference(uint8_t *old, const uint8_t *new, int64_t parts, int64_t *table,
                                       uint64_t *masks, uint32_t *records, double dense, int32_t shortest,
                                       double clumped, int32_t clumped_shortest)
{
    int64_t first = 0;
    for (int64_t part = 0; part < parts; part++) {
        int64_t *row = table + part * COLUMNS;
        int64_t words = (row[LENGTH] + WORD - 1) / WORD;
        int64_t count = xor_part(old + row[POSITION], new + row[POSITION], words, masks, &row[CHANGED]);
        row[FIRST] = first;
        if (!count) {
            row[RECORDS] = EQUAL;
        } else if ((double)count > dense * (double)words) {
            row[RECORDS] = 0;
        } else {
            uint32_t *mine = records + first * FIELDS;
            int64_t found = write_records(masks, words, (int32_t)row[LENGTH], shortest, mine);
            if ((double)found < clumped * (double)count)
                found = keep_long(mine, found, clumped_shortest);
            row[RECORDS] = found;
            first += found;
        }
    }
}
