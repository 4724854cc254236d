/* The ranks of one host reduce in memory that all of them see.
 *
 * Every rank brings an arena; each maps them all. In rank 0's arena are the counters, in every arena are that rank's
 * board (what it says about an operation, and small data) and its window (pieces of larger data on their way).
 * Operations of one stream run one after the other, in the same order on every rank; the k-th looks like this:
 *
 *     each rank    board[k % 2] = label, and the data if it is small
 *                  posted += 1                     ── all wait for posted = n·k ──
 *                  the labels differ? every rank sees it, and nothing is touched
 *     SMALL        each adds up all boards
 *     DIRECT       the data lies in segments that all have mapped: blocks are taken, one's own part first and then
 *                  whatever is left, added in registers and written to all
 *                  finished[k % 2] += blocks       ── all wait for finished = all blocks ──
 *     STAGED       the data is anywhere: it goes through the windows piece by piece; see staged()
 *     SCATTER      as DIRECT, but each adds up its own range into its own buffer only
 *     GATHER       each fetches the others' ranges     ── and waits until all have ──
 *     SHED         as SCATTER, of data that is anywhere: through the windows, like STAGED
 *     SHARE        as GATHER, likewise
 *
 * A rank posts k+1 only when it has left k; so whoever has passed the arrival at k+1 knows that nobody is in k any
 * more, and slot k % 2 may be used again for k+2. Whoever adds, it adds in rank order: all paths give the same bits.
 *
 * A rank that dies is noticed by every wait; nothing here blocks for longer than the deadline it was given. */
#define _GNU_SOURCE
#include "sums.h"
#include "waiting.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define NUM_STREAMS 3
#define NUM_SLOTS 4    /* pieces of a window that may be under way: see staged() */
#define LABEL_NBYTES 64 /* what ranks compare before they touch anything */
#define BLOCK_NBYTES (128u << 10)
#define LEAST_PIECE_NBYTES (64u << 10)
#define LINE 64
#define FEW 3 /* ranks: up to here each adds up everything */

enum kind { SMALL, DIRECT, STAGED, SCATTER, GATHER, SHED, SHARE };

/* The counters of one stream; they live in rank 0's arena. */
typedef struct {
    word_t abandoned; /* stream 0's: somebody gave up, nobody shall go on */
    word_t posted;
    word_t finished[2];
    word_t arrived[2][NUM_SLOTS]; /* of pieces: copied in, and added up */
    /* word_t next[2][n] follows, of each rank's part: the block to take next */
} counters_t;

/* One operation: what is asked for, then how far it is. Mirrored in library.py. */
typedef struct {
    char label[LABEL_NBYTES];
    void *data;               /* this rank's elements; SHED: where its sum goes */
    void *const *bases;       /* DIRECT, SCATTER, GATHER: where each rank's elements are
                                 SHED, SHARE: here, what each rank is to get; where what it brings goes */
    const uint64_t *bounds;   /* SCATTER, GATHER: where each rank's range begins and ends */
    uint64_t count;           /* SHED, SHARE: of one rank's part */
    double scale;
    int32_t kind, dtype;
    double finished_at;
    int32_t begun, culprit;
    uint32_t piece, step;
} op_t;

typedef struct {
    counters_t *counters;
    char **boards;
    char **windows;
    uint64_t row_nbytes, window_nbytes;
    uint32_t number;     /* of operations begun */
    uint64_t pieces;     /* of all operations so far; 32 bits would be a petabyte */
} stream_t;

typedef struct job {
    op_t op;
    int32_t result;
    _Atomic int holders;
    word_t done;
    struct job *next;
    char labels[]; /* after a mismatch: what each rank brought */
} job_t;

typedef struct {
    int size, rank, spin;
    int *pidfds;
    _Atomic int aborted;
    stream_t streams[NUM_STREAMS];
    /* The worker, and what it has to do. */
    pthread_t worker;
    int has_worker;
    pthread_mutex_t lock;
    pthread_cond_t some;
    job_t *first, *last;
    int closing;
} team_t;

/* Where things are in an arena: the same arithmetic on every rank. */

static uint64_t lines(uint64_t nbytes) { return (nbytes + LINE - 1) / LINE * LINE; }

static uint64_t counters_nbytes(int size) { return sizeof(counters_t) + 2 * (uint64_t)size * sizeof(word_t); }

