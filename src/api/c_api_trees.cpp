// The C ABI of the tree steps: flat structs into those of build.hpp, accept.hpp, compact.hpp and import_batch.hpp.

#include "api/c_abi.hpp"
#include "treemla/accept.hpp"
#include "treemla/build.hpp"
#include "treemla/compact.hpp"
#include "treemla/import_batch.hpp"

using namespace treemla;
using namespace treemla::c_abi;

static_assert(static_cast<int>(BuildMethod::kDdtree) == TREEMLA_BUILD_DDTREE);
static_assert(static_cast<int>(BuildMethod::kCandidates) == TREEMLA_BUILD_CANDIDATES);
static_assert(static_cast<int>(BuildMethod::kChain) == TREEMLA_BUILD_CHAIN);
static_assert(static_cast<int>(BuildMethod::kParents) == TREEMLA_BUILD_PARENTS);
static_assert(static_cast<int>(AcceptMethod::kGreedy) == TREEMLA_ACCEPT_GREEDY);
static_assert(static_cast<int>(AcceptMethod::kDeterministic) == TREEMLA_ACCEPT_DETERMINISTIC);
static_assert(static_cast<int>(AcceptMethod::kIndependent) == TREEMLA_ACCEPT_INDEPENDENT);
static_assert(static_cast<int>(AcceptMethod::kWithoutReplacement) == TREEMLA_ACCEPT_WITHOUT_REPLACEMENT);
static_assert(static_cast<int>(MaskLayout::kNone) == TREEMLA_MASK_LAYOUT_NONE);
static_assert(static_cast<int>(MaskLayout::kFull) == TREEMLA_MASK_LAYOUT_FULL);
static_assert(static_cast<int>(MaskLayout::kQlenOnly) == TREEMLA_MASK_LAYOUT_QLEN_ONLY);

