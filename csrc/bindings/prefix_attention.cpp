// prefix_attention: checks tensors and plan, then runs without Python's lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "bindings/tensor_view.h"
#include "cpu/prefix_attention.h"

namespace trace_fast {
namespace {

AttentionDtype attention_dtype(Dtype dtype) {
  if (dtype == Dtype::kBfloat16) return AttentionDtype::kBfloat16;
  return dtype == Dtype::kFloat16 ? AttentionDtype::kFloat16 : AttentionDtype::kFloat32;
}

Dtype dtype_of(const std::string& name) {
  for (Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    if (name == name_of(dtype)) return dtype;
  }
  refuse("dtype", "torch.float32, torch.bfloat16 or torch.float16", name);
}

RowsView rows_view(const TensorView& tensor) {
  if (tensor.size(2) > 1 && tensor.stride(2) != 1) {
    refuse(tensor.name, "a contiguous last axis", "stride " + std::to_string(tensor.stride(2)));
  }
  return {tensor.data, tensor.stride(0), tensor.stride(1)};
}

void expect(bool ok, const std::string& name, const std::string& expected, const std::string& got) {
  if (!ok) refuse(name, expected, got);
}

// Every index that the kernel will follow.
void check_plan(const TensorView& block_rows, const TensorView& path_blocks, const TensorView& spans, std::int64_t rows) {
  const auto* row = block_rows.as<std::int64_t>();
  for (std::int64_t i = 0; i < block_rows.size(0) * kKeyBlock; ++i) {
    expect(row[i] >= -1 && row[i] < rows, block_rows.name, "rows in -1.." + std::to_string(rows - 1), std::to_string(row[i]));
  }
  const auto* block = path_blocks.as<std::int64_t>();
  for (std::int64_t i = 0; i < path_blocks.size(0); ++i) {
    expect(block[i] >= 0 && block[i] < block_rows.size(0), path_blocks.name,
           "blocks in 0.." + std::to_string(block_rows.size(0) - 1), std::to_string(block[i]));
  }
  for (std::int64_t p = 0; p < spans.size(0); ++p) {
    const auto* s = spans.as<std::int64_t>() + 4 * p;
    expect(s[0] >= 0 && s[1] >= 0 && s[0] <= rows && s[1] <= rows - s[0], spans.name,
           "rows within 0.." + std::to_string(rows), std::to_string(s[1]) + " rows from " + std::to_string(s[0]) + " on");
    if (s[1] == 0) continue;
    expect(s[2] >= 0 && s[2] <= (std::int64_t{1} << 40), spans.name, "a depth of at least 0", std::to_string(s[2]));
    const std::int64_t blocks = (s[2] + s[1] - 1) / kKeyBlock + 1;
    expect(s[3] >= 0 && blocks <= path_blocks.size(0) && s[3] <= path_blocks.size(0) - blocks, spans.name,
           std::to_string(blocks) + " path blocks from a place in 0.." + std::to_string(path_blocks.size(0)),
           std::to_string(s[3]));
  }
}

std::vector<std::string> kernels(const std::string& dtype) {
  const auto found = prefix_attention_kernels(detect_cpu_features(), attention_dtype(dtype_of(dtype)));
  return {found.begin(), found.end()};
}

void run(const py::handle& query_NHD, const py::handle& key_NKD, const py::handle& value_NKD, const py::handle& out_NHD,
         const py::handle& lse_NH, const py::handle& block_rows_BK, const py::handle& path_blocks,
         const py::handle& spans_P4, double scale, std::int64_t window, double softcap, const py::handle& sinks_H,
         int n_threads, const std::string& kernel) {
  const auto floats = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16};
  const TensorView query = view(query_NHD, "query", floats, 3);
  const TensorView key = view(key_NKD, "key", {query.dtype}, 3);
  const TensorView value = view(value_NKD, "value", {query.dtype}, 3);
  const std::int64_t rows = query.size(0), heads = query.size(1), kv_heads = key.size(1);
  expect(heads > 0 && query.size(2) > 0, "query", "at least one head and dimension", shape_text(query.shape));
  expect(key.size(0) == rows, "key", std::to_string(rows) + " rows as the query", shape_text(key.shape));
  expect(key.size(2) == query.size(2), "key", "head_dim " + std::to_string(query.size(2)) + " as the query", shape_text(key.shape));
  expect(kv_heads > 0 && heads % kv_heads == 0, "key", "heads that divide the query's " + std::to_string(heads), shape_text(key.shape));
  expect(value.size(0) == rows && value.size(1) == kv_heads && value.size(2) > 0, "value",
         "rows and heads of the key and at least one dimension", shape_text(value.shape));
  const TensorView out = dense(out_NHD, "out", {query.dtype}, {rows, heads, value.size(2)});
  float* lse = lse_NH.is_none() ? nullptr : dense(lse_NH, "lse", {Dtype::kFloat32}, {rows, heads}).as<float>();
  const float* sinks = sinks_H.is_none() ? nullptr : dense(sinks_H, "sinks", {Dtype::kFloat32}, {heads}).as<float>();
  const TensorView block_rows = view(block_rows_BK, "block_rows", {Dtype::kInt64}, 2);
  dense(block_rows_BK, "block_rows", {Dtype::kInt64}, {block_rows.size(0), kKeyBlock});
  const TensorView blocks = flat(path_blocks, "path_blocks", {Dtype::kInt64});
  const TensorView spans = view(spans_P4, "spans", {Dtype::kInt64}, 2);
  dense(spans_P4, "spans", {Dtype::kInt64}, {spans.size(0), 4});
  check_plan(block_rows, blocks, spans, rows);
  expect(window >= 0, "window", "0 (all) or more", std::to_string(window));
  expect(softcap >= 0, "softcap", "0 (none) or more", std::to_string(softcap));
  expect(n_threads >= 1, "n_threads", "at least 1", std::to_string(n_threads));
  const auto known = kernels(name_of(query.dtype));
  if (std::find(known.begin(), known.end(), kernel) == known.end()) {
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
    refuse("kernel", "one that this processor runs on " + std::string(name_of(query.dtype)) + " (" + names + ")", kernel);
  }
  const PrefixAttentionArgs args{
      attention_dtype(query.dtype), rows_view(query), rows_view(key), rows_view(value), out.data, lse,
      heads, kv_heads, query.size(2), value.size(2),
      block_rows.as<std::int64_t>(), block_rows.size(0), blocks.as<std::int64_t>(), spans.as<std::int64_t>(), spans.size(0),
      scale, window, softcap, sinks, n_threads};
  bool done;
  {
    py::gil_scoped_release unlocked;
    done = prefix_attention(args, kernel.c_str());
  }
  if (!done) throw std::bad_alloc();
}

}  // namespace

void bind_prefix_attention(py::module_& m) {
  m.attr("PREFIX_ATTENTION_KEY_BLOCK") = kKeyBlock;
  m.def("prefix_attention_kernels", &kernels, py::arg("dtype"),
        "Names of the kernels that this processor runs for a dtype (\"torch.bfloat16\"), fastest first.");
  m.def("prefix_attention", &run, py::arg("query"), py::arg("key"), py::arg("value"), py::arg("out"), py::arg("lse"),
        py::arg("block_rows"), py::arg("path_blocks"), py::arg("spans"), py::arg("scale"), py::arg("window"),
        py::arg("softcap"), py::arg("sinks"), py::arg("n_threads"), py::arg("kernel"),
        "Writes out (and lse); see csrc/cpu/prefix_attention.h. ValueError names the argument, expected and actual.");
}

}  // namespace trace_fast
