// "sim" as torch sees it: guard, hooks, pinned memory, and every operation of torch as a task of a stream.
#include "simulator.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace sim {
namespace {

constexpr size_t kMaxRuns = 4096, kMaxKnown = 4096;
constexpr int64_t kMaxDryBytes = 1 << 20;  // of what the host computes though nothing is to be
const c10::Device kDevice{kSim, 0};

// Memory.

struct SimAllocator final : c10::Allocator {
  static void drop(void* p) { Machine::get().free(p); }
  c10::DataPtr allocate(size_t n) override {
    void* p = Machine::get().allocate(n, current_stream());
    return {p, p, &drop, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "no copies within the allocator"); }
} sim_allocator;

// Memory of the host that copies may read and write late. It is let go when those that use it are over. Nobody waits
// for its lock with the GIL.
struct Pinned {
  std::mutex mutex;
  std::map<uintptr_t, size_t> sizes;
  std::multimap<uintptr_t, TaskPtr> uses;
  std::vector<std::pair<void*, std::vector<TaskPtr>>> dropped;

  uintptr_t start_of(const void* p) {
    auto it = sizes.upper_bound(reinterpret_cast<uintptr_t>(p));
    if (it == sizes.begin()) return 0;
    --it;
    return reinterpret_cast<uintptr_t>(p) < it->first + it->second ? it->first : 0;
  }
  bool holds(const void* p) {
    WithoutGIL no_gil;
    std::lock_guard<std::mutex> lock(mutex);
    return start_of(p) != 0;
  }
  // Whether a task has still to use it, or to write to it.
  bool is_busy(const void* p, bool writes) {
    WithoutGIL no_gil;
    std::lock_guard<std::mutex> lock(mutex);
    const auto start = start_of(p);
    bool is_busy = false;
    for (auto it = uses.lower_bound(start); it != uses.upper_bound(start); ++it)
      is_busy |= !it->second->is_over && (!writes || it->second->name == "copy_ to the host");
    return is_busy;
  }
  void use(const void* p, const TaskPtr& task) {
    WithoutGIL no_gil;
    std::lock_guard<std::mutex> lock(mutex);
    const auto start = start_of(p);
    for (auto it = uses.lower_bound(start); it != uses.upper_bound(start);) it = it->second->is_over ? uses.erase(it) : std::next(it);
    uses.emplace(start, task);
  }
  void sweep() {
    for (auto it = dropped.begin(); it != dropped.end();) {
      bool is_over = true;
      for (const auto& task : it->second) is_over = is_over && task->is_over;
      if (is_over) c10::free_cpu(it->first);
      it = is_over ? dropped.erase(it) : std::next(it);
    }
  }
  void drop(void* p) {
    if (!p) return;
    const auto start = reinterpret_cast<uintptr_t>(p);
    WithoutGIL no_gil;
    std::lock_guard<std::mutex> lock(mutex);
    Machine::get().forget_shadow(start, start + sizes[start]);
    std::vector<TaskPtr> tasks;
    for (auto it = uses.lower_bound(start); it != uses.upper_bound(start); ++it) tasks.push_back(it->second);
    uses.erase(start);
    sizes.erase(start);
    dropped.emplace_back(p, std::move(tasks));
    sweep();
  }
} pinned;

struct PinnedAllocator final : c10::Allocator {
  static void drop(void* p) { pinned.drop(p); }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? c10::alloc_cpu(n) : nullptr;
    if (p) {
      WithoutGIL no_gil;
      std::lock_guard<std::mutex> lock(pinned.mutex);
      pinned.sweep();
      pinned.sizes[reinterpret_cast<uintptr_t>(p)] = n;
    }
    return {p, p, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} pinned_allocator;

// Streams and events.

c10::Stream stream_of(int number) { return c10::Stream(c10::Stream::UNSAFE, kDevice, number); }

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream_of(Machine::get().new_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(Machine::get().new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream_of(exchange_stream(int(stream.id()))); }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<TaskPtr*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new TaskPtr();
    *static_cast<TaskPtr*>(*event) = Machine::get().mark(int(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Machine::get().hold(int(stream.id()), *static_cast<TaskPtr*>(event));
  }
  bool queryEvent(void* event) const override { return !event || Machine::get().query(*static_cast<TaskPtr*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) Machine::get().wait(*static_cast<TaskPtr*>(event), true);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Machine::get().query(Machine::get().mark(int(stream.id())));
  }
  void synchronizeStream(const c10::Stream& stream) const override { Machine::get().wait_stream(int(stream.id()), true); }
  void synchronizeDevice(c10::DeviceIndex) const override { Machine::get().wait_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    Machine::get().record_stream(ptr.get(), int(stream.id()));
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0.0; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

// Tensors.

at::Tensor make(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(size, stride, &sim_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

bool is_sim(const at::Tensor& t) { return t.defined() && t.device().type() == kSim; }

Use reads(const at::Tensor& t) { return {ranges_of(t), false}; }
Use writes(const at::Tensor& t) { return {ranges_of(t), true}; }

int64_t bytes_of(const std::vector<Use>& uses, bool written) {
  int64_t total = 0;
  for (const auto& use : uses)
    if (use.writes == written) for (const auto& range : use.ranges) total += int64_t(range.end - range.begin);
  return total;
}

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const size_t kept = std::min(num_bytes, impl->nbytes());
  c10::DataPtr fresh = sim_allocator.allocate(num_bytes);
  const auto to = reinterpret_cast<uintptr_t>(fresh.get()), from = reinterpret_cast<uintptr_t>(impl->data_ptr().get());
  if (kept) {
    Machine::get().issue(current_stream(), "resize", {{{{from, from + kept}}, false}, {{{to, to + kept}}, true}},
                         [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), kept); return true; },
                         {"copy", "", "", 0, int64_t(kept), int64_t(kept), 0, {}, 1});
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(num_bytes);
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* p) const override { return pinned.holds(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override { resize_storage(storage, num_bytes); }
};

// Operations.

using Stack = torch::jit::Stack;

template <class F>
c10::IValue map_tensors(const c10::IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> out;
    for (const auto& t : value.toTensorVector()) out.push_back(f(t));
    return c10::IValue(std::move(out));
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& t : value.toOptionalTensorList().vec()) out.push_back(t ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return c10::IValue(std::move(out));
  }
  return value;
}

template <class F>
void each_tensor(const c10::IValue& value, F f) {
  map_tensors(value, [&](const at::Tensor& t) { if (t.defined()) f(t); return t; });
}

at::Tensor meta_of(const at::Tensor& t) {
  if (!is_sim(t)) return t;
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta).pinned_memory(false));
}

at::Tensor on_host(const at::Tensor& t) { return is_sim(t) ? host_alias(t) : t; }

struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard python{c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// A view of the same storage, as a view of the memory on the host tells.
at::Tensor view_like(const at::Tensor& source, const at::Tensor& seen) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(source.storage()), source.key_set(), seen.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(seen.storage_offset());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides());
  return out;
}

// The same, within an alias of all of its storage.
at::Tensor within_storage(const at::Tensor& t) {
  const auto num = int64_t(t.storage().nbytes() / t.itemsize());
  auto all = at::from_blob(const_cast<void*>(t.storage().data()), {num}, [](void*) {},
                           at::TensorOptions().dtype(t.dtype()).device(c10::kCPU), c10::Device(c10::kCPU));
  return all.as_strided(t.sizes(), t.strides(), t.storage_offset());
}

c10::OperatorHandle replaced(const c10::OperatorHandle& op, Stack* stack, size_t num_args) {
  const auto& name = op.schema().name();
  auto& known = c10::Dispatcher::singleton();
  if (name == "aten::convolution_overrideable") return known.findSchemaOrThrow("aten::convolution", "");
  if (name == "aten::convolution_backward_overrideable") {  // which has one argument less
    const auto args = torch::jit::last(*stack, num_args);
    const auto mask = args.back().toBoolList();
    c10::IValue sizes;
    if (mask.get(2)) sizes = c10::List<int64_t>({args[0].toTensor().size(1)});
    stack->insert(stack->end() - int64_t(num_args) + 3, sizes);
    return known.findSchemaOrThrow("aten::convolution_backward", "");
  }
  return op;
}

bool is_read_only_view(const c10::FunctionSchema& schema) {
  bool is_view = false;
  for (const auto& ret : schema.returns()) is_view |= ret.alias_info() && !ret.alias_info()->isWrite();
  return is_view;
}

void add_bytes(std::string& key, const void* from, size_t num_bytes) { key.append(static_cast<const char*>(from), num_bytes); }

template <class T>
void add_values(std::string& key, c10::ArrayRef<T> values) {
  const size_t num = values.size();
  add_bytes(key, &num, sizeof(num));
  add_bytes(key, values.data(), num * sizeof(T));
}

// Appends what of an argument the shapes of results depend on; false where its values may be among that.
bool describe(const c10::IValue& value, std::string& key) {
  key += value.tagKind();
  key += ';';
  if (value.isTensor()) {
    const auto& t = value.toTensor();
    key += t.defined() ? '1' : '0';
    if (!t.defined()) return true;
    const bool is_number = t.unsafeGetTensorImpl()->is_wrapped_number();
    if (!is_sim(t) && !is_number) return false;
    key += is_number ? 'n' : 't';
    key += char(t.scalar_type());
    add_values<int64_t>(key, t.sizes());
    add_values<int64_t>(key, t.strides());
    return true;
  }
  if (value.isTensorList()) {
    const auto tensors = value.toTensorVector();
    key += std::to_string(tensors.size()) + ";";
    for (const auto& t : tensors) if (!describe(t, key)) return false;
    return true;
  }
  if (value.isInt() || value.isDouble() || value.isBool()) {
    const double number = value.isDouble() ? value.toDouble() : 0;
    const int64_t whole = value.isInt() ? value.toInt() : value.isBool() ? int64_t(value.toBool()) : 0;
    add_bytes(key, &number, sizeof(number));
    add_bytes(key, &whole, sizeof(whole));
    return true;
  }
  if (value.isIntList()) return add_values<int64_t>(key, value.toIntVector()), true;
  if (value.isDoubleList()) return add_values<double>(key, value.toDoubleVector()), true;
  if (value.isBoolList()) {
    const auto flags = value.toBoolList();
    key += std::to_string(flags.size()) + ";";
    for (const bool flag : flags) key += flag ? '1' : '0';
    return true;
  }
  return value.isNone() || value.isDevice();
}

// Calls an operation on tensors without memory, or gives the results of such a call that was there before: many of
// torch's rules for these are in Python, and a program calls the same operation with the same shapes again and again.
void call_on_metas(const c10::OperatorHandle& op, const Stack& args, Stack* metas) {
  static thread_local auto& known = *new std::unordered_map<std::string, Stack>();  // outlives the interpreter
  const auto& name = op.operator_name();
  std::string key = name.name + "." + name.overload_name + ";" + std::to_string(int(at::get_default_dtype_as_scalartype())) + ";";
  bool is_described = op.schema().name().rfind("aten::", 0) == 0;
  for (size_t i = 0; is_described && i < args.size(); i++) {
    is_described = describe(args[i], key) && !(op.schema().arguments()[i].kwarg_only() && op.schema().arguments()[i].alias_info());
  }
  const auto found = is_described ? known.find(key) : known.end();
  if (found != known.end()) {
    *metas = found->second;
    return;
  }
  op.callBoxed(metas);
  if (!is_described) return;
  if (known.size() == kMaxKnown) known.clear();
  Stack& kept = known[key];
  for (const auto& result : *metas) {  // copies, which Python has not seen
    kept.push_back(map_tensors(result, [](const at::Tensor& t) {
      return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta)) : t;
    }));
  }
}