namespace {

TreeRun to_cpp(const treemla_tree_run* run) {
  if (!run) return {};
  const treemla_tree_run c = read_struct("run", run);
  return {c.stream, c.workspace, c.workspace_bytes};
}

BuildProblem to_cpp(const treemla_build* build) {
  const treemla_build c = read_struct("build", build);
  BuildProblem p;
  p.method = static_cast<BuildMethod>(c.method);
  p.b = c.b;
  p.budget = c.budget;
  p.root_tokens = c.root_tokens;
  p.prefix_len = c.prefix_len;
  p.pad_token = c.pad_token;
  p.num_depths = c.num_depths;
  p.scores = {c.scores, static_cast<DType>(c.scores_dtype), c.vocab, c.scores_stride, c.are_log_probs != 0};
  p.num_candidates = c.num_candidates;
  p.candidate_tokens = c.candidate_tokens;
  p.candidate_parents = c.candidate_parents;
  p.candidate_log_probs = c.candidate_log_probs;
  p.tokens = c.tokens;
  p.parents = c.parents;
  p.memory = static_cast<Memory>(c.memory);
  return p;
}

TreeOutput to_cpp(const treemla_tree_output* output) {
  const treemla_tree_output c = read_struct("output", output);
  check_reserved("output", c.reserved);
  return {c.token_ids,
          c.parents,
          c.depth,
          c.positions,
          c.ancestor_bits,
          c.words_per_row,
          c.retrieve_next_token,
          c.retrieve_next_sibling,
          c.log_probs,
          c.num_nodes};
}

BeamProblem to_cpp(const treemla_beam* beam) {
  const treemla_beam c = read_struct("beam", beam);
  check_reserved("beam", c.reserved);
  BeamProblem p;
  p.b = c.b;
  p.rows = c.rows;
  p.top_k = c.top_k;
  p.scores = {c.scores, static_cast<DType>(c.scores_dtype), c.vocab, c.scores_stride, c.are_log_probs != 0};
  p.row_log_probs = c.row_log_probs;
  p.memory = static_cast<Memory>(c.memory);
  return p;
}

BeamOutput to_cpp(const treemla_beam_output* output) {
  const treemla_beam_output c = read_struct("output", output);
  return {c.token_ids, c.log_probs, c.beam};
}

AcceptProblem to_cpp(const treemla_accept* accept) {
  const treemla_accept c = read_struct("accept", accept);
  check_reserved("accept", c.reserved);
  AcceptProblem p;
  p.method = static_cast<AcceptMethod>(c.method);
  p.b = c.b;
  p.total_q = c.total_q;
  p.q_indptr = c.q_indptr;
  p.token_ids = c.token_ids;
  p.retrieve_next_token = c.retrieve_next_token;
  p.retrieve_next_sibling = c.retrieve_next_sibling;
  p.parents = c.parents;
  p.target_argmax = c.target_argmax;
  p.logits = c.logits;
  p.logits_dtype = static_cast<DType>(c.logits_dtype);
  p.vocab = c.vocab;
  p.logits_stride = c.logits_stride;
  p.draft_probs = c.draft_probs;
  p.temperature = c.temperature;
  p.top_k = c.top_k;
  p.top_p = c.top_p;
  p.seeds = c.seeds;
  p.offsets = c.offsets;
  p.coins = c.coins;
  p.final_coins = c.final_coins;
  p.memory = static_cast<Memory>(c.memory);
  return p;
}

AcceptOutput to_cpp(const treemla_accept_output* output) {
  const treemla_accept_output c = read_struct("output", output);
  check_reserved("output", c.reserved);
  return {c.accept_index, c.path_stride, c.num_accepted, c.bonus_token, c.predicts};
}

CompactProblem to_cpp(const treemla_compact* compact) {
  const treemla_compact c = read_struct("compact", compact);
  CompactProblem p;
  p.b = c.b;
  p.num_layers = c.num_layers;
  p.layers = c.layers;
  p.pool = c.pool;
  p.layer_stride_bytes = c.layer_stride_bytes;
  p.row_bytes = c.row_bytes;
  p.row_stride_bytes = c.row_stride_bytes;
  p.num_pages = c.num_pages;
  p.page_size = c.page_size;
  p.pages = {c.page_entries, static_cast<IndexType>(c.page_index_type), c.num_page_entries, c.page_indptr,
             c.page_stride};
  p.q_indptr = c.q_indptr;
  p.total_q = c.total_q;
  p.kv_len = c.kv_len;
  p.accept_index = c.accept_index;
  p.path_stride = c.path_stride;
  p.num_accepted = c.num_accepted;
  p.memory = static_cast<Memory>(c.memory);
  return p;
}

CompactOutput to_cpp(const treemla_compact_output* output) {
  const treemla_compact_output c = read_struct("output", output);
  return {c.kv_len, c.freed_pages, c.num_freed};
}

ImportProblem to_cpp(const treemla_import* batch) {
  const treemla_import c = read_struct("batch", batch);
  check_reserved("batch", c.reserved);
  ImportProblem p;
  p.b = c.b;
  p.q_len = c.q_len;
  p.token_table = c.token_table;
  p.num_rows = c.num_rows;
  p.row_width = c.row_width;
  p.row_stride = c.row_stride;
  p.row_index = c.row_index;
  p.row_index_type = static_cast<IndexType>(c.row_index_type);
  p.seq_len = c.seq_len;
  p.seq_len_type = static_cast<IndexType>(c.seq_len_type);
  p.seq_len_has_tree = c.seq_len_has_tree != 0;
  p.mask_layout = static_cast<MaskLayout>(c.mask_layout);
  p.mask = c.mask;
  p.mask_len = c.mask_len;
  p.memory = static_cast<Memory>(c.memory);
  return p;
}

ImportOutput to_cpp(const treemla_import_output* output) {
  const treemla_import_output c = read_struct("output", output);
  check_reserved("output", c.reserved);
  return {c.kv_len, c.page_table, c.page_stride, c.ancestor_bits, c.words_per_row};
}

template <typename Problem, typename Query>
treemla_status workspace_bytes(const Problem* problem, size_t* bytes, Query query) noexcept {
  return guarded([&] {
    check_not_null("bytes", bytes);
    *bytes = query(to_cpp(problem));
  });
}

}  // namespace

