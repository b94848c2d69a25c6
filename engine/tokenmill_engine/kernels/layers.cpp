// The layers of a transformer one after the other: each is five calls of the kernels, and on small models
// making these from an interpreter would take longer than some of them.

#include <algorithm>
#include <cstdint>

#include "attention_call.h"
#include "linear_call.h"

extern "C" {

// x + attention(norm(x)), then x + mlp(norm(x)). The calls are complete but for x, y, residual and the
// like, which are given below, the number of rows and of threads.
struct Layer {
  Linear query_key_value, attention_out, gate_up, down;
  Call attention;
};

struct Layers {
  const Layer* layers;
  void (*multiply)(const Linear*);  // `tokenmill_linear`
  void (*attend)(const Step*, const Call*);  // `tokenmill_write_and_attend`
  const Step* step;
  const void* x;  // [T, K], dense
  void* y;        // [T, K]
  // Memory for what is computed on the way: Q, K and V of all heads and what the heads give, of T rows; x
  // after attention and the opened gates, of a chunk.
  void *heads, *attended, *between, *gated;
  const void *cos, *sin;  // [T, R], dense
  int64_t num_layers, num_rows, chunk_rows;
  int32_t num_threads;
};

}  // extern "C"

namespace {

// Only attention looks at other rows. So what follows it, up to the next layer's Q, K and V, is done in chunks of
// rows, whose numbers are still in a cache when the next product reads them.
class Run {
 public:
  explicit Run(const Layers& all) : all_(all), size_(all.layers->down.is_bfloat16 ? 2 : 4) {}

  void layers() const {
    const Layer *layer = all_.layers, *end = layer + all_.num_layers;
    const void* x = all_.x;
    for_chunks([&](int64_t first, int64_t rows) { begin(*layer, x, first, rows); });
    for (; layer < end; layer++, x = all_.y) {
      attend(*layer);
      for_chunks([&](int64_t first, int64_t rows) {
        finish(*layer, x, first, rows);
        if (layer + 1 < end) begin(layer[1], all_.y, first, rows);
      });
    }
  }

 private:
  template <class Do>
  void for_chunks(const Do& run) const {
    for (int64_t first = 0; first < all_.num_rows; first += all_.chunk_rows)
      run(first, std::min(all_.chunk_rows, all_.num_rows - first));
  }

  const void* row(const void* x, int64_t first, int64_t width) const {
    return static_cast<const char*>(x) + first * width * size_;
  }
  void* row(void* x, int64_t first, int64_t width) const {
    return static_cast<char*>(x) + first * width * size_;
  }

  void begin(const Layer& layer, const void* x, int64_t first, int64_t rows) const {
    const Linear& call = layer.query_key_value;
    multiply(call, rows, row(x, first, call.inputs), nullptr, row(all_.heads, first, call.outputs));
  }

  // y may be x's memory.
  void finish(const Layer& layer, const void* x, int64_t first, int64_t rows) const {
    const Linear& out = layer.attention_out;
    multiply(out, rows, row(all_.attended, first, out.inputs), row(x, first, out.outputs), all_.between);
    multiply(layer.gate_up, rows, all_.between, nullptr, all_.gated);
    multiply(layer.down, rows, all_.gated, all_.between, row(all_.y, first, out.outputs));
  }

  void multiply(Linear call, int64_t rows, const void* x, const void* residual, void* y) const {
    call.x = x, call.x_row = call.inputs, call.residual = residual, call.y = y;
    call.num_rows = rows, call.num_threads = all_.num_threads;
    all_.multiply(&call);
  }

  void attend(const Layer& layer) const {
    Call call = layer.attention;
    const int64_t keys = call.num_heads * call.key_dim;
    const int64_t values = keys + call.num_kv_heads * call.key_dim;
    call.query = all_.heads, call.key = row(all_.heads, 1, keys), call.value = row(all_.heads, 1, values);
    call.query_row = call.key_row = call.value_row = layer.query_key_value.outputs;
    call.query_head = call.key_head = call.key_dim, call.value_head = call.value_dim;
    call.output = all_.attended, call.cos = all_.cos, call.sin = all_.sin;
    call.num_threads = all_.num_threads;
    all_.attend(all_.step, &call);
  }

  const Layers& all_;
  const int64_t size_;  // of a number, in bytes
};

}  // namespace

extern "C" void tokenmill_run_layers(const Layers* all) { Run(*all).layers(); }
