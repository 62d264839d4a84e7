// A second device, "sim": memory of its own kind beside the CPU's, with the rules of a GPU that offload has to keep.
//
// Its memory is the host's, and its operations run on the CPU, at once; but torch takes it for an accelerator: autograd
// runs its backward on a thread of its own, and operands on different devices do not mix. Copies between it and pinned
// memory that do not block are late on purpose: one to the device reads its source at the next operation of the device
// or wait of the host, one to the host writes at the next wait of the host. Whoever forgets to wait reads old values.
#define AT_PER_OPERATOR_HEADERS  // with torch/extension.h, or all operators, the build takes three times as long
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
std::recursive_mutex mutex;
std::map<const char*, size_t> pinned;  // start and size of each piece of pinned memory
std::deque<std::pair<bool, std::function<void()>>> late;  // copies: to the device?

bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto it = pinned.upper_bound(static_cast<const char*>(p));
  if (it == pinned.begin()) return false;
  --it;
  return static_cast<const char*>(p) < it->first + it->second;
}

void flush(bool host_waits) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  std::deque<std::pair<bool, std::function<void()>>> rest;
  for (auto& [to_device, copy] : late) {
    if (to_device || host_waits) copy(); else rest.emplace_back(to_device, copy);
  }
  late.swap(rest);
}

struct SimAllocator final : c10::Allocator {
  static void drop(void* p) { if (p) c10::free_cpu(p); }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? c10::alloc_cpu(n) : nullptr;
    return {p, p, &drop, c10::Device(kSim, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} sim_allocator;

struct PinnedAllocator final : c10::Allocator {
  static void drop(void* p) {
    if (!p) return;
    flush(true);  // as CUDA's, which keeps memory until copies that use it are over
    std::lock_guard<std::recursive_mutex> lock(mutex);
    pinned.erase(static_cast<const char*>(p));
    c10::free_cpu(p);
  }
  c10::DataPtr allocate(size_t n) override {
    void* p = n ? c10::alloc_cpu(n) : nullptr;
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (p) pinned[static_cast<const char*>(p)] = n;
    return {p, p, &drop, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} pinned_allocator;

struct SimGuard final : c10::impl::NoOpDeviceGuardImpl<kSim> {
  c10::Device exchangeDevice(c10::Device) const override { return {kSim, 0}; }
  c10::Device getDevice() const override { return {kSim, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kSim, 0));
  }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream({kSim, 0}); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream({kSim, 0}); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
};

// The memory of a tensor of the device as one of the CPU.
at::Tensor host_alias(const at::Tensor& t) {
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), [](void*) {},
                       t.options().device(c10::kCPU).pinned_memory(false), c10::Device(c10::kCPU));
}

at::Tensor on_host(const at::Tensor& t) { return t.device().type() == kSim ? host_alias(t) : t; }

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &sim_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &sim_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const bool to_device = dst.device().type() == kSim, from_device = self.device().type() == kSim;
  const at::Tensor& host = to_device ? self : dst;
  if (to_device != from_device && non_blocking && is_pinned(host.const_data_ptr())) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    flush(false);
    if (to_device) {
      late.emplace_back(true, [self, dst] { on_host(dst).copy_(self); });
    } else {
      late.emplace_back(false, [from = on_host(self).clone(), dst] { dst.copy_(from); });
    }
    return dst;
  }
  flush(to_device != from_device);
  on_host(dst).copy_(on_host(self));
  return dst;
}

at::Scalar local_scalar(const at::Tensor& self) {
  flush(true);
  return host_alias(self).item();
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  flush(false);
  bool has_sim = false, has_cpu = false;
  auto look = [&](const at::Tensor& t) {
    if (!t.defined()) return;
    has_sim |= t.device().type() == kSim;
    has_cpu |= t.device().is_cpu() && t.dim() > 0;
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) for (const auto& t : value.toTensorVector()) look(t);
  }
  TORCH_CHECK(!(has_sim && has_cpu), "Expected all tensors to be on the same device, but ", op.schema().name(),
              " found at least two: sim and cpu");
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", [](const at::Tensor& self, const at::Tensor& dst) {
    at::native::resize_(dst, self.sizes(), std::nullopt);
    return copy_from(self, dst, false);
  });
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", [](const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); });
  m.impl("_reshape_alias", [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("resize_", [](const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) -> const at::Tensor& {
    return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
  });
  m.impl("record_stream", [](at::Tensor&, c10::Stream) {});
  m.impl("set_.source_Storage_storage_offset", [](at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                                                  c10::SymIntArrayRef stride) -> at::Tensor& {
    return at::native::set_storage_cpu_(self, source, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::SetAllocator(kSim, &sim_allocator);
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  m.def("flush", &flush, "Run the copies that are late: those to the device, or all, as a wait of the host does");
  m.def("host_alias", [](const at::Tensor& t) { flush(false); return host_alias(t); });
}
