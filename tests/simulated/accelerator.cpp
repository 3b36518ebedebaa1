// A simulated accelerator, the device "sim": what orders copies beside the computation is tried on it.
//
// Its memory is host memory. Copies that do not block, fills and what the allocator does are jobs on streams, in order on each,
// and nothing but events orders streams. No thread runs them: a schedule says which jobs run when something is submitted, and
// what the host waits for runs then, after what must come before it. So every order that a program allows can be had, the
// same one each time. All other operators run on the CPU, after a wait for the current stream.
//
// Device memory is filled when it is taken and when it is given back, in the order of the stream on which it was taken, as
// if other work there had it before and after. What was given back is kept, and `check` tells whether anything wrote to it, and
// whether a copy found host memory that is not mapped any more.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int NUM_DEVICES = 2;
constexpr unsigned char FILL = 0xFF;  // not a number, in every type of float

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
std::vector<std::string> errors;

// --- Streams

struct Timeline;

struct Event {
  Timeline* line = nullptr;  // on which it was recorded last
  uint64_t recorded = 0, done = 0;
};
using EventPtr = std::shared_ptr<Event>;

struct Job {
  uint64_t number;
  std::function<void()> run;
  EventPtr after;  // for which the job waits, until `version` of it is done; else null
  uint64_t version;
};

struct Timeline {
  bool computes;
  std::deque<Job> jobs;

  bool is_runnable() const {
    return !jobs.empty() && (!jobs.front().after || jobs.front().after->done >= jobs.front().version);
  }

  void run_first() {
    Job job = std::move(jobs.front());
    jobs.pop_front();
    if (job.run) job.run();
  }

  // Run the first job, and before it what it waits for.
  void force_first() {
    const EventPtr after = jobs.front().after;
    const uint64_t version = jobs.front().version;
    while (after && after->done < version) after->line->force_first();
    run_first();
  }
};

std::map<std::pair<int, c10::StreamId>, Timeline> timelines;
thread_local std::array<c10::StreamId, NUM_DEVICES> current_stream{};
thread_local int current_device = 0;
c10::StreamId last_stream = 0;
uint64_t last_job = 0;

Timeline& timeline(int device, c10::StreamId id) {
  return timelines.try_emplace({device, id}, Timeline{id == 0, {}}).first->second;
}

Timeline& current_timeline(int device) { return timeline(device, current_stream[device]); }

void finish(Timeline& line) {
  while (!line.jobs.empty()) line.force_first();
}

void finish_all() {
  for (auto& [key, line] : timelines) finish(line);
}

// --- The schedule: how likely the first job of a stream is to run whenever one is submitted

double computation_eagerness = 1, copy_eagerness = 1;
std::mt19937 dice(0);

void advance() {
  std::vector<Timeline*> lines;
  for (auto& [key, line] : timelines) lines.push_back(&line);
  for (bool moved = true; moved;) {
    moved = false;
    std::shuffle(lines.begin(), lines.end(), dice);
    for (Timeline* line : lines) {
      const double eagerness = line->computes ? computation_eagerness : copy_eagerness;
      if (line->is_runnable() && std::uniform_real_distribution<>()(dice) < eagerness) {
        line->run_first();
        moved = true;
      }
    }
  }
}

void submit(Timeline& line, std::function<void()> run, EventPtr after = nullptr, uint64_t version = 0) {
  line.jobs.push_back({++last_job, std::move(run), std::move(after), version});
  advance();
}

// --- Memory of the devices

struct Block {
  size_t size;
  int device;
  Timeline* line;  // on which it was taken, and is given back
};

std::map<void*, Block> blocks;      // in use
std::map<void*, Block> given_back;  // and filled
std::array<size_t, NUM_DEVICES> allocated{};
size_t memory_limit = SIZE_MAX;

void give_back(void* pointer) {
  Lock lock(mutex);
  const auto found = blocks.find(pointer);
  const Block block = found->second;
  blocks.erase(found);
  allocated[block.device] -= block.size;
  submit(*block.line, [pointer, block] {
    std::memset(pointer, FILL, block.size);
    given_back[pointer] = block;
  });
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(mutex);
    const c10::Device device(SIM, current_device);
    if (size == 0) return {nullptr, nullptr, nullptr, device};
    TORCH_CHECK_WITH(
        OutOfMemoryError, allocated[current_device] + size <= memory_limit, "The simulated device is out of memory");
    void* pointer = std::aligned_alloc(64, (size + 63) / 64 * 64);
    Timeline& line = current_timeline(current_device);
    blocks[pointer] = {size, current_device, &line};
    allocated[current_device] += size;
    submit(line, [pointer, size] { std::memset(pointer, FILL, size); });
    return {pointer, pointer, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* target, const void* source, size_t size) const override {
    finish_all();
    std::memcpy(target, source, size);
  }
};

DeviceMemory device_memory;

// --- Page-locked memory: what is given back is kept until all jobs are done that were submitted before

std::map<const char*, size_t> locked;
std::vector<std::pair<void*, uint64_t>> locked_given_back;

void release_locked() {
  uint64_t oldest = UINT64_MAX;
  for (auto& [key, line] : timelines)
    if (!line.jobs.empty()) oldest = std::min(oldest, line.jobs.front().number);
  std::erase_if(locked_given_back, [&](const auto& each) {
    if (each.second >= oldest) return false;
    std::free(each.first);
    return true;
  });
}

void give_back_locked(void* pointer) {
  Lock lock(mutex);
  locked.erase(static_cast<char*>(pointer));
  locked_given_back.emplace_back(pointer, last_job);
}

