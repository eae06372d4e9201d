#include "cuda/turn_credit.h"

#include "cuda/turn_credit_kernel.cuh"

namespace trace_fast {
namespace {

constexpr int kThreads = 256;

}  // namespace

template <class T>
cudaError_t launch_answer_lengths(const TurnCreditArgs<T>& args, std::int64_t* length_R, cudaStream_t stream) {
  if (args.n_rollouts == 0) return cudaSuccess;
  answer_length_kernel<T><<<static_cast<unsigned>(args.n_rollouts), kThreads, 0, stream>>>(args, length_R);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_turn_credit(const TurnCreditArgs<T>& args, const double* answer_weight_R, int shares,
                               cudaStream_t stream) {
  if (args.n_rollouts == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(args.n_rollouts), static_cast<unsigned>(shares));
  // Without tokens a rollout has tens of states: smaller blocks leave no warps idle.
  const int threads = args.with_tokens ? kThreads : 64;
  turn_credit_kernel<T><<<grid, threads, 0, stream>>>(args, answer_weight_R);
  return cudaGetLastError();
}

template cudaError_t launch_answer_lengths<float>(const TurnCreditArgs<float>&, std::int64_t*, cudaStream_t);
template cudaError_t launch_answer_lengths<double>(const TurnCreditArgs<double>&, std::int64_t*, cudaStream_t);
template cudaError_t launch_turn_credit<float>(const TurnCreditArgs<float>&, const double*, int, cudaStream_t);
template cudaError_t launch_turn_credit<double>(const TurnCreditArgs<double>&, const double*, int, cudaStream_t);

}  // namespace trace_fast