uint64_t gradsync_arena_nbytes(int size, const uint64_t *row_nbytes, const uint64_t *window_nbytes) {
    uint64_t total = 0;
    for (int s = 0; s < NUM_STREAMS; s++)
        total += counters_nbytes(size) + 2 * lines(row_nbytes[s]) + NUM_SLOTS * lines(window_nbytes[s]);
    return total;
}

team_t *gradsync_open(int size, int rank, void *const *arenas, const int *pidfds, const uint64_t *row_nbytes,
                      const uint64_t *window_nbytes, int spin) {
    if (size < 1 || size > MAX_RANKS) return NULL;
    team_t *team = calloc(1, sizeof *team);
    if (!team) return NULL;
    team->size = size, team->rank = rank, team->spin = spin;
    team->pidfds = malloc((size_t)size * sizeof *team->pidfds);
    char **pointers = malloc(2 * NUM_STREAMS * (size_t)size * sizeof *pointers);
    if (!team->pidfds || !pointers) return free(team->pidfds), free(pointers), free(team), NULL;
    memcpy(team->pidfds, pidfds, (size_t)size * sizeof *pidfds);
    uint64_t at = 0;
    for (int s = 0; s < NUM_STREAMS; s++) {
        stream_t *stream = &team->streams[s];
        stream->row_nbytes = lines(row_nbytes[s]), stream->window_nbytes = lines(window_nbytes[s]);
        stream->boards = pointers + 2 * s * size, stream->windows = stream->boards + size;
        stream->counters = (counters_t *)((char *)arenas[0] + at);
        at += counters_nbytes(size);
        for (int r = 0; r < size; r++) {
            stream->boards[r] = (char *)arenas[r] + at;
            stream->windows[r] = stream->boards[r] + 2 * stream->row_nbytes;
        }
        at += 2 * stream->row_nbytes + NUM_SLOTS * stream->window_nbytes;
    }
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->some, NULL);
    return team;
}

static word_t *next_block(stream_t *stream, int size, uint32_t number, int rank) {
    return (word_t *)((char *)stream->counters + sizeof(counters_t)) + (number % 2) * (uint32_t)size + rank;
}

static char *board(stream_t *stream, int rank, uint32_t number) {
    return stream->boards[rank] + (number % 2) * stream->row_nbytes;
}

/* Arrival: everything begins with it. */

static void post(team_t *team, stream_t *stream, const void *label, uint64_t label_nbytes, const void *data,
                 uint64_t nbytes) {
    char *mine = board(stream, team->rank, ++stream->number);
    memcpy(mine, label, label_nbytes);
    if (nbytes) memcpy(mine + label_nbytes, data, nbytes);
    count_up(&stream->counters->posted, 1, stream->number * (uint32_t)team->size);
}

static int arrive(team_t *team, stream_t *stream, watch_t *watch) {
    int result = wait_for(&stream->counters->posted, stream->number * (uint32_t)team->size, watch);
    /* Even if all are here: who woke up too late must not go on alone. */
    if (result == DONE && given_up(watch)) return ABORTED;
    if (result == DONE && team->rank == 0) { /* nobody is in the operation before any more: clear its slot */
        uint32_t other = stream->number + 1;
        atomic_store_explicit(&stream->counters->finished[other % 2].value, 0, memory_order_relaxed);
        for (int r = 0; r < team->size; r++)
            atomic_store_explicit(&next_block(stream, team->size, other, r)->value, 0, memory_order_relaxed);
    }
    return result;
}

static int same_labels(team_t *team, stream_t *stream) {
    for (int r = 1; r < team->size; r++)
        if (memcmp(board(stream, 0, stream->number), board(stream, r, stream->number), LABEL_NBYTES)) return 0;
    return 1;
}

/* What each kind does after it. */

static void sum_range(void *const *bases, int num_in, void *const *outs, int num_out, const op_t *op, uint64_t from,
                      uint64_t to) {
    const void *in[MAX_RANKS];
    void *out[MAX_RANKS];
    uint64_t offset = from * item_nbytes(op->dtype);
    for (int r = 0; r < num_in; r++) in[r] = (char *)bases[r] + offset;
    for (int r = 0; r < num_out; r++) out[r] = (char *)outs[r] + offset;
    sum_of(op->dtype)(in, num_in, out, num_out, to - from, op->scale);
}

