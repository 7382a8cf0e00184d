// Arguments of the kernels in kernels.cu: 8 bytes each, as the launcher (gpu.cpp) gives them.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

// Sum of a branch and the stream, and its RMS norm.
struct NormArgs {
  const u16 *x, *y, *weight;
  u16 *sum, *normed;
  float* factors;  // of each row
  i64 width;
  double eps;
};

// SwiGLU, and its gradient.
struct GateArgs {
  const u16 *gate_up, *by_out;
  u16* out;
  i64 rows, width;
};

// Numbers in 4 bits: blocks of 64 with a scale each, and of `outer_block` scales.
struct Nf4Args {
  const unsigned char *codes, *scales;
  const float *outer, *tables;  // levels of numbers, then of scales
  u16* out;
  i64 len, outer_block;
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

// Weighted sum of the rows of each token, and its gradient.
struct CombineArgs {
  const u16 *rows, *by_out;  // [tokens · each, width], [tokens, width]
  const i64* places;         // [tokens, each]: which rows are a token's
  const float* weights;      // [tokens, each], or null where all are 1
  u16* out;                  // [tokens, width]; the gradient by rows, as they are
  float* by_weights;         // [tokens, each]
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

// Attention of one token of each slot.
struct AttendArgs {
  const u16* qkv;            // [slots, (HEADS + 2 · KEYS) · DIM]
  const float *cos, *sin;    // [positions, DIM]
  const u16 *q_norm, *k_norm;  // [DIM]: norms of each head, or null
  u16* cache;                // [rows, 2, KEYS, DIM], pages of PAGE rows
  const i64* positions;      // [slots], less than 0 for a slot that is not in use
  const i64* table;          // [slots, width]: pages of each slot
  const float* sinks;        // [HEADS]: scores of no key, or null
  u16* out;                  // [slots, HEADS · DIM]
  float* parts;              // [slots, HEADS, splits, DIM + 1], where there are several
  i64 width, window, splits;
  double scale, cap, eps;
};