// The argument that a result is.
c10::IValue argument_of(const c10::FunctionSchema& schema, const Stack& args, const c10::AliasInfo& alias) {
  for (size_t i = 0; i < args.size(); i++) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && other->beforeSets() == alias.beforeSets()) return args[i];
  }
  TORCH_CHECK(false, "no argument of ", schema.name(), " is its result");
}

void boxed(const c10::OperatorHandle& asked, Stack* stack) {
  auto& machine = Machine::get();
  const auto op = replaced(asked, stack, asked.schema().arguments().size());
  const auto& schema = op.schema();
  const size_t num_args = schema.arguments().size(), num_returns = schema.returns().size();
  Stack args(stack->end() - int64_t(num_args), stack->end());
  const std::string name = schema.name().substr(schema.name().find("::") + 2);
  BelowAutograd below;

  if (name == "_foreach_copy_") {  // between devices it is a copy each
    const auto to = args[0].toTensorVector(), from = args[1].toTensorVector();
    bool is_one = true;
    for (const auto* tensors : {&to, &from}) for (const auto& t : *tensors) is_one = is_one && is_sim(t);
    if (!is_one) {
      for (size_t i = 0; i < to.size(); i++) to[i].copy_(from[i], args[2].toBool());
      torch::jit::drop(*stack, num_args);
      return;
    }
  }

  // Views of memory, found as they are on the host.
  if (is_read_only_view(schema)) {
    at::Tensor source;
    each_tensor(args[0], [&](const at::Tensor& t) { source = t; });
    Stack host = args;
    host[0] = within_storage(source);
    op.callBoxed(&host);
    torch::jit::drop(*stack, num_args);
    for (auto& out : host) stack->push_back(map_tensors(out, [&](const at::Tensor& t) { return view_like(source, t); }));
    return;
  }

  std::vector<Use> uses;
  std::vector<at::Tensor> outs;  // that `out=` names: they may have to grow
  std::vector<std::vector<int64_t>> shapes;
  int64_t itemsize = 1;
  const bool takes_indices = name.find("index") != std::string::npos;
  for (size_t i = 0; i < num_args; i++) {
    const auto& argument = schema.arguments()[i];
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    args[i] = map_tensors(args[i], [&](const at::Tensor& t) {
      if (!t.defined()) return t;
      if (is_sim(t)) {
        if (is_written && argument.kwarg_only()) outs.push_back(t);
        shapes.push_back(t.sizes().vec());
        itemsize = std::max<int64_t>(itemsize, t.itemsize());
        return t;
      }
      TORCH_CHECK(t.dim() == 0 || t.is_meta() || takes_indices, "Expected all tensors to be on the same device, but ", schema.name(),
                  " found at least two: sim:0 and ", t.device());
      auto copy = t.clone();  // passed by value
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
      return copy;
    });
    if (args[i].isDevice()) args[i] = c10::Device(c10::kCPU);
  }

  // What it gives, by its rules for tensors without memory.
  bool makes_new = !outs.empty();
  for (const auto& ret : schema.returns()) makes_new |= !ret.alias_info();
  bool is_known = true;
  Stack results;
  if (makes_new) {
    Stack metas;
    for (const auto& arg : args) metas.push_back(arg.isDevice() ? c10::IValue(c10::Device(c10::kMeta)) : map_tensors(arg, meta_of));
    std::vector<at::Tensor> meta_outs;
    for (size_t i = 0; i < num_args; i++)
      if (schema.arguments()[i].kwarg_only() && schema.arguments()[i].alias_info())
        each_tensor(metas[i], [&](const at::Tensor& t) { meta_outs.push_back(t); });
    try {
      for (const auto& ret : schema.returns()) is_known = is_known && (ret.type()->isSubtypeOf(*c10::TensorType::get()) || ret.type()->kind() == c10::TypeKind::ListType);
      if (is_known) call_on_metas(op, args, &metas);
      for (size_t i = 0; is_known && i < outs.size(); i++) {
        if (outs[i].sizes() != meta_outs[i].sizes()) outs[i].resize_(meta_outs[i].sizes());
      }
    } catch (const std::exception&) {
      is_known = false;  // or it is an error: the host's own then says which
    }
    results = std::move(metas);
  }

  if (!is_known) {  // its result's shape depends on values, or is no tensor: the host waits
    const bool is_edge = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
                         schema.returns().empty() || !schema.returns()[0].type()->isSubtypeOf(*c10::TensorType::get());
    for (size_t i = 0; i < num_args; i++) {
      const auto* alias = schema.arguments()[i].alias_info();
      each_tensor(args[i], [&](const at::Tensor& t) { if (is_sim(t)) uses.push_back({ranges_of(t), alias && alias->isWrite()}); });
    }
    auto task = machine.issue(current_stream(), name, uses, [] { return true; }, {"op", "", "", 0, bytes_of(uses, false), 0, 0, shapes, itemsize});
    machine.wait(task, is_edge);
    if (machine.is_dry()) {  // it would be computed, and of zeros: small things alone may be
      TORCH_CHECK(bytes_of(uses, false) + bytes_of(uses, true) <= kMaxDryBytes, "'", name, "' is too large to be computed in a dry run");
    }
    Stack host;
    for (const auto& arg : args) host.push_back(map_tensors(arg, on_host));
    op.callBoxed(&host);
    torch::jit::drop(*stack, num_args);
    for (size_t i = 0; i < host.size(); i++) {
      if (const auto* alias = schema.returns()[i].alias_info()) {
        stack->push_back(argument_of(schema, args, *alias));
        continue;
      }
      stack->push_back(map_tensors(host[i], [&](const at::Tensor& t) {
        if (!t.defined() || !t.is_cpu()) return t;
        auto out = make(t.sizes(), t.strides(), t.scalar_type());
        const std::vector<Use> own{writes(out)};
        machine.issue(current_stream(), name, own, [t, to = host_alias(out)] { to.copy_(t); return true; },
                      {"op", "", "", 0, 0, bytes_of(own, true), 0, {}, int64_t(t.itemsize())});
        return out;
      }));
    }
    return;
  }

  // The results, and what is used.
  std::vector<at::Tensor> fresh;
  Stack given;
  for (size_t i = 0; i < num_returns; i++) {
    const auto* alias = schema.returns()[i].alias_info();
    if (!alias) {
      given.push_back(map_tensors(results[i], [&](const at::Tensor& t) {
        if (!t.defined()) return t;
        auto out = make(t.sizes(), t.strides(), t.scalar_type());
        fresh.push_back(out);
        return out;
      }));
      continue;
    }
    given.push_back(argument_of(schema, args, *alias));
  }
  for (size_t i = 0; i < num_args; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    each_tensor(args[i], [&](const at::Tensor& t) {
      if (is_sim(t)) uses.push_back({ranges_of(t), alias && alias->isWrite()});
    });
  }
  for (const auto& out : fresh) uses.push_back(writes(out));

  Stack host;
  for (const auto& arg : args) host.push_back(map_tensors(arg, on_host));
  Stack targets;
  for (size_t i = 0; i < num_returns; i++)
    targets.push_back(schema.returns()[i].alias_info() ? c10::IValue() : map_tensors(given[i], on_host));
  const bool keeps_wide = name == "native_layer_norm_backward";  // what a GPU's forward saves in float32
  auto run = [op, host, targets, keeps_wide]() mutable {
    BelowAutograd guard;
    if (keeps_wide) for (int i : {3, 4}) host[i] = host[i].toTensor().to(host[1].toTensor().scalar_type());
    op.callBoxed(&host);
    for (size_t i = 0; i < targets.size(); i++) {
      std::vector<at::Tensor> to, from;
      each_tensor(targets[i], [&](const at::Tensor& t) { to.push_back(t); });
      each_tensor(host[i], [&](const at::Tensor& t) { from.push_back(t); });
      for (size_t k = 0; k < to.size() && k < from.size(); k++)
        if (from[k].numel() || !to[k].numel()) to[k].copy_(from[k]);
    }
    host.clear();
    return true;
  };
  const bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  auto task = machine.issue(current_stream(), name, uses, std::move(run),
                            {"op", "", "", 0, bytes_of(uses, false), bytes_of(uses, true), 0, shapes, itemsize});
  if (is_random) machine.wait(task, false);  // draws come in the order of the program
  torch::jit::drop(*stack, num_args);
  for (auto& value : given) stack->push_back(std::move(value));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &sim_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return make(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype));
}

