// Collectives as NCCL's: in a stream of the group, in order, and awaited by streams. What they move goes through gloo.
#include "simulator.h"

#include <ATen/Functions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <sstream>
#include <thread>

namespace sim {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What nobody waited for lives until it is over, as NCCL's watchdog has it.
struct Left {
  std::mutex mutex;
  std::vector<std::pair<TaskPtr, Tensors>> works;
  void add(TaskPtr end, Tensors tensors) {
    std::lock_guard<std::mutex> lock(mutex);
    works.emplace_back(std::move(end), std::move(tensors));
  }
  void sweep() {
    std::vector<std::pair<TaskPtr, Tensors>> all, kept;
    {
      std::lock_guard<std::mutex> lock(mutex);
      all.swap(works);
    }
    for (auto& one : all) {
      std::vector<Range> ranges;  // that nobody else has
      for (const auto& t : one.second)
        if (t.storage().use_count() == 1) for (const auto& range : ranges_of(t)) ranges.push_back(range);
      if (!Machine::get().settle(one.first, ranges)) kept.push_back(std::move(one));
    }
    std::lock_guard<std::mutex> lock(mutex);
    works.insert(works.end(), kept.begin(), kept.end());
  }
} left;

struct SimWork final : c10d::Work {
  SimWork(int rank, c10d::OpType type, TaskPtr end, Tensors kept, Tensors outs, bool holds)
      : Work(rank, type), end(std::move(end)), kept(std::move(kept)), outs(std::move(outs)), holds(holds) {}
  ~SimWork() override {
    if (!kept.empty()) left.add(end, std::move(kept));
  }
  bool isCompleted() override { return Machine::get().query(end); }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    Machine::get().raise_failures();
    if (holds) Machine::get().hold(current_stream(), end);
    kept.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  Tensors result() override { return outs; }

  TaskPtr end;
  Tensors kept, outs;
  bool holds;  // what ran in the stream of the caller is behind it anyway
};

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
};

// Gloo's messages are over only for who waits for them; that is a thread of their own.
struct Awaited final : c10d::Work {
  static WorkPtr of(WorkPtr inner) {
    auto out = c10::make_intrusive<Awaited>();
    std::thread([out, inner] {
      try {
        inner->wait();
        out->finish();
      } catch (...) {
        out->finish(std::current_exception());
      }
    }).detach();
    return out;
  }
};

// One collective of a task: asked again and again until it is over.
struct Part {
  std::string name;
  Tensors ins, outs;
  std::array<int64_t, 4> signature;
  std::function<WorkPtr()> start;
  std::function<void()> finish;
  c10d::ReduceOp op{c10d::ReduceOp::MAX};
};

Tensor plain(const Tensor& t) {  // in a dtype that gloo knows
  BelowAutograd guard;
  if (t.is_complex()) return at::view_as_real(t);
  return t.scalar_type() == at::kBool ? t.view(at::kByte) : t;
}

class SimGroup final : public c10d::Backend {
 public:
  SimGroup(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size)
      : Backend(rank, size), inner_(std::move(inner)), stream_(Machine::get().new_stream()) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  Tensor allocateTensor(long size, at::TensorOptions options) override {
    ++Machine::get().num_comm_allocations;
    return at::empty({size}, options);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void startCoalescing() override { is_coalescing_ = true; }
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    return issue(std::exchange(parts_, {}), is_async_, c10d::OpType::COALESCED);
  }

