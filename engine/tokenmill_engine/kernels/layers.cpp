// The layers of a transformer one after the other: each is five calls of the kernels, and on small models
// making these from an interpreter would take longer than some of them.

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
  // Memory for what is computed on the way, each of T rows: Q, K and V of all heads, what the heads give,
  // x after attention, and the opened gates.
  void *heads, *attended, *between, *gated;
  const void *cos, *sin;  // [T, R], dense
  int64_t num_layers, num_rows;
  int32_t num_threads;
};

}  // extern "C"

namespace {

class Run {
 public:
  explicit Run(const Layers& all) : all_(all) {}

  // y may be x's memory.
  void layer(const Layer& layer, const void* x, void* y) const {
    multiply(layer.query_key_value, x, nullptr, all_.heads);
    attend(layer.attention, layer.query_key_value.outputs);
    multiply(layer.attention_out, all_.attended, x, all_.between);
    multiply(layer.gate_up, all_.between, nullptr, all_.gated);
    multiply(layer.down, all_.gated, all_.between, y);
  }

 private:
  void multiply(Linear call, const void* x, const void* residual, void* y) const {
    call.x = x, call.x_row = call.inputs, call.residual = residual, call.y = y;
    call.num_rows = all_.num_rows, call.num_threads = all_.num_threads;
    all_.multiply(&call);
  }

  void attend(Call call, int64_t row) const {
    const int64_t size = call.is_bfloat16 ? 2 : 4;
    const int64_t keys = call.num_heads * call.key_dim;
    const int64_t values = keys + call.num_kv_heads * call.key_dim;
    const char* heads = static_cast<const char*>(all_.heads);
    call.query = heads, call.key = heads + keys * size, call.value = heads + values * size;
    call.query_row = call.key_row = call.value_row = row;
    call.query_head = call.key_head = call.key_dim, call.value_head = call.value_dim;
    call.output = all_.attended, call.cos = all_.cos, call.sin = all_.sin;
    call.num_threads = all_.num_threads;
    all_.attend(all_.step, &call);
  }

  const Layers& all_;
};

}  // namespace

extern "C" void tokenmill_run_layers(const Layers* all) {
  const Run run(*all);
  const void* x = all->x;
  for (int64_t number = 0; number < all->num_layers; number++) {
    run.layer(all->layers[number], x, all->y);
    x = all->y;
  }
}