static void small(team_t *team, stream_t *stream, op_t *op) {
    void *rows[MAX_RANKS];
    for (int r = 0; r < team->size; r++) rows[r] = board(stream, r, stream->number) + LABEL_NBYTES;
    sum_range(rows, team->size, &op->data, 1, op, 0, op->count);
}

/* Part r of `count` elements in `size` parts, each a whole number of cache lines but the last. */
static uint64_t part(const op_t *op, int size, int rank) {
    uint64_t line = LINE / item_nbytes(op->dtype), all = (op->count + line - 1) / line;
    uint64_t begin = line * (all / (uint64_t)size * (uint64_t)rank +
                             (all % (uint64_t)size < (uint64_t)rank ? all % (uint64_t)size : (uint64_t)rank));
    return begin < op->count ? begin : op->count;
}

static uint32_t num_blocks(const op_t *op, int size, int rank, uint64_t block) {
    return (uint32_t)((part(op, size, rank + 1) - part(op, size, rank) + block - 1) / block);
}

/* Take blocks until none is left; return how many there are in all. */
static uint32_t direct(team_t *team, stream_t *stream, op_t *op) {
    uint64_t block = BLOCK_NBYTES / item_nbytes(op->dtype);
    uint32_t total = 0, done = 0;
    for (int r = 0; r < team->size; r++) total += num_blocks(op, team->size, r, block);
    if (op->step) return total;
    for (int i = 0; i < team->size; i++) {
        int owner = (team->rank + i) % team->size;
        uint32_t blocks = num_blocks(op, team->size, owner, block), b;
        word_t *next = next_block(stream, team->size, stream->number, owner);
        while (atomic_load(&next->value) < blocks && (b = atomic_fetch_add(&next->value, 1)) < blocks) {
            uint64_t from = part(op, team->size, owner) + b * block, end = part(op, team->size, owner + 1);
            sum_range(op->bases, team->size, op->bases, team->size, op, from, from + block < end ? from + block : end);
            done++;
        }
    }
    if (done) count_up(&stream->counters->finished[stream->number % 2], done, total);
    op->step = 1;
    return total;
}

/* Through the windows, piece by piece; a piece has one of NUM_SLOTS slots of every window.
 *
 *     few ranks, SHED, SHARE: each uses whole pieces    many ranks: each adds up its share of a piece
 *     turn i   copy in piece i                          turn i   fetch the shares of piece i−2 ── when all have added
 *              add up piece i−1 ── when all have it              copy in piece i
 *                                                                add up my share of piece i−1 ── when all have it
 *
 * In turn j a rank has seen all others at least in the middle of turn j−2 (few) or j−1 (many), so nobody reads
 * pieces up to j−4 (few) or j−3 (many) any more: four slots are enough for both. */
static char *slot(stream_t *stream, int rank, uint32_t index) {
    return stream->windows[rank] + (stream->pieces + index) % NUM_SLOTS * stream->window_nbytes;
}

/* A counter for each slot: a rank may be a piece ahead, and must not count for another. */
static word_t *arrivals(stream_t *stream, int what, uint32_t index) {
    return &stream->counters->arrived[what][(stream->pieces + index) % NUM_SLOTS];
}

static uint32_t all_of(team_t *team, stream_t *stream, uint32_t index) {
    return (uint32_t)((stream->pieces + index) / NUM_SLOTS + 1) * (uint32_t)team->size;
}

enum { COPIED, ADDED };

static void say(team_t *team, stream_t *stream, int what, uint32_t index) {
    count_up(arrivals(stream, what, index), 1, all_of(team, stream, index));
}

static int all_have(team_t *team, stream_t *stream, int what, uint32_t index, watch_t *watch) {
    return wait_for(arrivals(stream, what, index), all_of(team, stream, index), watch);
}

typedef struct {
    uint64_t from, count;
    char *data;
} piece_t;

/* Elements in a piece: a slot holds it (of SHED one for each rank), and there are several, so that copying and adding
 * overlap. */