uint64_t hash_of(const std::vector<Range>& ranges) {
  uint64_t hash = 1469598103934665603ull;
  for (const auto& range : ranges) {
    auto p = range.begin;
    for (; p + 8 <= range.end; p += 8) {
      uint64_t word;
      std::memcpy(&word, reinterpret_cast<const void*>(p), 8);
      hash = (hash ^ word) * 1099511628211ull;
    }
    for (; p < range.end; p++) hash = (hash ^ *reinterpret_cast<const unsigned char*>(p)) * 1099511628211ull;
  }
  return hash;
}

// `copy_`: late wherever CUDA's may be; what the host does to pinned memory meanwhile is found by its values.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto& machine = Machine::get();
  const bool to_device = is_sim(dst), from_device = is_sim(self);
  const at::Tensor& host = to_device ? self : dst;
  const bool is_pinned = to_device != from_device && host.is_cpu() && pinned.holds(host.const_data_ptr());
  const int stream = current_stream();
  // Of pinned memory an alias, too: a tensor that Python knows could not go without the GIL.
  auto from = is_pinned ? host_alias(self) : on_host(self), to = is_pinned ? host_alias(dst) : on_host(dst);
  std::vector<Use> uses;
  if (from_device || is_pinned) uses.push_back(reads(self));
  if (to_device || is_pinned) uses.push_back(writes(dst));
  const int64_t num_bytes = int64_t(dst.numel() * dst.itemsize());
  Record record{"copy", "", "", 0, num_bytes, num_bytes, 0, {}, int64_t(dst.itemsize())};
  BelowAutograd below;
  if (to_device && from_device) {
    record.kind = "op";
    machine.issue(stream, "copy_", uses, [from, to] { BelowAutograd guard; to.copy_(from); return true; }, record);
    return dst;
  }
  if (to_device && non_blocking && is_pinned) {
    const bool checks = !machine.is_dry() && !pinned.is_busy(self.const_data_ptr(), true);
    const auto ranges = checks ? ranges_of(self) : std::vector<Range>{};
    const auto hash = hash_of(ranges);
    auto where = here();
    auto task = machine.issue(stream, "copy_ to the device", uses, [from, to, ranges, hash, checks, where] {
      TORCH_CHECK(!checks || hash_of(ranges) == hash, "race: the host wrote to pinned memory that a copy had still to read", where->text());
      BelowAutograd guard;
      to.copy_(from);
      return true;
    }, record);
    pinned.use(self.const_data_ptr(), task);
    return dst;
  }
  if (to_device) {  // of pageable memory: what is there now
    auto copy = machine.is_dry() ? from : from.clone();
    if (from.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    auto task = machine.issue(stream, "copy_ to the device", uses, [copy, to] { BelowAutograd guard; to.copy_(copy); return true; }, record);
    if (!non_blocking) machine.wait(task, true);
    return dst;
  }
  const bool is_late = non_blocking && is_pinned;
  if (machine.is_dry()) {  // whatever the host reads of a device that computes nothing is zero
    if (dst.is_contiguous()) std::memset(dst.data_ptr(), 0, dst.nbytes()); else to.zero_();
  }
  if (is_late && !machine.is_dry() && !pinned.is_busy(dst.const_data_ptr(), false))
    for (const auto& range : ranges_of(dst)) std::memset(reinterpret_cast<void*>(range.begin), 0xFF, range.end - range.begin);
  auto task = machine.issue(stream, "copy_ to the host", uses, [from, to] { BelowAutograd guard; to.copy_(from); return true; }, record);
  if (is_late) pinned.use(dst.const_data_ptr(), task); else machine.wait(task, true);
  return dst;
}

