// A second device without hardware, as a PyTorch backend (PrivateUse1): what a device forbids is forbidden here, what it
// makes slow is counted, and its kernels are the CPU's.
//
// Memory is the process's own under addresses that fault: a tag in a bit that no address has. Kernels take it off; whoever
// else reads or writes a device tensor dies by SIGSEGV. Fresh memory is full of ones, a NaN in each floating-point type.
// A copy to pinned memory that does not block arrives when its stream, an event after it or the device is waited for.
// Kernels themselves run at once, so that streams that forget each other are not found.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Storage;

constexpr auto TYPE = DeviceType::PrivateUse1;
constexpr uintptr_t TAG = uintptr_t(1) << 52; // canonical user addresses have it neither on x86-64 nor on Arm

void* on_host(const void* pointer) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) & ~TAG);
}

void* on_device(const void* pointer) {
  return pointer ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) | TAG) : nullptr;
}

// What happens is told to one function of Python, which knows what line asked for it.

py::object* listener = nullptr;
std::atomic<bool> listening{false};

thread_local bool in_collective = false; // whose copies through the host no real device makes

void tell(const char* kind, const std::string& what, int64_t bytes = 0) {
  if (!listening || in_collective)
    return;
  py::gil_scoped_acquire gil;
  if (listening)
    (*listener)(kind, what, bytes);
}

// Memory.

struct Memory {
  std::mutex mutex;
  int64_t current = 0, peak = 0, count = 0, limit = int64_t(8) << 30, watched = -1;
};
Memory memory;

void account(int64_t bytes) {
  bool large;
  {
    std::lock_guard<std::mutex> lock(memory.mutex);
    TORCH_CHECK_WITH(
        OutOfMemoryError, bytes <= 0 || memory.current + bytes <= memory.limit, "the rehearsal's device is out of memory: ",
        bytes, " bytes wanted, ", memory.current, " of ", memory.limit, " in use");
    memory.current += bytes;
    memory.count += bytes > 0 ? 1 : -1;
    memory.peak = std::max(memory.peak, memory.current);
    large = memory.watched >= 0 && bytes >= memory.watched;
  }
  if (large)
    tell("allocated", "memory", bytes);
}

// Device memory: its own, or that of a host storage which a kernel made.
struct Block {
  void* own = nullptr;
  Storage adopted;
  int64_t size;

  explicit Block(int64_t bytes) : size(bytes) {
    account(size);
    own = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(own, 0xFF, bytes);
  }
  explicit Block(Storage storage) : adopted(std::move(storage)), size(adopted.nbytes()) {
    account(size);
  }
  ~Block() {
    account(-size);
    std::free(own);
  }
};

thread_local DeviceIndex current_device = 0;

c10::DataPtr data_of(Block* block) {
  void* data = block->own ? block->own : const_cast<void*>(block->adopted.data());
  return {on_device(data), block, [](void* context) { delete static_cast<Block*>(context); }, Device(TYPE, current_device)};
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return bytes ? data_of(new Block(bytes)) : c10::DataPtr(nullptr, Device(TYPE, current_device));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(on_host(to), on_host(from), bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = memory.current;
      (*bytes)[0].peak = memory.peak;
    }
    stats.allocation[0].current = stats.active[0].current = memory.count;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.peak = memory.current;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    std::lock_guard<std::mutex> lock(memory.mutex);
    return {memory.limit - memory.current, memory.limit};
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(TYPE, &device_memory);

// Pinned memory: that of the host, in a table of what is pinned.
struct PinnedMemory final : c10::Allocator {
  std::mutex mutex;
  std::unordered_set<const void*> pinned;

  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool has(const void* data) {
    std::lock_guard<std::mutex> lock(mutex);
    return pinned.count(data);
  }
};
PinnedMemory pinned_memory;

c10::DataPtr PinnedMemory::allocate(size_t bytes) {
  void* data = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
  std::lock_guard<std::mutex> lock(mutex);
  pinned.insert(data);
  return {data, data, [](void* own) {
            std::lock_guard<std::mutex> lock(pinned_memory.mutex);
            pinned_memory.pinned.erase(own);
            std::free(own);
          }, Device(DeviceType::CPU)};
}

bool is_pinned(const Tensor& tensor) {
  return pinned_memory.has(tensor.storage().data());
}

// Streams: where each is, and its copies to the host that have not arrived.

struct Arriving {
  uint64_t number;
  Tensor from, to; // both on the host, contiguous
};
struct StreamState {
  uint64_t number = 0;
  std::deque<Arriving> arriving;
};
struct Recorded {
  c10::StreamId stream;
  uint64_t number;
};
std::mutex streams_mutex;
std::unordered_map<c10::StreamId, StreamState> streams;
c10::StreamId last_stream = 0;
thread_local c10::StreamId current_stream = 0;

void arrive(c10::StreamId id, uint64_t until = UINT64_MAX) {
  std::deque<Arriving> done;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    auto& waiting = streams[id].arriving;
    while (!waiting.empty() && waiting.front().number <= until) {
      auto& first = waiting.front();
      std::memcpy(const_cast<void*>(first.to.storage().data()), first.from.const_data_ptr(), first.to.nbytes());
      done.push_back(std::move(first)); // freed without the lock
      waiting.pop_front();
    }
  }
}