static uint64_t piece_count(team_t *team, stream_t *stream, const op_t *op) {
    uint64_t item = item_nbytes(op->dtype), nbytes = lines(op->count * item / NUM_SLOTS);
    uint64_t most = op->kind == SHED ? stream->window_nbytes / (uint64_t)team->size / LINE * LINE : stream->window_nbytes;
    if (nbytes < LEAST_PIECE_NBYTES) nbytes = LEAST_PIECE_NBYTES;
    return (nbytes < most ? nbytes : most) / item;
}

static piece_t piece_of(team_t *team, stream_t *stream, const op_t *op, uint32_t index) {
    uint64_t item = item_nbytes(op->dtype), each = piece_count(team, stream, op), from = index * each;
    uint64_t count = op->count - from < each ? op->count - from : each;
    return (piece_t){from, count, (char *)op->data + from * item};
}

static uint32_t num_pieces(team_t *team, stream_t *stream, const op_t *op) {
    uint64_t each = piece_count(team, stream, op);
    return (uint32_t)((op->count + each - 1) / each);
}

static void copy_in(team_t *team, stream_t *stream, op_t *op, uint32_t index) {
    piece_t piece = piece_of(team, stream, op, index);
    uint64_t item = item_nbytes(op->dtype), each = piece_count(team, stream, op);
    char *mine = slot(stream, team->rank, index);
    if (op->kind == SHED) {
        for (uint64_t r = 0; r < (uint64_t)team->size; r++)
            memcpy(mine + r * each * item, (char *)op->bases[r] + piece.from * item, piece.count * item);
    } else {
        memcpy(mine, piece.data, piece.count * item);
    }
    say(team, stream, COPIED, index);
}

/* SHED: what all have for this rank, added up into its own memory. */
static void shed_piece(team_t *team, stream_t *stream, op_t *op, uint32_t index) {
    piece_t piece = piece_of(team, stream, op, index);
    uint64_t offset = (uint64_t)team->rank * piece_count(team, stream, op) * item_nbytes(op->dtype);
    void *rows[MAX_RANKS], *out = piece.data;
    for (int r = 0; r < team->size; r++) rows[r] = slot(stream, r, index) + offset;
    sum_range(rows, team->size, &out, 1, op, 0, piece.count);
}

/* SHARE: what each has brought. */
static void share_piece(team_t *team, stream_t *stream, op_t *op, uint32_t index) {
    piece_t piece = piece_of(team, stream, op, index);
    uint64_t item = item_nbytes(op->dtype);
    for (int r = 0; r < team->size; r++)
        memcpy((char *)op->bases[r] + piece.from * item, slot(stream, r, index), piece.count * item);
}

static void add_piece(team_t *team, stream_t *stream, op_t *op, uint32_t index) {
    piece_t piece = piece_of(team, stream, op, index);
    void *rows[MAX_RANKS], *out = piece.data;
    for (int r = 0; r < team->size; r++) rows[r] = slot(stream, r, index);
    rows[team->rank] = piece.data; /* the same, and in the nearest cache */
    sum_range(rows, team->size, &out, 1, op, 0, piece.count);
}

static void add_share(team_t *team, stream_t *stream, op_t *op, uint32_t index) {
    op_t share = *op;
    share.count = piece_of(team, stream, op, index).count;
    void *rows[MAX_RANKS];
    for (int r = 0; r < team->size; r++) rows[r] = slot(stream, r, index);
    sum_range(rows, team->size, &rows[team->rank], 1, &share, part(&share, team->size, team->rank),
              part(&share, team->size, team->rank + 1));
    say(team, stream, ADDED, index);
}

static void fetch_shares(team_t *team, stream_t *stream, op_t *op, uint32_t index) {
    piece_t piece = piece_of(team, stream, op, index);
    op_t share = *op;
    share.count = piece.count;
    uint64_t item = item_nbytes(op->dtype);
    for (int r = 0; r < team->size; r++) {
        uint64_t from = part(&share, team->size, r) * item, to = part(&share, team->size, r + 1) * item;
        memcpy(piece.data + from, slot(stream, r, index) + from, to - from);
    }
}

/* Every piece counts as added on teams where that is ever waited for: the next operation reckons with all before it. */
static void use_piece(team_t *team, stream_t *stream, op_t *op, uint32_t index, int few) {
    if (op->kind == STAGED) {
        few ? add_piece(team, stream, op, index) : add_share(team, stream, op, index);
        return;
    }
    op->kind == SHED ? shed_piece(team, stream, op, index) : share_piece(team, stream, op, index);
    if (team->size > FEW) say(team, stream, ADDED, index);
}

