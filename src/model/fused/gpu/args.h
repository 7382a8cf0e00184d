// Arguments of the kernels: 8 bytes each, as the launcher (launch.cpp) gives them.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// RMS norm of x, or of the sum of a branch and the stream.
struct NormArgs {
  const u16 *x, *y, *weight;  // y: null without a sum
  u16 *sum, *normed;
  float* factors;  // of each row
  i64 width;
  double eps, more;  // `more` is added to the weight
};

// SwiGLU, and its gradient.
struct GateArgs {
  const u16 *gate_up, *by_out;
  u16* out;
  i64 rows, width;
};

// Numbers in 4 bits: blocks of 64 with a scale each, and of `outer_block` scales.
struct FourBitsArgs {
  const unsigned char *codes, *scales;
  const float *outer, *tables;  // levels of numbers, then of scales
  u16* out;
  i64 len, block, outer_block;
  double offset;
};

// Rotation of heads.
struct RotateArgs {
  const u16* x;
  const float *cos, *sin;
  u16* out;
  i64 row_stride, heads, dim;
  double turn;
};

// Products of tokens by the matrix of a router.
struct RouterArgs {
  const u16 *x, *matrix, *bias;  // [tokens, width], [experts, width], and [experts] or null
  float* logits;                 // [tokens, experts]
  i64 tokens, experts, width;
};

// The experts of each token.
struct RouteArgs {
  const float* logits;  // [tokens, experts]
  float* weights;       // [tokens, each]
  i64* chosen;          // [tokens, each], the likeliest first
  i64 tokens, experts, each, normalized;
};

// What is to be computed, by expert.
struct SortArgs {
  const i64* chosen;            // [entries], `each` of them of one token
  i64 *sources, *places;        // [entries]: the token of each row; the row of each entry
  i64* experts;                 // [entries]: the expert of each row
  int* ends;                    // [experts]: where each one's rows end
  i64 entries, each;
};

// gpt-oss's activation, its gate and up in turns.
struct BoundedArgs {
  const u16 *gate_up, *bias;  // [rows, 2 · width], [experts, 2 · width]
  const i64* experts;         // [rows]
  u16* out;                   // [rows, width]
  i64 rows, width;
  double alpha, limit;
};

// Weighted sum of the rows of each token, and its gradient.
struct CombineArgs {
  const u16 *rows, *by_out;    // [tokens · each, width], [tokens, width]
  const i64* places;           // [tokens, each]: which rows are a token's
  const float* weights;        // [tokens, each], or null where all are 1
  const u16* bias;             // [experts, width], or null: added to a row of each expert,
  const i64* experts;          // [tokens, each], which these are
  const u16 *shared, *gates;   // [tokens, width] by the sigmoids of [tokens], or null: added to the sum
  u16* out;                    // [tokens, width]; the gradient by rows, as they are
  float* by_weights;           // [tokens, each]
  i64 each, width;
};

// Softmax of logits, and its gradient.
struct SoftmaxArgs {
  const float* logits;
  const i64* targets;
  float* found;  // of each row the target's log-probability, the entropy, and the logarithm of the sum of e^logit
  const float *slopes, *entropy_slopes;
  u16* gradient;
  i64 width;
};

// Numbers of a row of logits that a block of `draw_parts` takes.
constexpr i64 PART = 8192;

// Warps of a block of `draw`.
constexpr int DRAW_WARPS = 16;

// A token drawn from each row of logits.
struct DrawArgs {
  const float* logits;
  const double* settings;  // of each row: temperature, or 0 for the likeliest; a uniform number; top-k, top-p, min-p, or 0, 1, 0
  double* drawn;           // of each row: token and log-probability, NaN where the row is not finite
  float* parts;            // [rows, count, 3]: what is known of each part of a row
  i64 width, count;
};

// One token of each sequence in a gated delta net.
struct DeltaArgs {
  const u16* projected;                // [rows, mixed + values + 2 · heads]: queries, keys and values; gates; beta and step of each head
  const u16* conv;                     // [mixed, kernel]
  u16* inputs;                         // [rows, mixed, kernel − 1]: the last inputs of the convolution
  float* states;                       // [rows, heads, KEY_DIM, VALUE_DIM]
  const u16 *step_bias, *decay, *norm; // [heads], [heads], [VALUE_DIM]
  u16* out;                            // [rows, values]
  i64 key_heads, shared, kernel;       // `shared`: heads of values with the same keys
  double eps;
};

// Widest matrix that `delta_inverse` takes.
constexpr int INVERTED = 64;

// (1 + A)⁻¹ of what is below the diagonal of each matrix.
struct InverseArgs {
  const float* matrices;  // [matrices, width, width]
  float* inverses;
  i64 width;
};

// Queries, keys and values of a gated delta net by chunk, and the gradient by what they are made of.
struct NetInputsArgs {
  const u16 *packed, *others, *conv;               // [count, …] with rows `stride` apart, [others, mixed], [mixed, CONV]
  const i64* sources;                              // [chunks, CONV − 1 + chunk]: rows of `packed`, and then of `others`
  float *query, *key, *value;                      // [chunks, heads, chunk, …]
  const float *by_query, *by_key, *by_value;
  u16* by_packed;                                  // [count, mixed]
  float *by_seen, *by_taps;                        // [chunks, CONV − 1, mixed]: by what chunks see before their own; [chunks, mixed, CONV]
  i64 stride, count, key_heads, shared, chunk;
};

// Attention of one token of each slot.
struct AttendArgs {
  const u16* qkv;            // [slots, PROJECTED]
  const float *cos, *sin;    // [positions, DIM]
  const u16 *q_norm, *k_norm;  // [DIM]: norms of each head, or null
  u16* cache;                // [rows, 2, KEYS, DIM], pages of PAGE rows
  const i64* positions;      // [slots], less than 0 for a slot that is not in use
  const i64* table;          // [slots, width]: pages of each slot
  const float* sinks;        // [HEADS]: scores of no key, or null
  u16* out;                  // [slots, HEADS · DIM]
  float* parts;              // [slots, HEADS, splits, DIM + 1], where there are several
  i64 width, window, splits;
  double scale, cap, eps, more;  // `more` is added to the weights of the norms
};