treemla_status treemla_check_tree_run(const treemla_tree_run* run, int32_t b) noexcept {
  return guarded([&] { check_tree_run(to_cpp(run), b); });
}

treemla_status treemla_build_tree(const treemla_build* build, const treemla_tree_output* output,
                                  const treemla_tree_run* run) noexcept {
  return guarded([&] { build_tree(to_cpp(build), to_cpp(output), to_cpp(run)); });
}

treemla_status treemla_build_workspace_bytes(const treemla_build* build, size_t* bytes) noexcept {
  return workspace_bytes(build, bytes, build_workspace_bytes);
}

treemla_status treemla_expand_beam(const treemla_beam* beam, const treemla_beam_output* output,
                                   const treemla_tree_run* run) noexcept {
  return guarded([&] { expand_beam(to_cpp(beam), to_cpp(output), to_cpp(run)); });
}

treemla_status treemla_beam_workspace_bytes(const treemla_beam* beam, size_t* bytes) noexcept {
  return workspace_bytes(beam, bytes, beam_workspace_bytes);
}

treemla_status treemla_accept_path(const treemla_accept* accept, const treemla_accept_output* output,
                                   const treemla_tree_run* run) noexcept {
  return guarded([&] { accept_path(to_cpp(accept), to_cpp(output), to_cpp(run)); });
}

treemla_status treemla_accept_workspace_bytes(const treemla_accept* accept, size_t* bytes) noexcept {
  return workspace_bytes(accept, bytes, accept_workspace_bytes);
}

treemla_status treemla_compact_cache(const treemla_compact* compact, const treemla_compact_output* output,
                                     const treemla_tree_run* run) noexcept {
  return guarded([&] { compact_cache(to_cpp(compact), to_cpp(output), to_cpp(run)); });
}

treemla_status treemla_compact_workspace_bytes(const treemla_compact* compact, size_t* bytes) noexcept {
  return workspace_bytes(compact, bytes, compact_workspace_bytes);
}

treemla_status treemla_import_batch(const treemla_import* batch, const treemla_import_output* output,
                                    const treemla_tree_run* run) noexcept {
  return guarded([&] { import_batch(to_cpp(batch), to_cpp(output), to_cpp(run)); });
}

treemla_status treemla_import_workspace_bytes(const treemla_import* batch, size_t* bytes) noexcept {
  return workspace_bytes(batch, bytes, import_workspace_bytes);
}

void treemla_tree_run_init(treemla_tree_run* run, size_t size) noexcept {
  init_struct(run, size, treemla_tree_run{});
}

void treemla_build_init(treemla_build* build, size_t size) noexcept {
  treemla_build c = {};
  c.pad_token = BuildProblem{}.pad_token;
  init_struct(build, size, c);
}

void treemla_tree_output_init(treemla_tree_output* output, size_t size) noexcept {
  init_struct(output, size, treemla_tree_output{});
}

void treemla_beam_init(treemla_beam* beam, size_t size) noexcept { init_struct(beam, size, treemla_beam{}); }

void treemla_beam_output_init(treemla_beam_output* output, size_t size) noexcept {
  init_struct(output, size, treemla_beam_output{});
}

void treemla_accept_init(treemla_accept* accept, size_t size) noexcept {
  init_struct(accept, size, treemla_accept{});
}

void treemla_accept_output_init(treemla_accept_output* output, size_t size) noexcept {
  init_struct(output, size, treemla_accept_output{});
}

void treemla_compact_init(treemla_compact* compact, size_t size) noexcept {
  treemla_compact c = {};
  c.num_layers = 1;
  c.page_size = 1;
  init_struct(compact, size, c);
}

void treemla_compact_output_init(treemla_compact_output* output, size_t size) noexcept {
  init_struct(output, size, treemla_compact_output{});
}

void treemla_import_init(treemla_import* batch, size_t size) noexcept {
  treemla_import c = {};
  c.q_len = 1;
  init_struct(batch, size, c);
}

void treemla_import_output_init(treemla_import_output* output, size_t size) noexcept {
  init_struct(output, size, treemla_import_output{});
}