// What is one kernel on a GPU and has none of its kind on the CPU: known to dry runs alone, which compute nothing.

at::Tensor fresh(c10::IntArrayRef size, at::ScalarType dtype) { return make(size, c10::contiguous_strides(size), dtype); }

void issue_dry(const char* name, const std::vector<at::Tensor>& ins, const std::vector<at::Tensor>& outs) {
  TORCH_CHECK(Machine::get().is_dry(), name, " is for dry runs: the CPU does not have it");
  std::vector<Use> uses;
  std::vector<std::vector<int64_t>> shapes;
  for (const auto& t : ins) if (t.defined()) uses.push_back(reads(t)), shapes.push_back(t.sizes().vec());
  for (const auto& t : outs) if (t.defined()) uses.push_back(writes(t));
  Machine::get().issue(current_stream(), name, uses, nullptr,
                       {"op", "", "", 0, bytes_of(uses, false), bytes_of(uses, true), 0, shapes, int64_t(ins[0].itemsize())});
}

using Attention = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

// As flash attention: what it saves is its result, which lies as the query does, and a number for each row.
Attention attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>&, double, bool,
                    bool, std::optional<double>) {
  auto out = make(query.sizes(), query.strides(), query.scalar_type());
  auto sums = fresh({query.size(0), query.size(1), query.size(2)}, at::kFloat);
  issue_dry("_scaled_dot_product_flash_attention", {query, key, value}, {out, sums});
  auto seed = fresh({}, at::kLong), offset = fresh({}, at::kLong);
  return {out, sums, {}, {}, query.size(2), key.size(2), seed, offset, {}};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor&, std::array<bool, 4>,
    const at::Tensor& out, const at::Tensor& sums, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double, bool,
    const at::Tensor&, const at::Tensor&, std::optional<double>) {
  auto like = [](const at::Tensor& t) { return make(t.sizes(), t.strides(), t.scalar_type()); };
  auto to_query = like(query), to_key = like(key), to_value = like(value);
  issue_dry("_scaled_dot_product_flash_attention_backward", {query, key, value, grad, out, sums}, {to_query, to_key, to_value});
  return {to_query, to_key, to_value, {}};
}