void arrive_all() {
  std::vector<c10::StreamId> ids;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    for (auto& [id, state] : streams)
      ids.push_back(id);
  }
  for (auto id : ids)
    arrive(id);
}

// The host waits for the current stream.
void wait(const std::string& what, int64_t bytes = 0) {
  tell("wait", what, bytes);
  arrive(current_stream);
}

DeviceIndex num_devices() {
  const char* wanted = std::getenv("REHEARSAL_DEVICES");
  return wanted ? static_cast<DeviceIndex>(std::atoi(wanted)) : 1;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return TYPE;
  }
  Device exchangeDevice(Device device) const override {
    auto before = current_device;
    setDevice(device);
    return Device(TYPE, before);
  }
  Device getDevice() const override {
    return Device(TYPE, current_device);
  }
  void setDevice(Device device) const override {
    if (device.index() >= 0)
      current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0)
      current_device = device.index();
  }
  c10::Stream getStream(Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, getDevice(), current_stream);
  }
  c10::Stream getDefaultStream(Device) const override {
    return c10::Stream(c10::Stream::UNSAFE, getDevice(), 0);
  }
  c10::Stream getNewStream(Device, int) const override {
    std::lock_guard<std::mutex> lock(streams_mutex);
    return c10::Stream(c10::Stream::UNSAFE, getDevice(), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(getDevice());
    current_stream = stream.id();
    return before;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::mutex> lock(streams_mutex);
    if (!*event)
      *event = new Recorded;
    *static_cast<Recorded*>(*event) = {stream.id(), streams[stream.id()].number};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  DeviceIndex deviceCount() const noexcept override {
    return num_devices();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    tell("wait", "stream");
    arrive(stream.id());
  }
  void synchronizeEvent(void* event) const override {
    if (auto* recorded = static_cast<Recorded*>(event)) {
      tell("wait", "event");
      arrive(recorded->stream, recorded->number);
    }
  }
  void synchronizeDevice(const DeviceIndex) const override {
    tell("wait", "device");
    arrive_all();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers: a CPU generator of the device's own.

struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator own;

  explicit DeviceGenerator(DeviceIndex index, std::optional<at::Generator> from = std::nullopt)
      : GeneratorImpl(Device(TYPE, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        own(from ? *from : at::globalContext().defaultGenerator(at::kCPU).clone()) {
    if (!from)
      own.set_current_seed(c10::default_rng_seed_val);
  }
  void set_current_seed(uint64_t seed) override {
    own.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override {
    return 0;
  }
  uint64_t current_seed() const override {
    return own.current_seed();
  }
  uint64_t seed() override {
    auto number = c10::detail::getNonDeterministicRandom();
    own.set_current_seed(number);
    return number;
  }
  void set_state(const c10::TensorImpl& state) override {
    own.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return own.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), own.clone());
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static auto* made = new std::vector<at::Generator>;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  while (made->size() <= static_cast<size_t>(std::max<DeviceIndex>({index, current_device, num_devices()})))
    made->push_back(at::make_generator<DeviceGenerator>(static_cast<DeviceIndex>(made->size())));
  return (*made)[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return num_devices() > 0;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return num_devices();
  }
  void setCurrentDevice(DeviceIndex index) const override {
    current_device = index;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device : std::exchange(current_device, index);
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned_memory.has(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  Device getDeviceFromPtr(void*) const override {
    return Device(TYPE, current_device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto data = device_memory.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes()))
      std::memcpy(on_host(data.get()), on_host(storage.data()), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// Kernels: those of the CPU, on views of the memory.

void shape_like(c10::TensorImpl* tensor, const Tensor& other) {
  tensor->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
}

Tensor tensor_over(const Storage& storage, c10::DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), like.dtype());
  shape_like(made.unsafeGetTensorImpl(), like);
  return made;
}

Storage adopt(const Storage& of_host) {
  return Storage(
      Storage::use_byte_size_t(), of_host.nbytes(),
      of_host.nbytes() ? data_of(new Block(of_host)) : device_memory.allocate(0), &device_memory, true);
}

// The tensors of one call on both sides.
class HostViews {
 public:
  Tensor of(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone())
      return tensor;
    auto [found, fresh] = hosts_.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (fresh) {
      auto data = c10::DataPtr(on_host(tensor.storage().data()), Device(DeviceType::CPU));
      found->second = Storage(
          Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      devices_.emplace(found->second.unsafeGetStorageImpl(), tensor.storage());
    }
    auto view = tensor_over(found->second, c10::DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      view.unsafeGetTensorImpl()->set_wrapped_number(true);
    views_.emplace(view.unsafeGetTensorImpl(), std::make_pair(view, tensor));
    return view;
  }

  // Kernels may have given their results other sizes, and for that other memory.
  void follow() {
    for (auto& [device, host] : hosts_)
      if (host.data() != on_host(device->data())) {
        device->set_data_ptr_noswap(host.nbytes() ? data_of(new Block(host)) : device_memory.allocate(0));
        device->set_nbytes(host.nbytes());
      }
    for (auto& [impl, pair] : views_) {
      auto& [view, tensor] = pair;
      if (view.sizes() != tensor.sizes() || view.strides() != tensor.strides())
        shape_like(tensor.unsafeGetTensorImpl(), view);
    }
  }

  Tensor back(const Tensor& tensor) {
    if (!tensor.defined())
      return tensor;
    if (auto same = views_.find(tensor.unsafeGetTensorImpl()); same != views_.end())
      return same->second.second;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "the rehearsal's device has strided tensors alone");
    auto [found, fresh] = devices_.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (fresh)
      found->second = adopt(tensor.storage());
    return tensor_over(found->second, c10::DispatchKey::PrivateUse1, tensor);
  }

 private:
  std::unordered_map<c10::StorageImpl*, Storage> hosts_, devices_; // of the storage on the other side
  std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> views_;
};

// Their results have a size that depends on numbers of the device, or are numbers for the host: a device must be waited
// for.
const std::unordered_set<std::string> READ_BY_HOST = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave.Tensor",
    "aten::equal", "aten::_is_all_true", "aten::_is_any_true"};

struct Call {
  const std::string name;
  HostViews views;
  bool has_device = false;
  Tensor of_host;

  bool indexes() const {
    return name.rfind("aten::index.", 0) == 0 || name.find("index_put") != std::string::npos;
  }
  Tensor view(const Tensor& tensor, bool is_index = false) {
    if (!tensor.defined())
      return tensor;
    if (tensor.is_privateuseone()) {
      has_device = true;
      if (is_index && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte))
        wait(name + " by a mask");
    } else if (tensor.is_cpu() && is_index) {
      wait(name + " by an index of the host", tensor.nbytes());
    } else if (tensor.is_cpu() && tensor.dim() > 0) {
      of_host = tensor;
    }
    return views.of(tensor);
  }
  void take(c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      value = view(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector())
        list.push_back(view(each));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
        list.push_back(each ? std::optional<Tensor>(view(*each, indexes())) : each);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      value = Device(DeviceType::CPU);
    } else if (argument.name() == "generator" && !(value.isGenerator() && value.toGenerator().device().is_cpu())) {
      auto generator = value.isGenerator() ? value.toGenerator() : default_generator(-1);
      value = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->own;
    }
  }
  void give(c10::IValue& value) {
    if (value.isTensor()) {
      value = views.back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector())
        list.push_back(views.back(each));
      value = list;
    }
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call{c10::toString(schema.operator_name()), {}, false, {}};
  const auto begin = stack->size() - schema.arguments().size();
  for (size_t i = 0; i < schema.arguments().size(); i++)
    call.take((*stack)[begin + i], schema.arguments()[i]);
  TORCH_CHECK(
      !(call.has_device && call.of_host.defined()), "Expected all tensors to be on the same device, but found at least two ",
      "devices, ", Device(TYPE, current_device), " and cpu! (of shape ", call.of_host.sizes(), ", in ", call.name, ")");
  const bool knows_size = call.name == "aten::repeat_interleave.Tensor" && !(*stack)[begin + 1].isNone();
  if (READ_BY_HOST.count(call.name) && !knows_size)
    wait(call.name);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  call.views.follow();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    call.give((*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<Device>,
    std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, c10::dtype_or_default(dtype));
}

Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor& set_storage(
    Tensor& self, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(self, std::move(storage), offset, size, stride);
}

// Onto the host without waiting for it: see `Arriving`.
void copy_later(const Tensor& from, const Tensor& to, HostViews& views) {
  auto snapshot = at::empty(to.sizes(), to.options());
  snapshot.copy_(views.of(from));
  std::memset(to.data_ptr(), 0xFF, to.nbytes());
  std::lock_guard<std::mutex> lock(streams_mutex);
  auto& stream = streams[current_stream];
  stream.arriving.push_back({++stream.number, snapshot, to});
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  HostViews views;
  if (self.is_privateuseone() && to.is_cpu()) {
    const bool later = non_blocking && is_pinned(to) && to.is_contiguous() && !to.storage_offset() &&
        to.storage().nbytes() == to.nbytes();
    if (later) {
      tell("to host", "copy", self.nbytes());
      copy_later(self, to, views);
      return to;
    }
    wait("copy to the host", self.nbytes());
  } else if (self.is_cpu()) {
    if (non_blocking)
      tell("to device", is_pinned(self) ? "copy" : "copy of pageable memory", self.nbytes());
    else
      wait("copy to the device", self.nbytes());
  }
  views.of(to).copy_(views.of(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar(const Tensor& self) {
  at::AutoDispatchBelowADInplaceOrView below;
  HostViews views;
  wait("a number read", self.nbytes());
  return views.of(self).item();
}

// Whether a tensor may become another in place, as a module's weights do that move to the device.
bool may_become(const Tensor& self, const Tensor& from) {
  auto is_plain = [](const Tensor& tensor) {
    const auto keys = tensor.key_set();
    return (tensor.is_cpu() || tensor.is_privateuseone()) && keys.has(c10::DispatchKey::Dense) &&
        !keys.has(c10::DispatchKey::Python);
  };
  return (is_plain(self) && is_plain(from)) ||
      self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

// Attention: the CPU's fused kernel, where it would take it.

int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  HostViews views;
  auto host_mask = mask ? std::optional<Tensor>(views.of(*mask)) : mask;
  auto choice = at::_fused_sdp_choice(
      views.of(query), views.of(key), views.of(value), host_mask, dropout, is_causal, scale, enable_gqa);
  const auto math = static_cast<int64_t>(sdp::SDPBackend::math);
  return choice == math ? math : static_cast<int64_t>(sdp::SDPBackend::overrideable);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attend(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, double dropout,
    bool is_causal, bool, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  HostViews views;
  auto host_bias = bias ? std::optional<Tensor>(views.of(*bias)) : bias;
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      views.of(query), views.of(key), views.of(value), dropout, is_causal, host_bias, scale);
  auto nothing = at::empty({}, at::kLong);
  return {views.back(out), views.back(sums), Tensor(), Tensor(), query.sym_size(2), key.sym_size(2), nothing, nothing,
          Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4>, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double dropout, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  at::AutoDispatchBelowADInplaceOrView below;
  HostViews views;
  auto host_bias = bias.defined() ? std::optional<Tensor>(views.of(bias)) : std::nullopt;
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      views.of(grad), views.of(query), views.of(key), views.of(value), views.of(out), views.of(sums), dropout, is_causal,
      host_bias, scale);
  return {views.back(of_query), views.back(of_key), views.back(of_value), Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("resize_", &resize_);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view", &view);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("_has_compatible_shallow_copy_type", &may_become);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attend);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attend_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &may_become);
}

} // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)
}

namespace at::autocast {

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FLOAT_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT_RESULT)
  AT_FORALL_PROMOTE(WIDEST)
}

} // namespace at::autocast

// Collectives: gloo's, over copies in the host's memory.

namespace {

struct InCollective {
  explicit InCollective(const char* name) {
    tell("collective", name);
    in_collective = true;
  }
  ~InCollective() {
    in_collective = false;
  }
};

using Done = c10::intrusive_ptr<c10d::Work>;

class OverGloo final : public c10d::Backend {
 public:
  OverGloo(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "rehearsal_ccl";
  }
  bool supportsSplitting() const override {
    return false;
  }
  Done allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    InCollective of("allreduce");
    auto host = to_host(tensors);
    gloo_->allreduce(host, options)->wait();
    return to_device(host, tensors);
  }
  Done broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    InCollective of("broadcast");
    auto host = to_host(tensors);
    gloo_->broadcast(host, options)->wait();
    return to_device(host, tensors);
  }
  Done allgather(
      std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs,
      const c10d::AllgatherOptions& options) override {
    InCollective of("allgather");
    auto host = to_host(inputs);
    std::vector<std::vector<Tensor>> gathered;
    for (auto& each : outputs)
      gathered.push_back(to_host(each));
    gloo_->allgather(gathered, host, options)->wait();
    for (size_t i = 0; i < outputs.size(); i++)
      to_device(gathered[i], outputs[i]);
    return done(outputs[0]);
  }
  Done _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    InCollective of("allgather_base");
    auto from = input.cpu(), to = output.cpu();
    gloo_->_allgather_base(to, from, options)->wait();
    output.copy_(to);
    return done({output});
  }
  Done _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    InCollective of("reduce_scatter_base");
    auto from = input.cpu(), to = output.cpu();
    gloo_->_reduce_scatter_base(to, from, options)->wait();
    output.copy_(to);
    return done({output});
  }
  Done allgather_into_tensor_coalesced(
      std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++)
      _allgather_base(outputs[i], inputs[i], options);
    return done(outputs);
  }
  Done reduce_scatter_tensor_coalesced(
      std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); i++)
      _reduce_scatter_base(outputs[i], inputs[i], options);
    return done(outputs);
  }
  Done allreduce_coalesced(
      std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    InCollective of("allreduce_coalesced");
    auto host = to_host(tensors);
    gloo_->allreduce_coalesced(host, options)->wait();
    return to_device(host, tensors);
  }
  Done scatter(
      std::vector<Tensor>& outputs, std::vector<std::vector<Tensor>>& inputs,
      const c10d::ScatterOptions& options) override {
    InCollective of("scatter");
    auto host = to_host(outputs);
    std::vector<std::vector<Tensor>> parts;
    for (auto& each : inputs)
      parts.push_back(to_host(each));
    gloo_->scatter(host, parts, options)->wait();
    return to_device(host, outputs);
  }
  Done alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    InCollective of("alltoall_base");
    auto from = input.cpu(), to = output.cpu();
    gloo_->alltoall_base(to, from, out_sizes, in_sizes, options)->wait();
    output.copy_(to);
    return done({output});
  }
  Done send(std::vector<Tensor>& tensors, int rank, int tag) override {
    InCollective of("send");
    auto host = to_host(tensors);
    gloo_->send(host, rank, tag)->wait();
    return done(tensors);
  }
  Done recv(std::vector<Tensor>& tensors, int rank, int tag) override {
    InCollective of("recv");
    auto host = to_host(tensors);
    gloo_->recv(host, rank, tag)->wait();
    return to_device(host, tensors);
  }
  Done barrier(const c10d::BarrierOptions& options) override {
    InCollective of("barrier");
    gloo_->barrier({})->wait();
    return done({});
  }

 private:
  static std::vector<Tensor> to_host(const std::vector<Tensor>& tensors) {
    std::vector<Tensor> host;
    for (auto& each : tensors)
      host.push_back(each.cpu());
    return host;
  }
  static Done done(const std::vector<Tensor>& tensors) {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(tensors);
    return c10d::Work::create_from_future(future);
  }
  static Done to_device(const std::vector<Tensor>& host, std::vector<Tensor>& tensors) {
    for (size_t i = 0; i < tensors.size(); i++)
      tensors[i].copy_(host[i]);
    return done(tensors);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace

PYBIND11_MODULE(rehearsal_backend, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("listen", [](const py::object& function) {
    listening = false;
    delete listener;
    listener = new py::object(function);
    listening = !function.is_none();
  });
  m.def("watch_allocations", [](int64_t bytes) {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.watched = bytes;
  });
  m.def("limit_memory", [](int64_t bytes) {
    std::lock_guard<std::mutex> lock(memory.mutex);
    memory.limit = bytes;
  });
  py::module_::import("torch.distributed"); // which has the base class
  py::class_<OverGloo, c10::intrusive_ptr<OverGloo>, c10d::Backend>(m, "OverGloo");
  m.def("over_gloo", [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size) {
    return c10::make_intrusive<OverGloo>(gloo, rank, size);
  });
  m.def("default_generator", [](DeviceIndex index) { return default_generator(index); });
}