static int staged(team_t *team, stream_t *stream, op_t *op, watch_t *watch) {
    uint32_t pieces = num_pieces(team, stream, op), i;
    int few = team->size <= FEW || op->kind != STAGED, result;
    for (; (i = op->piece) < pieces + (few ? 1 : 2); op->piece++, op->step = 0) {
        if (op->step == 0) {
            if (!few && i >= 2) {
                if ((result = all_have(team, stream, ADDED, i - 2, watch)) != DONE) return result;
                fetch_shares(team, stream, op, i - 2);
            }
            if (i < pieces) copy_in(team, stream, op, i);
            op->step = 1;
        }
        if (i >= 1 && i <= pieces) {
            if ((result = all_have(team, stream, COPIED, i - 1, watch)) != DONE) return result;
            use_piece(team, stream, op, i - 1, few);
        }
    }
    stream->pieces += pieces;
    return DONE;
}

static void scatter(team_t *team, op_t *op) {
    void *mine = op->bases[team->rank];
    sum_range(op->bases, team->size, &mine, 1, op, op->bounds[team->rank], op->bounds[team->rank + 1]);
}

static void gather(team_t *team, stream_t *stream, op_t *op) {
    uint64_t item = item_nbytes(op->dtype);
    for (int r = 0; r < team->size; r++) {
        uint64_t from = op->bounds[r] * item, to = op->bounds[r + 1] * item;
        if (r != team->rank) memcpy((char *)op->bases[team->rank] + from, (char *)op->bases[r] + from, to - from);
    }
    count_up(&stream->counters->finished[stream->number % 2], 1, (uint32_t)team->size);
}

/* Go on with an operation until it is done or the deadline comes; called again, it goes on from there. */
static int advance(team_t *team, stream_t *stream, op_t *op, watch_t *watch) {
    word_t *finished = NULL;
    int result;
    if (op->begun == 0) {
        /* Who gave up has not left its last operation: its boards may still be read. */
        if (atomic_load(&team->aborted)) return ABORTED;
        uint64_t nbytes = op->kind == SMALL ? op->count * item_nbytes(op->dtype) : 0;
        post(team, stream, op->label, LABEL_NBYTES, op->data, nbytes);
        op->begun = 1;
    }
    if (op->begun == 1) {
        if ((result = arrive(team, stream, watch)) != DONE) return result;
        if (!same_labels(team, stream)) return MISMATCH;
        op->begun = 2;
    }
    finished = &stream->counters->finished[stream->number % 2];
    switch (op->kind) {
    case SMALL:
        small(team, stream, op);
        return DONE;
    case DIRECT:
        return wait_for(finished, direct(team, stream, op), watch);
    case STAGED:
    case SHED:
    case SHARE:
        return staged(team, stream, op, watch);
    case SCATTER:
        scatter(team, op);
        return DONE;
    default:
        if (op->begun == 2) gather(team, stream, op);
        op->begun = 3;
        return wait_for(finished, (uint32_t)team->size, watch);
    }
}

static watch_t watch_until(team_t *team, double deadline, int spin) {
    _Atomic uint32_t *abandoned = &team->streams[0].counters->abandoned.value;
    return (watch_t){team->pidfds, team->size, -1, spin, &team->aborted, abandoned, deadline};
}

static int advance_until(team_t *team, int index, op_t *op, double deadline, int spin) {
    watch_t watch = watch_until(team, deadline, spin);
    int result = advance(team, &team->streams[index], op, &watch);
    op->culprit = watch.culprit;
    if (result != PENDING) op->finished_at = now_s();
    /* This rank has not left the operation, so it must not come to the next: one who posts twice stands in for one
     * who never came. */
    if (result == DEAD || result == ABORTED) atomic_store(&team->aborted, 1);
    return result;
}

int gradsync_advance(team_t *team, int stream, op_t *op, double slice_s) {
    return advance_until(team, stream, op, now_s() + slice_s, team->spin);
}

/* A message to all: what the step header travels by. Posting never waits; one is under way at a time. */

void gradsync_post(team_t *team, int stream, const void *row, uint64_t nbytes) {
    post(team, &team->streams[stream], row, nbytes, NULL, 0);
}