std::tuple<at::Tensor, at::Tensor> rms_norm(const at::Tensor& input, at::IntArrayRef normalized, const std::optional<at::Tensor>& weight,
                                            std::optional<double>) {
  auto out = fresh(input.sizes(), input.scalar_type());
  auto sizes = input.sizes().vec();
  for (size_t i = sizes.size() - normalized.size(); i < sizes.size(); i++) sizes[i] = 1;
  auto inverse = fresh(sizes, at::kFloat);
  issue_dry("_fused_rms_norm", {input, weight.value_or(at::Tensor())}, {out, inverse});
  return {out, inverse};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& input, at::IntArrayRef, const at::Tensor& inverse,
                                                     const std::optional<at::Tensor>& weight, std::array<bool, 2> mask) {
  auto to_input = mask[0] ? fresh(input.sizes(), input.scalar_type()) : at::Tensor();
  auto to_weight = mask[1] && weight ? fresh(weight->sizes(), weight->scalar_type()) : at::Tensor();
  issue_dry("_fused_rms_norm_backward", {grad, input, inverse, weight.value_or(at::Tensor())}, {to_input, to_weight});
  return {to_input, to_weight};
}

}  // namespace

int64_t attention_choice(const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double, bool,
                         std::optional<double>, bool) {
  const bool is_half = query.scalar_type() == at::kBFloat16 || query.scalar_type() == at::kHalf;
  return int64_t(Machine::get().is_dry() && is_half && !mask ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

namespace {

// For the rest of the process.
void take_kernels_of_a_gpu() {
  static torch::Library* library = nullptr;
  if (library) return;
  library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  library->impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
  library->impl("_fused_rms_norm", &rms_norm);
  library->impl("_fused_rms_norm_backward", &rms_norm_backward);
}

at::Scalar local_scalar(const at::Tensor& self) {
  auto task = Machine::get().issue(current_stream(), "item", {reads(self)}, [] { return true; },
                                   {"copy", "", "", 0, int64_t(self.itemsize()), 0, 0, {}, int64_t(self.itemsize())});
  Machine::get().wait(task, true);
  BelowAutograd below;
  return host_alias(self).item();
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size() && !(strides.empty() && !sizes.empty())) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  return self;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t needed = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

}  // namespace

std::vector<Range> ranges_of(const at::Tensor& t) {
  std::vector<Range> out;
  if (!t.numel()) return out;
  const auto item = t.itemsize();
  const auto start = reinterpret_cast<uintptr_t>(static_cast<const char*>(t.storage().data()) + t.storage_offset() * item);
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size
  for (int64_t i = 0; i < t.dim(); i++) if (t.size(i) > 1 && t.stride(i)) dims.emplace_back(t.stride(i), t.size(i));
  std::sort(dims.begin(), dims.end());
  size_t run = item, k = 0;
  for (; k < dims.size() && size_t(dims[k].first) * item == run; k++) run *= dims[k].second;
  size_t num_runs = 1, extent = run;
  for (size_t i = k; i < dims.size(); i++) num_runs *= dims[i].second, extent += dims[i].first * (dims[i].second - 1) * item;
  if (num_runs > kMaxRuns) return {{start, start + extent}};
  std::vector<uintptr_t> starts{start};
  for (size_t i = k; i < dims.size(); i++) {
    std::vector<uintptr_t> more;
    for (auto s : starts) for (int64_t j = 0; j < dims[i].second; j++) more.push_back(s + j * dims[i].first * item);
    starts.swap(more);
  }
  for (auto s : starts) out.push_back({s, s + run});
  return out;
}

at::Tensor host_alias(const at::Tensor& t) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto out = at::from_blob(static_cast<char*>(const_cast<void*>(t.storage().data())) + t.storage_offset() * t.itemsize(), t.sizes(), t.strides(),
                           [](void*) {}, at::TensorOptions().dtype(t.dtype()).device(c10::kCPU), c10::Device(c10::kCPU));
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

}  // namespace sim

using namespace sim;

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", [](const at::Tensor& self, const at::Tensor& dst) {
    dst.resize_(self.sizes());
    return copy_from(self, dst, false);
  });
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) {
    Machine::get().record_stream(const_cast<void*>(self.storage().data()), int(stream.id()));
  });
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    const auto size = int64_t(source.nbytes() / self.itemsize());
    return set_storage(self, std::move(source), 0, c10::SymIntArrayRef({size}), {});
  });
  m.impl("set_.source_Tensor", [](at::Tensor& self, const at::Tensor& source) -> at::Tensor& {
    return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
  });
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&boxed>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&boxed>());
  // One kernel each on a GPU, though torch has a way to make them of others.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool is_foreach = name.name.rfind("aten::_foreach_", 0) == 0;
    const bool is_one = is_foreach || name.name == "aten::_chunk_cat" || name.name == "aten::split_with_sizes_copy" ||
                        name.name == "aten::_fused_adamw_" || name.name == "aten::silu_backward" || name.name == "aten::_fused_adam_";
    if (!is_one || (!is_foreach && name.name == "aten::split_with_sizes_copy" && name.overload_name != "out")) continue;
    const auto text = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&boxed>());
  }
}