struct LockedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    Lock lock(mutex);
    release_locked();
    void* pointer = std::aligned_alloc(64, std::max<size_t>(64, (size + 63) / 64 * 64));
    locked[static_cast<char*>(pointer)] = size;
    return {pointer, pointer, &give_back_locked, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back_locked; }
  void copy_data(void* target, const void* source, size_t size) const override { std::memcpy(target, source, size); }
};

LockedMemory locked_memory;

bool is_locked(const void* data) {
  Lock lock(mutex);
  auto after = locked.upper_bound(static_cast<const char*>(data));
  if (after == locked.begin()) return false;
  --after;
  return data < after->first + std::max<size_t>(1, after->second);
}

// --- Copies

// Where a tensor is, without keeping it alive.
struct Place {
  char* data;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;
  bool on_host;

  explicit Place(const at::Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()),
        on_host(tensor.is_cpu()) {}

  at::Tensor tensor() const { return at::from_blob(data, sizes, strides, at::TensorOptions(dtype)); }

  bool is_mapped() const {
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<uintptr_t>(data) / page * page;
    const auto end = reinterpret_cast<uintptr_t>(data) + (last + 1) * c10::elementSize(dtype);
    return msync(reinterpret_cast<void*>(start), end - start, MS_ASYNC) == 0;
  }
};

void copy_places(const Place& source, const Place& target) {
  for (const Place* place : {&source, &target}) {
    if (place->on_host && !place->is_mapped()) {
      errors.push_back("a copy found host memory that is not mapped any more");
      return;
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  target.tensor().copy_(source.tensor());
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  const at::Tensor from = source.expand_as(target);
  const bool on_device = !source.is_cpu() && !target.is_cpu();
  {
    // Not beyond this block: to count another owner of a tensor may take Python's lock, whose owner may wait for this one.
    Lock lock(mutex);
    Timeline& line = current_timeline((target.is_cpu() ? source : target).device().index());
    submit(line, [from = Place(from), to = Place(target)] { copy_places(from, to); });
    if (!non_blocking && !on_device) finish(line);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// --- Operators

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      &device_memory,
      keys,
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self,
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set_(
      self,
      storage,
      offset.guard_int(__FILE__, __LINE__),
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  Lock lock(mutex);
  submit(current_timeline(self.device().index()), [place = Place(self), value] {
    at::AutoDispatchBelowADInplaceOrView guard;
    place.tensor().fill_(value);
  });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

at::Tensor convolution(
    const at::Tensor& input,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  const auto bias_on_cpu = bias.has_value() && bias->defined() ? std::optional(bias->cpu()) : std::nullopt;
  const at::Tensor result = at::convolution_symint(
      input.cpu(), weight.cpu(), bias_on_cpu, stride, padding, dilation, transposed, output_padding, groups);
  return result.to(input.device());
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("fill_.Scalar", &fill);
  library.impl("zero_", &zero);
  library.impl("convolution_overrideable", &convolution);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
}

// --- What torch asks of a device

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto old = getDevice();
    current_device = device.index();
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(SIM, current_device); }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(mutex);
    return c10::Stream(c10::Stream::UNSAFE, device, ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto old = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    return timeline(stream.device_index(), stream.id()).jobs.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    finish(timeline(stream.device_index(), stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(mutex);
    for (auto& [key, line] : timelines)
      if (key.first == device) finish(line);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (*event == nullptr) *event = new EventPtr(std::make_shared<Event>());
    const EventPtr state = *static_cast<EventPtr*>(*event);
    state->line = &timeline(stream.device_index(), stream.id());
    const uint64_t version = ++state->recorded;
    submit(*state->line, [state, version] { state->done = version; });
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex);
    if (event == nullptr) return;
    const EventPtr state = *static_cast<EventPtr*>(event);
    submit(timeline(stream.device_index(), stream.id()), nullptr, state, state->recorded);
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    return event == nullptr || (*static_cast<EventPtr*>(event))->done == (*static_cast<EventPtr*>(event))->recorded;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    if (event == nullptr) return;
    const EventPtr state = *static_cast<EventPtr*>(event);
    for (const uint64_t version = state->recorded; state->done < version;) state->line->force_first();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto old = getCurrentDevice();
    current_device = device;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* data) const override { return is_locked(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &locked_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const c10::DeviceGuard guard(storage.device());
    auto data = device_memory.allocate(size);
    {
      Lock lock(mutex);
      finish(current_timeline(storage.device().index()));
      std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    }
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);
Hooks hooks;

// --- For the tests

void set_schedule(double computation, double copies, unsigned seed) {
  Lock lock(mutex);
  finish_all();
  computation_eagerness = computation;
  copy_eagerness = copies;
  dice.seed(seed);
}

std::vector<std::string> check() {
  Lock lock(mutex);
  finish_all();
  for (const auto& [pointer, block] : given_back) {
    const auto* bytes = static_cast<unsigned char*>(pointer);
    if (!std::all_of(bytes, bytes + block.size, [](unsigned char byte) { return byte == FILL; }))
      errors.push_back("device memory was written to after it was given back");
    std::free(pointer);
  }
  given_back.clear();
  release_locked();
  return std::exchange(errors, {});
}

}  // namespace

PYBIND11_MODULE(simulated_accelerator, module) {
  c10::SetAllocator(SIM, &device_memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("set_schedule", &set_schedule);
  module.def("check", &check);
  module.def("memory_allocated", [](int device) { return allocated[device]; });
  module.def("set_memory_limit", [](std::optional<size_t> bytes) { memory_limit = bytes.value_or(SIZE_MAX); });
}