int gradsync_collect(team_t *team, int stream, char *rows, uint64_t nbytes, double slice_s, int *culprit) {
    stream_t *s = &team->streams[stream];
    watch_t watch = watch_until(team, now_s() + slice_s, team->spin);
    int result = arrive(team, s, &watch);
    *culprit = watch.culprit;
    for (int r = 0; result == DONE && r < team->size; r++)
        memcpy(rows + (uint64_t)r * nbytes, board(s, r, s->number), nbytes);
    return result;
}

/* Changes whenever op_t does: a library from an older build is refused. */
uint64_t gradsync_op_nbytes(void) { return sizeof(op_t); }

/* The label that a rank brought to the last operation. */
const char *gradsync_label(team_t *team, int stream, int rank) {
    return board(&team->streams[stream], rank, team->streams[stream].number);
}

/* The worker: a thread that never needs the interpreter. It serves stream 1. */

static void let_go(job_t *job) {
    if (atomic_fetch_sub(&job->holders, 1) == 1) free(job);
}

static void *work(void *argument) {
    team_t *team = argument;
    for (;;) {
        pthread_mutex_lock(&team->lock);
        while (!team->first && !team->closing) pthread_cond_wait(&team->some, &team->lock);
        job_t *job = team->first;
        if (job && !(team->first = job->next)) team->last = NULL;
        pthread_mutex_unlock(&team->lock);
        if (!job) return NULL;
        int result;
        do /* without spinning: somebody on this core may be computing gradients */
            result = advance_until(team, 1, &job->op, now_s() + 1, 0);
        while (result == PENDING);
        job->result = result;
        for (int r = 0; result == MISMATCH && r < team->size; r++) /* the boards are for the next operation now */
            memcpy(job->labels + r * LABEL_NBYTES, gradsync_label(team, 1, r), LABEL_NBYTES);
        count_up(&job->done, 1, 1);
        let_go(job);
    }
}

static int start_worker(team_t *team) {
    sigset_t all, before;
    sigfillset(&all); /* signals are for the interpreter's main thread */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    team->has_worker = !pthread_create(&team->worker, NULL, work, team);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return team->has_worker;
}

/* Hand an operation to the worker. NULL without memory or thread. The caller releases the job. */
job_t *gradsync_submit(team_t *team, const op_t *op) {
    job_t *job = calloc(1, sizeof *job + (size_t)team->size * LABEL_NBYTES);
    if (!job) return NULL;
    job->op = *op;
    atomic_store(&job->holders, 2);
    pthread_mutex_lock(&team->lock);
    if (!team->has_worker && !start_worker(team)) {
        pthread_mutex_unlock(&team->lock);
        return free(job), NULL;
    }
    if (team->last) team->last->next = job;
    else team->first = job;
    team->last = job;
    pthread_cond_signal(&team->some);
    pthread_mutex_unlock(&team->lock);
    return job;
}

/* PENDING, or how the operation ended, with when and through whom. */
int gradsync_wait(team_t *team, job_t *job, double slice_s, double *finished_at, int *culprit) {
    (void)team;
    _Atomic int never = 0;
    watch_t watch = {NULL, 0, -1, 0, &never, NULL, now_s() + slice_s};
    if (wait_for(&job->done, 1, &watch) != DONE) return PENDING;
    *finished_at = job->op.finished_at;
    *culprit = job->op.culprit;
    return job->result;
}

/* The label that a rank brought to a job, after a mismatch. */
const char *gradsync_job_label(job_t *job, int rank) { return job->labels + rank * LABEL_NBYTES; }

void gradsync_release(job_t *job) { let_go(job); }

/* End all waits of this rank, now and later. */
void gradsync_abort(team_t *team) { atomic_store(&team->aborted, 1); }

/* This rank gave up in the midst of something: the team is dead, for all. */
void gradsync_abandon(team_t *team) {
    atomic_store(&team->streams[0].counters->abandoned.value, 1);
    gradsync_abort(team);
}

void gradsync_close(team_t *team) {
    gradsync_abort(team);
    pthread_mutex_lock(&team->lock);
    team->closing = 1;
    pthread_cond_signal(&team->some);
    pthread_mutex_unlock(&team->lock);
    if (team->has_worker) pthread_join(team->worker, NULL);
    free(team->streams[0].boards);
    free(team->pidfds);
    free(team);
}