// As on CUDA, but for norms of tensors.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define WIDE_OUT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(WIDE)
  AT_FORALL_FP32_SET_OPT_DTYPE(WIDE_OUT)
  AT_FORALL_PROMOTE(PROMOTE)
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::attention_choice)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::SetAllocator(kSim, &sim_allocator);
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  m.def("configure", [](uint64_t seed, const std::string& mode, bool looks, bool is_dry) { Machine::get().configure(seed, mode, looks, is_dry); });
  m.def("is_dry", [] { return Machine::get().is_dry(); });
  m.def("take_kernels_of_a_gpu", &take_kernels_of_a_gpu);
  m.def("synchronize", [] { Machine::get().wait_all(); });
  m.def("stats", [] { return Machine::get().stats(); });
  m.def("reset_peaks", [] { Machine::get().reset_peaks(); });
  m.def("empty_cache", [] { Machine::get().empty_cache(); });
  m.def("set_limit", [](int64_t n) { Machine::get().set_limit(n); });
  m.def("num_issued", [] { return Machine::get().num_issued; });
  m.def("num_run", [] { return Machine::get().num_run; });
  m.def("set_times", [](double idle_s, double bound_s) { Machine::get().set_times(idle_s, bound_s); });
  m.def("peek", &host_alias);  // waits for nothing
  m.def("keep_records", [](bool on) { Machine::get().keeps_records = on; }, py::arg("on"));
  m.def("take_records", [] {
    py::list out;
    for (const auto& r : Machine::get().take_records())
      out.append(py::make_tuple(r.kind, r.name, r.label, r.stream, r.read_bytes, r.written_bytes, r.number, r.shapes, r.itemsize,
                                r.allocated_bytes));
    return out;
  });
  m.def("host_alias", [](const at::Tensor& t) { Machine::get().wait_all(); return host_alias(t); });
  register_group(&m);
}
