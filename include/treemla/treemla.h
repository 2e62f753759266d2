/* The C ABI of TreeMLA (C99, needs no other header): draft-tree verification on Multi-head Latent Attention.
 *
 *     treemla_problem problem;
 *     treemla_problem_init(&problem, sizeof problem);
 *     problem.h_q = 8; ...                                     // shapes, pointers, lengths
 *     treemla_output output;
 *     treemla_output_init(&output, sizeof output);
 *     output.out = ...;
 *     if (treemla_verify(&problem, &output, NULL) != TREEMLA_OK) puts(treemla_last_error());
 *
 * Every function that can fail returns a treemla_status; treemla_last_error() then has one line that names
 * the argument (by its name in problem.hpp: `kv.scale` is the field kv_scale here), its value and what is
 * allowed. Nothing prints, exits or throws. Functions may be called from several threads at once; one
 * treemla_plan is used by one thread at a time.
 *
 * The structs are views: nothing is copied or owned, and the pointers must outlive the call that takes them.
 * New fields are only ever added at the end, and `size` says how far the caller's header goes: always start
 * from the *_init function. Strides and counts are in elements, never bytes. Shapes are row-major.
 */
#ifndef TREEMLA_TREEMLA_H
#define TREEMLA_TREEMLA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TREEMLA_NOEXCEPT noexcept
extern "C" {
#else
#define TREEMLA_NOEXCEPT
#endif

/* ---- status and errors --------------------------------------------------------------------------------- */

typedef enum treemla_status {
  TREEMLA_OK = 0,
  TREEMLA_INVALID_ARGUMENT = 1, /* an argument breaks its documented contract */
  TREEMLA_UNSUPPORTED = 2,      /* valid, but no backend (or not the one asked for) can run it */
  TREEMLA_BAD_FILE = 3,         /* a case file that lies, is truncated or is no case file at all */
  TREEMLA_IO_ERROR = 4,         /* the operating system refused to open, read or write a file */
  TREEMLA_OUT_OF_MEMORY = 5,    /* host or device memory ran out */
  TREEMLA_DEVICE_ERROR = 6,     /* a device call failed */
  TREEMLA_INTERNAL_ERROR = 7    /* a bug in the library */
} treemla_status;

/* Version of the library linked in, "major.minor.patch". */
const char* treemla_version(void) TREEMLA_NOEXCEPT;
/* "ok", "invalid argument", ...; "unknown status" for other values. */
const char* treemla_status_name(treemla_status status) TREEMLA_NOEXCEPT;
/* Of the last call of this thread that failed, "" before the first. Valid until the next one that fails. */
const char* treemla_last_error(void) TREEMLA_NOEXCEPT;
/* The argument, tensor or file field at fault in that call; "" where there is none. */
const char* treemla_last_error_argument(void) TREEMLA_NOEXCEPT;

/* ---- the problem --------------------------------------------------------------------------------------- */

typedef enum treemla_dtype {
  TREEMLA_F32 = 0,
  TREEMLA_F16 = 1,    /* IEEE binary16 */
  TREEMLA_BF16 = 2,   /* the upper half of an F32 */
  TREEMLA_F8E4M3 = 3, /* OCP e4m3 "fn", largest value 448; cache only */
  /* Rows of DeepSeek's packed form; cache only. In bytes: d_v e4m3 latents, d_v / 128 float32 scales (one for
   * 128 latents, any positive value), d_rope bf16. 656 bytes for 512/64. d_v must be a multiple of 128, d_rope
   * even, rows aligned to 4 bytes. What counts as an element of such a pool is a byte. */
  TREEMLA_F8E4M3_PACKED = 4,
  /* Rows of llama.cpp's q8_0; cache only, on CPUs. In bytes: for every 32 columns, the latents' first, an fp16
   * scale and 32 int8. 612 bytes for 512/64. d_v and d_rope must be multiples of 32, rows aligned to 2 bytes. An
   * element of such a pool is a byte too. */
  TREEMLA_Q8 = 5
} treemla_dtype;

/* How the columns of a cached row lie in it. */
typedef enum treemla_kv_layout {
  TREEMLA_KV_ROW_MAJOR = 0,
  /* Every 32 columns as 16 words of columns 16 apart: rows of bf16 caches on CPUs as treemla_interleave_rows writes
   * them, for engines that own their cache. d_v and d_rope must be multiples of 32, rows aligned to 4 bytes. */
  TREEMLA_KV_INTERLEAVED = 1
} treemla_kv_layout;

typedef enum treemla_index_type { TREEMLA_I32 = 0, TREEMLA_I64 = 1 } treemla_index_type;

typedef enum treemla_memory { TREEMLA_MEMORY_HOST = 0, TREEMLA_MEMORY_DEVICE = 1 } treemla_memory;

typedef enum treemla_mask {
  TREEMLA_MASK_NONE = 0,   /* every node sees every node of its request */
  TREEMLA_MASK_CAUSAL = 1, /* node i sees nodes 0..i: a chain */
  TREEMLA_MASK_TREE = 2    /* node i sees itself and its ancestors */
} treemla_mask;

/* One verification: for request r, tree node i, head h, over the keys j that node i may see (the whole
 * prefix, and of the request's own tree rows those the mask names),
 *
 *     s_j = sm_scale * dot(q[i,h,:], kv[j,:])      lse = log(sum_j exp(s_j))      (natural log)
 *     out = sum_j exp(s_j - lse) * kv[j, 0:d_v]
 *
 * d_qk = d_v + d_rope. A row that sees no key gives out = 0, lse = -inf. Requests of length 0 are inert. */
typedef struct treemla_problem {
  size_t size; /* sizeof(treemla_problem), set by treemla_problem_init */

  /* Shape. */
  int32_t h_q;    /* query heads on this rank, 1..1024 */
  int32_t d_v;    /* latent width, also the width of a value and of an output row */
  int32_t d_rope; /* rope width, may be 0 */
  int32_t b;      /* requests */

  /* Absorbed queries, latent part first. */
  const void* q;          /* [total_q, h_q, d_qk] */
  int64_t total_q;        /* tree nodes of all requests together */
  int64_t q_token_stride; /* elements between nodes; 0 (initial) means h_q * d_qk */
  int64_t q_head_stride;  /* elements between heads; 0 (initial) means d_qk */
  int32_t q_dtype;        /* treemla_dtype: F32, F16 or BF16 (initial) */

  /* The pool of cached rows. Rows that no request names are never read into a result. */
  int32_t kv_dtype;      /* treemla_dtype, BF16 initially */
  const void* kv;        /* [num_pages, page_size, d_qk]; packed, q8_0: bytes of a row instead of d_qk */
  int64_t num_pages;     /* pages in the pool */
  int64_t kv_row_stride; /* elements between rows; 0 (initial) means d_qk; packed, q8_0: the bytes of a row */
  double kv_scale;       /* real row = stored row * kv_scale (FP8 and q8_0 caches); 1 initially */
  int32_t page_size;     /* tokens a page, any value >= 1; 1 initially */

  /* Token t of request r lives in pool row  entry(r, t / page_size) * page_size + t % page_size  with
   *   page_indptr given (CSR):          entry(r, p) = page_entries[page_indptr[r] + p]
   *   page_indptr null (block table):   entry(r, p) = page_entries[r * page_stride + p]
   * Only the first ceil(kv_len / page_size) entries of a request are read: the rest may hold anything. */
  int32_t page_index_type;    /* treemla_index_type of page_entries, I32 initially */
  const void* page_entries;   /* [num_page_entries], indices of pages, 0 <= entry < num_pages */
  int64_t num_page_entries;   /* readable entries */
  const int32_t* page_indptr; /* [b + 1], or null */
  int64_t page_stride;        /* block table: entries a request */

  /* Lengths. */
  const int32_t* q_indptr; /* [b + 1]; request r owns query rows q_indptr[r] .. q_indptr[r + 1] */
  const int32_t* kv_len;   /* [b] cached rows of a request, its tree rows included: they are the last q_len */

  /* The mask; with TREEMLA_MASK_TREE one of `parents` and `ancestor_bits` (bits win when both are given). */
  const int32_t* parents; /* [total_q] parent within the request, -1 for its root; parents come first */
  const uint32_t* ancestor_bits; /* [total_q, words_per_row]; bit j of row i: node i sees node j */
  int32_t words_per_row;         /* >= ceil(largest q_len / 32) */
  int32_t mask;                  /* treemla_mask, NONE initially */

  double sm_scale;   /* (d_nope + d_rope)^-0.5 times YaRN's m^2; not derivable from d_qk, so always given */
  int32_t memory;    /* treemla_memory of every pointer above and of the output; HOST initially */
  int32_t kv_layout; /* treemla_kv_layout, ROW_MAJOR initially */

  /* Bounds for lengths that live on the device, where the host can't see them; 0 (initial) = what total_q and
   * the page table allow. They size workspaces. A request past them comes out inert. */
  int64_t max_q_len;  /* most tree nodes of a request */
  int64_t max_kv_len; /* most cached rows of a request */
} treemla_problem;

typedef struct treemla_output {
  size_t size;       /* sizeof(treemla_output), set by treemla_output_init */
  void* out;         /* [total_q, h_q, d_v], contiguous; every element is written */
  float* lse;        /* [total_q, h_q] natural log; null (initial) if not wanted */
  int32_t out_dtype; /* treemla_dtype: F32 (initial), F16 or BF16 */
  int32_t reserved;  /* 0 */
} treemla_output;

typedef struct treemla_options {
  size_t size;             /* sizeof(treemla_options), set by treemla_options_init */
  const char* backend;     /* a name from treemla_backend_at, or "best"; null (initial) means best */
  void* stream;            /* cudaStream_t of device backends; work is enqueued, never synchronised */
  int32_t num_threads;     /* CPU backends: threads to use; 0 (initial) = one per core, or what the
                              environment's TREEMLA_NUM_THREADS says */
  int32_t batch_invariant; /* nonzero: split boundaries depend on absolute key position only, so the rows of a
                              request come out bit-equal alone, in any batch, on any number of cores */
  int32_t split_keys;      /* keys a split when batch_invariant; 0 (initial) = the backend's default */
  int32_t reserved;        /* 0 */
} treemla_options;

/* Set every field to its initial value: 0 or null where the field says nothing else. `size` is sizeof(struct)
 * as the caller compiled it. A null pointer or a `size` of less than one size_t does nothing. */
void treemla_problem_init(treemla_problem* problem, size_t size) TREEMLA_NOEXCEPT;
void treemla_output_init(treemla_output* output, size_t size) TREEMLA_NOEXCEPT;
void treemla_options_init(treemla_options* options, size_t size) TREEMLA_NOEXCEPT;

/* ---- running ------------------------------------------------------------------------------------------- */

/* Every check of the arguments, contents included where they live on the host. `output` may be null. */
treemla_status treemla_check(const treemla_problem* problem, const treemla_output* output) TREEMLA_NOEXCEPT;

/* The contents of a device problem, which treemla_check cannot see, by the same rules and in the same words.
 * Rows past q_indptr[b] are allowed: they are padding. Waits for `stream` (a cudaStream_t). */
treemla_status treemla_check_device_problem(const treemla_problem* problem, void* stream) TREEMLA_NOEXCEPT;

/* treemla_check, then the attention of every row. Synchronous for host problems. `options` may be null. */
treemla_status treemla_verify(const treemla_problem* problem, const treemla_output* output,
                              const treemla_options* options) TREEMLA_NOEXCEPT;

/* The same, planned once per step and run once per layer. The options (stream included) are copied. */
typedef struct treemla_plan treemla_plan;

/* Checks the problem, chooses the backend, splits the work and allocates. On failure *plan is null. */
treemla_status treemla_plan_create(const treemla_problem* problem, const treemla_options* options,
                                   treemla_plan** plan) TREEMLA_NOEXCEPT;
/* Runs with the lengths, page tables and mask that treemla_plan_create or treemla_plan_update saw; q, kv data
 * and the output may differ (another layer). Shape, dtypes, b and total_q must be the planned ones. Device
 * problems: only enqueues. One captured graph of treemla_plan_update and treemla_plan_run calls serves every
 * later content of the lengths, page tables and mask. */
treemla_status treemla_plan_run(treemla_plan* plan, const treemla_problem* problem,
                                const treemla_output* output) TREEMLA_NOEXCEPT;
/* Plans again for other lengths, page tables or mask of a problem of the planned sizes. Device problems:
 * enqueued on the stream, allocates nothing there, may be captured. */
treemla_status treemla_plan_update(treemla_plan* plan, const treemla_problem* problem) TREEMLA_NOEXCEPT;
/* Device problems: waits for the stream and fails if the last create or update, or a run since, met lengths,
 * page entries or parents that are out of range. Such requests came out inert, or wrong; nothing was read or
 * written out of bounds. */
treemla_status treemla_plan_check_device(const treemla_plan* plan) TREEMLA_NOEXCEPT;
void treemla_plan_destroy(treemla_plan* plan) TREEMLA_NOEXCEPT; /* null is allowed */

/* The chosen backend's name and a description for people; owned by the plan, the description until its next
 * update. "" for a null plan. */
const char* treemla_plan_backend(const treemla_plan* plan) TREEMLA_NOEXCEPT;
const char* treemla_plan_describe(const treemla_plan* plan) TREEMLA_NOEXCEPT;
size_t treemla_plan_workspace_bytes(const treemla_plan* plan) TREEMLA_NOEXCEPT; /* 0 for a null plan */

/* Backends of this build, in order of preference of "best" among those of the same memory, oracles last. */
typedef struct treemla_backend_info {
  size_t size;        /* sizeof(treemla_backend_info), set by the caller */
  const char* name;   /* both strings are valid as long as the library is loaded */
  const char* reason; /* why it isn't available, or a line about what it will use */
  int32_t memory;     /* treemla_memory where its problems live */
  int32_t available;  /* nonzero: usable on this machine */
} treemla_backend_info;

/* 0 if the list can't be made (treemla_last_error says why). */
int32_t treemla_backend_count(void) TREEMLA_NOEXCEPT;
/* 0 <= index < treemla_backend_count(). Set info->size first. */
treemla_status treemla_backend_at(int32_t index, treemla_backend_info* info) TREEMLA_NOEXCEPT;
/* Would `backend` run this problem? TREEMLA_OK, or TREEMLA_UNSUPPORTED with the reason as the error. */
treemla_status treemla_backend_supports(const char* backend, const treemla_problem* problem) TREEMLA_NOEXCEPT;

/* ---- draft trees --------------------------------------------------------------------------------------- */

/* A tree of q_len nodes is its parents array: parents[0] = -1 (the root), 0 <= parents[i] < i for the others.
 * Other encodings (prefix_len cached tokens before the tree):
 *
 *   ancestor bits   [q_len, words], words >= treemla_words_per_row(q_len); bit j of row i: i sees node j
 *   dense           [q_len, q_len] bytes, nonzero = attend; SGLang's QLEN_ONLY has the same bytes
 *   full mask       [q_len, prefix_len + q_len] bytes: SGLang's FULL_MASK; only its q_len x q_len tail tells
 *   retrieve links  next_token[i] = first child, next_sibling[i] = next sibling, -1 ends
 *
 * One call converts one request. Outputs are buffers of the caller, unchanged on failure. */

/* 32-bit words an ancestor-bit row of a q_len-node tree needs: ceil(q_len / 32). */
int32_t treemla_words_per_row(int32_t q_len) TREEMLA_NOEXCEPT;

/* Exactly one root, at node 0, and every other parent before its child. */
treemla_status treemla_check_parents(const int32_t* parents /* [q_len] */, int32_t q_len) TREEMLA_NOEXCEPT;
treemla_status treemla_tree_depths(const int32_t* parents, int32_t q_len,
                                   int32_t* depths /* [q_len] */) TREEMLA_NOEXCEPT;
/* prefix_len + depth: siblings share a position. */
treemla_status treemla_tree_positions(const int32_t* parents, int32_t q_len, int64_t prefix_len,
                                      int32_t* positions /* [q_len] */) TREEMLA_NOEXCEPT;

treemla_status treemla_bits_from_parents(const int32_t* parents, int32_t q_len, int32_t words,
                                         uint32_t* bits) TREEMLA_NOEXCEPT;
treemla_status treemla_dense_from_parents(const int32_t* parents, int32_t q_len,
                                          uint8_t* dense) TREEMLA_NOEXCEPT;
treemla_status treemla_full_mask_from_parents(const int32_t* parents, int32_t q_len, int64_t prefix_len,
                                              uint8_t* full_mask) TREEMLA_NOEXCEPT;

/* From masks that need not be trees: any pattern is carried over. */
treemla_status treemla_bits_from_dense(const uint8_t* dense, int32_t q_len, int32_t words,
                                       uint32_t* bits) TREEMLA_NOEXCEPT;
treemla_status treemla_dense_from_bits(const uint32_t* bits, int32_t q_len, int32_t words,
                                       uint8_t* dense) TREEMLA_NOEXCEPT;
/* Also checks that no prefix token is masked: the whole prefix is always read. */
treemla_status treemla_bits_from_full_mask(const uint8_t* full_mask, int32_t q_len, int64_t prefix_len,
                                           int32_t words, uint32_t* bits) TREEMLA_NOEXCEPT;

/* The tree behind a mask; fails if the mask is not the ancestor relation of one tree. parents: [q_len]. */
treemla_status treemla_parents_from_bits(const uint32_t* bits, int32_t q_len, int32_t words,
                                         int32_t* parents) TREEMLA_NOEXCEPT;
treemla_status treemla_parents_from_dense(const uint8_t* dense, int32_t q_len,
                                          int32_t* parents) TREEMLA_NOEXCEPT;
treemla_status treemla_parents_from_full_mask(const uint8_t* full_mask, int32_t q_len, int64_t prefix_len,
                                              int32_t* parents) TREEMLA_NOEXCEPT;

/* next_token, next_sibling: [q_len], children in numbering order. */
treemla_status treemla_links_from_parents(const int32_t* parents, int32_t q_len, int32_t* next_token,
                                          int32_t* next_sibling) TREEMLA_NOEXCEPT;
/* Rejects cycles, orphans, nodes reached twice, parents after their children and indices past the end. */
treemla_status treemla_parents_from_links(const int32_t* next_token, const int32_t* next_sibling,
                                          int32_t q_len, int32_t* parents) TREEMLA_NOEXCEPT;

/* The ancestor bits of a ragged batch: row q_indptr[r] + i holds node i of request r. parents: [total_q],
 * q_indptr: [b + 1], bits: [total_q, words] with words >= treemla_words_per_row(largest q_len). */
treemla_status treemla_batch_bits_from_parents(const int32_t* parents, const int32_t* q_indptr, int32_t b,
                                               int32_t words, uint32_t* bits) TREEMLA_NOEXCEPT;

/* ---- the steps around verification: build, accept, compact, import -------------------------------------- */

/* Each step takes a batch whose arrays all live in one memory. On the host it is synchronous and any fault in the
 * contents (a malformed tree, NaN, a broken page table) is an error. On a device it enqueues kernels on `stream`,
 * reads nothing back and may be captured into a graph that serves every later content; ask for its workspace before
 * capturing, which also loads its kernels. A request with a fault then comes out inert, and treemla_check_tree_run
 * says which and why. build.hpp, accept.hpp and compact.hpp have the definitions, docs/TREES.md the pictures. */
typedef struct treemla_tree_run {
  size_t size;            /* sizeof(treemla_tree_run), set by treemla_tree_run_init */
  void* stream;           /* cudaStream_t; null (initial) is the default stream */
  void* workspace;        /* device memory, aligned to 256 bytes; null (initial) on the host */
  size_t workspace_bytes; /* at least what the step's *_workspace_bytes says */
} treemla_tree_run;

/* Waits for the stream and fails with the first fault that the last step of `b` requests found. */
treemla_status treemla_check_tree_run(const treemla_tree_run* run, int32_t b) TREEMLA_NOEXCEPT;

typedef enum treemla_build_method {
  TREEMLA_BUILD_DDTREE = 0, /* best-first over per-depth scores (DDTree, arXiv 2604.12989) */
  TREEMLA_BUILD_CANDIDATES =
      1,                   /* global top `budget` of a beam search's candidates (EAGLE-2, arXiv 2406.16858) */
  TREEMLA_BUILD_CHAIN = 2, /* drafted tokens in a row; a negative one ends it */
  TREEMLA_BUILD_PARENTS = 3 /* a tree of the caller's, checked */
} treemla_build_method;

/* Trees of q_len = budget + 1 nodes. Node 0 is the root; what a drafter doesn't fill is padding below the root. */
typedef struct treemla_build {
  size_t size;                /* sizeof(treemla_build), set by treemla_build_init */
  int32_t method;             /* treemla_build_method, DDTREE initially */
  int32_t b;                  /* requests */
  int32_t budget;             /* draft nodes besides the root, 1..1024 */
  int32_t pad_token;          /* of padding nodes; -1 (initial) is never accepted */
  const int32_t* root_tokens; /* [b] or null: -1 */
  const int32_t* prefix_len;  /* [b] cached tokens before the tree, or null: 0 */

  /* DDTREE: scores of depth d + 1 of request r in row r * num_depths + d. -inf is a token of probability 0. */
  const void* scores;    /* [b, num_depths, vocab] */
  int64_t scores_stride; /* elements between rows; 0 (initial) means vocab */
  int32_t num_depths;    /* 1..64 */
  int32_t vocab;         /* 1..2^22 */
  int32_t scores_dtype;  /* treemla_dtype: F32 (initial) or BF16 */
  int32_t are_log_probs; /* 0 (initial): logits */

  /* CANDIDATES: [b, num_candidates] each; parents come before children, -1 is the root. */
  const int32_t* candidate_tokens;
  const int32_t* candidate_parents;
  const float* candidate_log_probs; /* of the whole path */
  int32_t num_candidates;           /* 1..4096 */

  int32_t memory;         /* treemla_memory of every pointer and of the output; HOST initially */
  const int32_t* tokens;  /* CHAIN: [b, budget]; PARENTS: [b, budget + 1] or null: -1 */
  const int32_t* parents; /* PARENTS: [b, budget + 1] */
} treemla_build;

/* Any pointer may be null (initially all are). Row r * q_len + i is node i of request r. */
typedef struct treemla_tree_output {
  size_t size;                    /* sizeof(treemla_tree_output), set by treemla_tree_output_init */
  int32_t* token_ids;             /* [b, q_len] */
  int32_t* parents;               /* [b, q_len], -1 for the root */
  int32_t* depth;                 /* [b, q_len] steps to the root */
  int32_t* positions;             /* [b, q_len] prefix_len + depth */
  uint32_t* ancestor_bits;        /* [b, q_len, words_per_row] */
  int32_t* retrieve_next_token;   /* [b, q_len] first child, -1 for a leaf */
  int32_t* retrieve_next_sibling; /* [b, q_len] next child of the same parent, -1 for the last */
  float* log_probs;               /* [b, q_len] of the path; -inf for padding */
  int32_t* num_nodes;             /* [b] nodes that are no padding, root included */
  int32_t words_per_row;          /* >= treemla_words_per_row(q_len) with ancestor_bits */
  int32_t reserved;               /* 0 */
} treemla_tree_output;

/* `run` may be null for host problems, here and below. */
treemla_status treemla_build_tree(const treemla_build* build, const treemla_tree_output* output,
                                  const treemla_tree_run* run) TREEMLA_NOEXCEPT;
treemla_status treemla_build_workspace_bytes(const treemla_build* build, size_t* bytes) TREEMLA_NOEXCEPT;

/* One depth of a beam search: of each of `rows` nodes its top_k continuations, and of all these the top_k next. */
typedef struct treemla_beam {
  size_t size;                /* sizeof(treemla_beam), set by treemla_beam_init */
  int32_t b;                  /* requests */
  int32_t rows;               /* nodes in the beam, 1..64 */
  int32_t top_k;              /* 1..64 */
  int32_t vocab;              /* 1..2^22 */
  const void* scores;         /* [b, rows, vocab] */
  int64_t scores_stride;      /* elements between rows; 0 (initial) means vocab */
  int32_t scores_dtype;       /* treemla_dtype: F32 (initial) or BF16 */
  int32_t are_log_probs;      /* 0 (initial): logits */
  const float* row_log_probs; /* [b, rows] of the path to each node, or null: 0 */
  int32_t memory;             /* treemla_memory, HOST initially */
  int32_t reserved;           /* 0 */
} treemla_beam;

typedef struct treemla_beam_output {
  size_t size;        /* sizeof(treemla_beam_output), set by treemla_beam_output_init */
  int32_t* token_ids; /* [b, rows, top_k] best first within a row; -1 where there are fewer */
  float* log_probs;   /* [b, rows, top_k] of the path; -inf where there are fewer */
  int32_t* beam;      /* [b, top_k] indices into the rows * top_k continuations, best first, or null */
} treemla_beam_output;

treemla_status treemla_expand_beam(const treemla_beam* beam, const treemla_beam_output* output,
                                   const treemla_tree_run* run) TREEMLA_NOEXCEPT;
treemla_status treemla_beam_workspace_bytes(const treemla_beam* beam, size_t* bytes) TREEMLA_NOEXCEPT;

typedef enum treemla_accept_method {
  TREEMLA_ACCEPT_GREEDY = 0,             /* the target's argmax */
  TREEMLA_ACCEPT_DETERMINISTIC = 1,      /* lossless, children without a draft distribution */
  TREEMLA_ACCEPT_INDEPENDENT = 2,        /* lossless, children drawn i.i.d. (SpecInfer, arXiv 2305.09781) */
  TREEMLA_ACCEPT_WITHOUT_REPLACEMENT = 3 /* lossless, drawn without replacement (Sequoia, arXiv 2402.12374) */
} treemla_accept_method;

/* From the root down, while drafted tokens are what the target emits: see accept.hpp. */
typedef struct treemla_accept {
  size_t size;              /* sizeof(treemla_accept), set by treemla_accept_init */
  int32_t method;           /* treemla_accept_method, GREEDY initially */
  int32_t b;                /* requests */
  int64_t total_q;          /* rows of all arrays below */
  const int32_t* q_indptr;  /* [b + 1]; rows past q_indptr[b] are padding */
  const int32_t* token_ids; /* [total_q] */

  /* Links, or parents; links win. */
  const int32_t* retrieve_next_token;   /* [total_q] */
  const int32_t* retrieve_next_sibling; /* [total_q] */
  const int32_t* parents;               /* [total_q] */

  const int32_t* target_argmax; /* [total_q] GREEDY: this, or logits */
  const void* logits;           /* [total_q, vocab] of the target */
  int64_t logits_stride;        /* elements between rows; 0 (initial) means vocab */
  int32_t logits_dtype;         /* treemla_dtype: F32 (initial) or BF16 */
  int32_t vocab;                /* 1..2^22 */
  const float* draft_probs;     /* [total_q, vocab]: row i is what the children of node i were drawn from */

  /* [b] each, or null for none. */
  const float* temperature; /* 0: the argmax alone */
  const int32_t* top_k;     /* 0 or less: all */
  const float* top_p;       /* 1 or more: all */
  const uint64_t* seeds;    /* of Philox; null: 0 */
  const uint64_t* offsets;  /* never the same twice for a seed; null: 0 */

  /* Coins in [0, 1) in place of Philox; both or none. */
  const float* coins;       /* [total_q] judging node i */
  const float* final_coins; /* [b] drawing the bonus token */
  int32_t memory;           /* treemla_memory of every pointer and of the output; HOST initially */
  int32_t reserved;         /* 0 */
} treemla_accept;

typedef struct treemla_accept_output {
  size_t size;           /* sizeof(treemla_accept_output), set by treemla_accept_output_init */
  int32_t* accept_index; /* [b, path_stride] the path as rows q_indptr[r] + node, root first, then -1 */
  int32_t* num_accepted; /* [b] nodes of the path besides the root; -1 after a fault */
  int32_t* bonus_token;  /* [b] emitted after the path, the next root; or null */
  int32_t* predicts;     /* [total_q] token emitted after node i if i is on the path, else -1; or null */
  int32_t path_stride;   /* >= 1 */
  int32_t reserved;      /* 0 */
} treemla_accept_output;

treemla_status treemla_accept_path(const treemla_accept* accept, const treemla_accept_output* output,
                                   const treemla_tree_run* run) TREEMLA_NOEXCEPT;
treemla_status treemla_accept_workspace_bytes(const treemla_accept* accept, size_t* bytes) TREEMLA_NOEXCEPT;

/* Moves the accepted rows of every layer to consecutive places behind the prefix, in place: see compact.hpp. */
typedef struct treemla_compact {
  size_t size;         /* sizeof(treemla_compact), set by treemla_compact_init */
  int32_t b;           /* requests */
  int32_t num_layers;  /* 1 initially */
  void* const* layers; /* [num_layers] base pointers, or null: pool */
  void* pool;          /* layers layer_stride_bytes apart */
  int64_t layer_stride_bytes;
  int64_t row_bytes;        /* of a cached row, all of them opaque */
  int64_t row_stride_bytes; /* 0 (initial) means row_bytes */
  int64_t num_pages;        /* in each layer */
  const void* page_entries; /* the page table, as in treemla_problem */
  int64_t num_page_entries;
  const int32_t* page_indptr;
  int64_t page_stride;
  int32_t page_index_type;     /* treemla_index_type, I32 initially */
  int32_t page_size;           /* tokens a page, 1 initially */
  const int32_t* q_indptr;     /* [b + 1] */
  int64_t total_q;             /* q_indptr[b], or more */
  const int32_t* kv_len;       /* [b] tree rows included; 0 makes a request inert */
  const int32_t* accept_index; /* [b, path_stride], as treemla_accept_path writes it */
  const int32_t* num_accepted; /* [b]; negative makes a request inert */
  int32_t path_stride;
  int32_t memory; /* treemla_memory of every pointer and of the output; HOST initially */
} treemla_compact;

/* Any pointer may be null. */
typedef struct treemla_compact_output {
  size_t size;          /* sizeof(treemla_compact_output), set by treemla_compact_output_init */
  int32_t* kv_len;      /* [b] afterwards; not the input array */
  int64_t* freed_pages; /* [total_q] pages that hold no row any more, from element q_indptr[r] on */
  int32_t* num_freed;   /* [b] */
} treemla_compact_output;

treemla_status treemla_compact_cache(const treemla_compact* compact, const treemla_compact_output* output,
                                     const treemla_tree_run* run) TREEMLA_NOEXCEPT;
treemla_status treemla_compact_workspace_bytes(const treemla_compact* compact,
                                               size_t* bytes) TREEMLA_NOEXCEPT;

typedef enum treemla_mask_layout {
  TREEMLA_MASK_LAYOUT_NONE = 0,     /* a chain: node i sees nodes 0..i */
  TREEMLA_MASK_LAYOUT_FULL = 1,     /* request after request q_len rows of kv_len bytes: SGLang's FULL_MASK */
  TREEMLA_MASK_LAYOUT_QLEN_ONLY = 2 /* q_len rows of q_len bytes */
} treemla_mask_layout;

/* A serving engine's batch as verification takes it: lengths, page table (page size 1), ancestor bits: see import_batch.hpp. */
typedef struct treemla_import {
  size_t size;                /* sizeof(treemla_import), set by treemla_import_init */
  int32_t b;                  /* requests */
  int32_t q_len;              /* tree nodes of each, 1 initially */
  const int32_t* token_table; /* [num_rows, row_width] slot of token t */
  int64_t num_rows;
  int64_t row_width;
  int64_t row_stride;     /* elements between rows; 0 (initial) means row_width */
  const void* row_index;  /* [b] rows of the token table */
  const void* seq_len;    /* [b] cached tokens */
  int32_t row_index_type; /* treemla_index_type, I32 initially */
  int32_t seq_len_type;   /* treemla_index_type, I32 initially */
  const uint8_t*
      mask; /* [mask_len] nonzero = attend; a request whose cells reach past the end comes out inert */
  int64_t mask_len;
  int32_t mask_layout; /* treemla_mask_layout, NONE initially */
  int32_t
      seq_len_has_tree; /* nonzero: seq_len counts the q_len tree rows, and a request below q_len is inert */
  int32_t memory;       /* treemla_memory of every pointer and of the output; HOST initially */
  int32_t reserved;     /* 0 */
} treemla_import;

/* Any pointer may be null. */
typedef struct treemla_import_output {
  size_t size;             /* sizeof(treemla_import_output), set by treemla_import_output_init */
  int32_t* kv_len;         /* [b]; 0 for inert requests */
  int32_t* page_table;     /* [b, page_stride]; entries past kv_len keep what they hold */
  int64_t page_stride;     /* a request with more tokens is at fault */
  uint32_t* ancestor_bits; /* [b * q_len, words_per_row] */
  int32_t words_per_row;   /* >= ceil(q_len / 32) */
  int32_t reserved;        /* 0 */
} treemla_import_output;

treemla_status treemla_import_batch(const treemla_import* batch, const treemla_import_output* output,
                                    const treemla_tree_run* run) TREEMLA_NOEXCEPT;
treemla_status treemla_import_workspace_bytes(const treemla_import* batch, size_t* bytes) TREEMLA_NOEXCEPT;

/* Initial values: 0 or null where the field says nothing else. */
void treemla_tree_run_init(treemla_tree_run* run, size_t size) TREEMLA_NOEXCEPT;
void treemla_build_init(treemla_build* build, size_t size) TREEMLA_NOEXCEPT;
void treemla_tree_output_init(treemla_tree_output* output, size_t size) TREEMLA_NOEXCEPT;
void treemla_beam_init(treemla_beam* beam, size_t size) TREEMLA_NOEXCEPT;
void treemla_beam_output_init(treemla_beam_output* output, size_t size) TREEMLA_NOEXCEPT;
void treemla_accept_init(treemla_accept* accept, size_t size) TREEMLA_NOEXCEPT;
void treemla_accept_output_init(treemla_accept_output* output, size_t size) TREEMLA_NOEXCEPT;
void treemla_compact_init(treemla_compact* compact, size_t size) TREEMLA_NOEXCEPT;
void treemla_compact_output_init(treemla_compact_output* output, size_t size) TREEMLA_NOEXCEPT;
void treemla_import_init(treemla_import* batch, size_t size) TREEMLA_NOEXCEPT;
void treemla_import_output_init(treemla_import_output* output, size_t size) TREEMLA_NOEXCEPT;

/* ---- interleaved caches -------------------------------------------------------------------------------- */

/* Rows to write into a pool of TREEMLA_KV_INTERLEAVED, in host memory: see interleave.hpp. */
typedef struct treemla_interleave {
  size_t size; /* sizeof(treemla_interleave), set by treemla_interleave_init */
  int32_t d_v; /* as in treemla_problem, multiples of 32 */
  int32_t d_rope;
  const void* rows; /* [num_rows, d_qk] bf16, columns in order */
  int64_t num_rows;
  int64_t row_stride;      /* elements between rows; 0 (initial) means d_qk */
  void* pool;              /* [pool_rows, d_qk] bf16; must not overlap with `rows` */
  int64_t pool_rows;       /* num_pages * page_size */
  int64_t pool_row_stride; /* elements between rows; 0 (initial) means d_qk */
  const int64_t* slots; /* [num_rows] pool row of each, -1: written nowhere; null (initial): 0, 1, 2, ... */
} treemla_interleave;

void treemla_interleave_init(treemla_interleave* interleave, size_t size) TREEMLA_NOEXCEPT;
treemla_status treemla_interleave_rows(const treemla_interleave* interleave) TREEMLA_NOEXCEPT;

/* ---- case files ---------------------------------------------------------------------------------------- */

/* A recorded call with its expected result (.kdtr, a safetensors file). */
typedef struct treemla_case treemla_case;

/* Maps and validates a case; on failure *c is null. Errors name the file, the field, its value or offset. */
treemla_status treemla_case_read(const char* path, treemla_case** c) TREEMLA_NOEXCEPT;
/* The same for bytes in memory (copied). */
treemla_status treemla_case_parse(const void* data, size_t bytes, treemla_case** c) TREEMLA_NOEXCEPT;
/* Fills `problem`, initialised by treemla_problem_init, with views that are valid until treemla_case_free. */
treemla_status treemla_case_problem(const treemla_case* c, treemla_problem* problem) TREEMLA_NOEXCEPT;
/* The expected result: [total_q, h_q, d_v] and [total_q, h_q]; null where the case has none. */
const float* treemla_case_expected_out(const treemla_case* c) TREEMLA_NOEXCEPT;
const float* treemla_case_expected_lse(const treemla_case* c) TREEMLA_NOEXCEPT;
void treemla_case_free(treemla_case* c) TREEMLA_NOEXCEPT; /* null is allowed */

#ifdef __cplusplus
}
#endif

#endif