  WorkPtr _allgather_base(Tensor& out, Tensor& own, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(out.numel() == own.numel() * getSize(), "all-gather: the output has ", out.numel(), " elements, the input ", own.numel());
    auto to = plain(host_alias(out)), from = plain(host_alias(own));
    return add({"all_gather", {own}, {out}, sign(0, own), [=, this] {
                  std::vector<Tensors> outs{rows(to)};
                  Tensors ins{from.reshape(-1)};
                  return inner_->allgather(outs, ins);
                }, nullptr}, o.asyncOp, c10d::OpType::_ALLGATHER_BASE);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& owns, const c10d::AllgatherOptions& o) override {
    return together(outs.size(), [&](size_t i) { _allgather_base(outs[i], owns[i], o); });
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& owns, const c10d::AllgatherOptions& o) override {
    Tensors tos;
    for (const auto& out : outs[0]) tos.push_back(plain(host_alias(out)));
    auto from = plain(host_alias(owns[0]));
    return add({"all_gather", owns, outs[0], sign(0, owns[0]), [=, this] {
                  std::vector<Tensors> all{tos};
                  Tensors ins{from};
                  return inner_->allgather(all, ins);
                }, nullptr}, o.asyncOp, c10d::OpType::ALLGATHER);
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& all, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(all.numel() == out.numel() * getSize(), "reduce-scatter: the input has ", all.numel(), " elements, the output ", out.numel());
    auto total = std::make_shared<Tensor>();
    auto to = host_alias(out), from = host_alias(all);
    return add({"reduce_scatter", {all}, {out}, sign(1, out, o.reduceOp), [=, this, op = o.reduceOp] { return sum(from, *total, op); },
                [=, this, op = o.reduceOp] {
                  average(*total, op);
                  to.copy_(total->view({getSize(), -1})[getRank()].view(to.sizes()));
                }, o.reduceOp}, o.asyncOp, c10d::OpType::_REDUCE_SCATTER_BASE);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& alls, const c10d::ReduceScatterOptions& o) override {
    return together(outs.size(), [&](size_t i) { _reduce_scatter_base(outs[i], alls[i], o); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    auto total = std::make_shared<Tensor>();
    auto to = host_alias(tensors[0]);
    return add({"all_reduce", {}, {tensors[0]}, sign(2, tensors[0], o.reduceOp), [=, this, op = o.reduceOp] { return sum(to, *total, op); },
                [=, this, op = o.reduceOp] {
                  average(*total, op);
                  to.copy_(*total);
                }, o.reduceOp}, o.asyncOp, c10d::OpType::ALLREDUCE);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return together(tensors.size(), [&](size_t i) { Tensors one{tensors[i]}; allreduce(one, o); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    auto to = plain(host_alias(tensors[0]));
    return add({"broadcast", {}, {tensors[0]}, sign(3, tensors[0], o.rootRank), [=, this] {
                  auto options = o;
                  Tensors all{to};
                  return inner_->broadcast(all, options);
                }, nullptr}, o.asyncOp, c10d::OpType::BROADCAST);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    auto total = std::make_shared<Tensor>();
    auto to = host_alias(tensors[0]);
    return add({"reduce", {}, {tensors[0]}, sign(4, tensors[0], o.rootRank), [=, this] { return sum(to, *total, o.reduceOp); },
                [=, this] {
                  average(*total, o.reduceOp);
                  if (getRank() == o.rootRank) to.copy_(*total);
                }}, o.asyncOp, c10d::OpType::REDUCE);
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& alls, const c10d::ScatterOptions& o) override {
    auto to = plain(host_alias(outs[0]));
    Tensors froms, ins = alls.empty() ? Tensors{} : alls[0];
    for (const auto& one : ins) froms.push_back(plain(host_alias(one)));
    return add({"scatter", ins, outs, sign(5, outs[0], o.rootRank), [=, this] {
                  Tensors to_all{to};
                  std::vector<Tensors> from_all;
                  if (!froms.empty()) from_all.push_back(froms);
                  return inner_->scatter(to_all, from_all, o);
                }, nullptr}, o.asyncOp, c10d::OpType::SCATTER);
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& outs, std::vector<int64_t>& ins, const c10d::AllToAllOptions& o) override {
    auto to = plain(host_alias(out)), from = plain(host_alias(in));
    return add({"all_to_all", {in}, {out}, {6, 0, 0, 0}, [=, this]() mutable { return inner_->alltoall_base(to, from, outs, ins, o); }, nullptr},
               o.asyncOp, c10d::OpType::ALLTOALL_BASE);
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    auto from = plain(host_alias(tensors[0]));
    return add({"send", {tensors[0]}, {}, {-1, 0, 0, 0}, [=, this] { Tensors all{from}; return Awaited::of(inner_->send(all, peer, tag)); }, nullptr}, true, c10d::OpType::SEND);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    auto to = plain(host_alias(tensors[0]));
    return add({"recv", {}, {tensors[0]}, {-1, 0, 0, 0}, [=, this] { Tensors all{to}; return Awaited::of(inner_->recv(all, peer, tag)); }, nullptr}, true, c10d::OpType::RECV);
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    Tensors one{at::zeros({1}, at::TensorOptions().device(c10::Device(kSim, 0)))};
    auto work = allreduce(one, {});
    Machine::get().wait(static_cast<SimWork*>(work.get())->end, true);
    return work;
  }

 private:
  std::array<int64_t, 4> sign(int64_t kind, const Tensor& t, int64_t more = 0) const { return {kind, t.numel(), int64_t(t.scalar_type()), more}; }

  Tensors rows(const Tensor& out) const { return out.view({getSize(), -1}).unbind(0); }

  // The sum over all ranks of a copy, in float32 for what is narrower.
  WorkPtr sum(const Tensor& from, Tensor& total, const c10d::ReduceOp& op) {
    const bool is_half = from.scalar_type() == at::kHalf || from.scalar_type() == at::kBFloat16;
    total = is_half ? from.to(at::kFloat) : from.clone(at::MemoryFormat::Contiguous);
    c10d::AllreduceOptions options;
    const auto kind = c10d::ReduceOp::RedOpType(op);
    options.reduceOp = kind == c10d::ReduceOp::AVG || kind == c10d::ReduceOp::PREMUL_SUM ? c10d::ReduceOp::SUM : kind;
    if (kind == c10d::ReduceOp::PREMUL_SUM) {
      auto* more = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      more->tensor_factor.defined() ? total.mul_(more->tensor_factor.cpu()) : total.mul_(more->double_factor);
    }
    Tensors all{plain(total)};
    return inner_->allreduce(all, options);
  }
  void average(Tensor& total, const c10d::ReduceOp& op) const {
    if (c10d::ReduceOp::RedOpType(op) == c10d::ReduceOp::AVG) total.div_(getSize());
  }

  template <class F>
  WorkPtr together(size_t n, F each) {
    const bool was = std::exchange(is_coalescing_, true);
    for (size_t i = 0; i < n; i++) each(i);
    if (was) return nullptr;
    return endCoalescing();
  }

  // A collective of a dry run, in which all ranks say the same.
  void among_equals(const std::string& name, const Tensors& ins, const Tensors& outs, const c10d::ReduceOp& op) const {
    BelowAutograd guard;
    const bool adds = c10d::ReduceOp::RedOpType(op) == c10d::ReduceOp::SUM;
    for (size_t i = 0; i < outs.size(); i++) {
      auto out = outs[i];
      if (name == "all_gather") out.copy_(out.numel() == ins[0].numel() ? ins[0].view(out.sizes()) : ins[0].reshape({1, -1}).expand({getSize(), -1}).reshape(out.sizes()));
      if (name == "reduce_scatter") out.copy_(ins[0].view({getSize(), -1})[getRank()].view(out.sizes()));
      if (name == "all_to_all" && out.numel() == ins[0].numel()) out.copy_(ins[0].view(out.sizes()));
      if (adds && (name == "reduce_scatter" || name == "all_reduce")) out.mul_(getSize());
    }
  }

  WorkPtr on_host(const Part& part, c10d::OpType type) const {
    among_equals(part.name, part.ins, part.outs, part.op);
    auto over = std::make_shared<Task>();
    over->is_over = true;
    return c10::make_intrusive<SimWork>(getRank(), type, over, Tensors{}, part.outs, false);
  }

  WorkPtr add(Part part, bool is_async, c10d::OpType type) {
    if (Machine::get().is_dry() && !part.outs.empty() && part.outs[0].is_cpu()) return on_host(part, type);
    for (const auto* tensors : {&part.ins, &part.outs})
      for (const auto& t : *tensors) {
        TORCH_CHECK(t.device().type() == kSim, "simccl knows no tensors on ", t.device());
        TORCH_CHECK(t.is_contiguous() || part.name == "scatter", "Tensors must be contiguous");
      }
    if (is_coalescing_) {
      is_async_ = is_async;
      parts_.push_back(std::move(part));
      // No end yet: the caller is given that of all.
      return c10::make_intrusive<SimWork>(getRank(), type, Machine::get().mark(stream_), Tensors{}, Tensors{}, false);
    }
    std::vector<Part> parts;
    parts.push_back(std::move(part));
    return issue(std::move(parts), is_async, type);
  }

  WorkPtr issue(std::vector<Part> parts, bool is_async, c10d::OpType type) {
    auto& machine = Machine::get();
    left.sweep();
    const int stream = is_async ? stream_ : current_stream();
    if (is_async) machine.hold(stream, machine.mark(current_stream()));
    std::vector<Use> uses;
    Tensors kept, outs;
    std::string name;
    Record record{"collective", "", "", stream, 0, 0, getSize(), {}, 1};
    for (const auto& part : parts) {
      for (const auto& t : part.ins) uses.push_back({ranges_of(t), false}), kept.push_back(t), record.read_bytes += int64_t(t.nbytes());
      for (const auto& t : part.outs) uses.push_back({ranges_of(t), true}), kept.push_back(t), outs.push_back(t), record.written_bytes += int64_t(t.nbytes());
      if (name.empty()) name = part.name;
    }
    number_++;
    if (machine.is_dry()) {
      auto run = [parts = aliases(parts), this, self = c10::intrusive_ptr<SimGroup>::reclaim_copy(this)] {
        for (const auto& part : parts) among_equals(part.name, part.ins, part.outs, part.op);
        return true;
      };
      machine.issue(stream, name, uses, std::move(run), std::move(record));
      auto end = machine.mark(stream);
      if (!is_async) kept.clear();
      return c10::make_intrusive<SimWork>(getRank(), type, end, std::move(kept), std::move(outs), is_async);
    }
    for (auto& part : parts) part.ins.clear(), part.outs.clear();  // a task keeps no memory alive
    struct State {
      std::vector<Part> parts;
      size_t i = 0;
      int step = 0;
      WorkPtr work;
      std::vector<WorkPtr> begun;
      Tensors headers;
      std::chrono::steady_clock::time_point begin;
    };
    auto state = std::make_shared<State>();
    state->parts = std::move(parts);
    auto run = [state, this, self = c10::intrusive_ptr<SimGroup>::reclaim_copy(this)]() -> bool {
      BelowAutograd guard;
      while (state->i < state->parts.size()) {
        auto& part = state->parts[state->i];
        if (state->step == 0) {
          state->step = 1;
          state->begin = std::chrono::steady_clock::now();
          if (part.signature[0] >= 0) {
            state->headers.clear();
            for (int r = 0; r < getSize(); r++) state->headers.push_back(at::zeros({5}, at::kLong));
            auto own = at::empty({5}, at::kLong);
            for (int k = 0; k < 4; k++) own.data_ptr<int64_t>()[k] = part.signature[k];
            own.data_ptr<int64_t>()[4] = int64_t(state->parts.size());
            std::vector<Tensors> all{state->headers};
            Tensors ins{own};
            state->work = inner_->allgather(all, ins);
          }
        }
        if (state->step == 1) {
          if (part.signature[0] >= 0) {
            if (!over(*state)) return false;
            for (int r = 0; r < getSize(); r++) {
              const auto* other = state->headers[r].data_ptr<int64_t>();
              for (int k = 0; k < 4; k++)
                if (other[k] != part.signature[k]) {
                  std::ostringstream out;
                  out << "the collective '" << part.name << "' hangs: rank " << getRank() << " has (kind, elements, dtype, op or root) (";
                  for (int j = 0; j < 4; j++) out << part.signature[j] << (j < 3 ? ", " : ")");
                  out << ", rank " << r << " has (";
                  for (int j = 0; j < 4; j++) out << other[j] << (j < 3 ? ", " : ")");
                  TORCH_CHECK(false, out.str());
                }
            }
          }
          // Messages that were put together set out together: each may wait for another's.
          auto& begun = state->begun;
          begun.resize(state->parts.size());
          for (size_t j = state->i; j < begun.size() && state->parts[j].signature[0] < 0; j++)
            if (!begun[j]) begun[j] = state->parts[j].start();
          state->work = begun[state->i] ? begun[state->i] : part.start();
          state->step = 2;
        }
        if (!over(*state)) return false;
        if (part.finish) part.finish();
        state->step = 0;
        state->i++;
      }
      return true;
    };
    last_ = machine.issue(stream, name, uses, std::move(run), std::move(record), last_);  // one after the other, whatever the stream
    auto end = machine.mark(stream);
    if (!is_async) kept.clear();
    return c10::make_intrusive<SimWork>(getRank(), type, end, std::move(kept), std::move(outs), is_async);
  }

  static std::vector<Part> aliases(std::vector<Part> parts) {
    for (auto& part : parts)
      for (auto* tensors : {&part.ins, &part.outs}) for (auto& t : *tensors) t = host_alias(t);
    return parts;
  }

  template <class S>
  bool over(S& state) const {
    if (state.work->isCompleted()) {
      if (!state.work->isSuccess()) std::rethrow_exception(state.work->exception());
      return true;
    }
    TORCH_CHECK(std::chrono::steady_clock::now() - state.begin < Machine::get().bound(),
                "the collective '", state.parts[state.i].name, "' hangs: a peer does not take part");
    return false;
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  int stream_;
  uint64_t number_ = 0;
  TaskPtr last_;
  bool is_coalescing_ = false, is_async_ = true;
  std::vector<Part> parts_;
};

}  // namespace

void register_group(void* module) {
  auto& m = *static_cast<pybind11::module*>(module);
  m.def("make_group", [](c10::intrusive_ptr<c10d::Backend> inner, int rank, int size) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimGroup>(std::move(inner), rank, size);
  });
}

}  // namespace sim
