// Streams, the order in which they run, vector clocks, and memory that is handed out again as CUDA's allocator does.
#include "simulator.h"

#include <Python.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <sstream>
#include <thread>
#include <unordered_map>

namespace sim {
namespace {

// Sizes of CUDA's caching allocator: what is rounded to what, and what a segment has.
constexpr size_t kRound = 512, kSmall = 1 << 20, kSmallSegment = 2 << 20, kLargeSegment = 20 << 20;
constexpr size_t kLargeFrom = 10 << 20, kRoundLarge = 2 << 20;
constexpr auto kLimit = std::chrono::seconds(90);  // for which the host waits

constexpr int64_t kComputedDry = 1 << 16;  // bytes up to which a dry run computes: numbers that ranks compare

thread_local std::vector<std::string> labels;
thread_local int current = 0;
thread_local bool has_issued = false;  // else what this thread sees is not known to those that issue

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

uint64_t at(const Clock& clock, int stream) { return size_t(stream) < clock.size() ? clock[stream] : 0; }

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& range) {
  labels.emplace_back(range.name());
  return nullptr;
}

void on_end(const at::RecordFunction&, at::ObserverContext*) {
  if (!labels.empty()) labels.pop_back();
}

std::string text_of(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  return own ? own->what_without_backtrace() : error.what();
}

const std::string* line_of(PyCodeObject* code, int line) {
  static std::unordered_map<std::string, const std::string*> known;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  const char* name = PyUnicode_AsUTF8(code->co_name);
  if (!file || !name) return nullptr;
  std::string path(file);
  const bool is_torchs = path.find("/torch/") != std::string::npos && path.find("_fully_shard") == std::string::npos;
  if (is_torchs || path.front() == '<') return nullptr;
  size_t from = path.size();
  for (int i = 0; i < 3 && from != std::string::npos && from > 0; i++) from = path.rfind('/', from - 1);
  std::string text = (from == std::string::npos ? path : path.substr(from + 1)) + ":" + std::to_string(line) + " in " + name;
  auto& found = known[text];
  if (!found) found = new std::string(text);
  return found;
}

}  // namespace

WithoutGIL::WithoutGIL() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}
WithoutGIL::~WithoutGIL() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

SitePtr here() {
  auto site = std::make_shared<Site>();
  for (auto it = labels.rbegin(); it != labels.rend(); ++it) {
    if (!site->label.empty()) site->label += ", in ";
    site->label += *it;
  }
  const auto gil = PyGILState_Ensure();
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && site->lines.size() < 8) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (const auto* line = line_of(code, PyFrame_GetLineNumber(frame))) site->lines.push_back(line);
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  return site;
}

std::string Site::text() const {
  std::string out = label.empty() ? "" : " [" + label + "]";
  for (const auto* line : lines) out += "\n      " + *line;
  return out;
}

int current_stream() { return current; }
int exchange_stream(int stream) { return std::exchange(current, stream); }

Machine& Machine::get() {
  static Machine* machine = new Machine();  // never destroyed: its thread may outlive everything
  return *machine;
}

Machine::Machine() {
  streams_.push_back(std::make_unique<Stream>());
  at::addGlobalCallback(at::RecordFunctionCallback(&on_begin, &on_end)
                            .scopes({at::RecordScope::USER_SCOPE, at::RecordScope::BACKWARD_FUNCTION}));
}

void Machine::configure(uint64_t seed, const std::string& mode, bool looks, bool is_dry) {
  wait_all();
  WithoutGIL no_gil;
  std::lock_guard<std::mutex> lock(mutex_);
  random_.seed(seed);
  mode_ = mode, looks_ = looks, is_dry_ = is_dry, permits_ = 0;
  failures_.clear();
}

void Machine::set_times(double idle_s, double bound_s) {
  std::lock_guard<std::mutex> lock(mutex_);
  idle_ = std::chrono::duration<double>(idle_s), bound_ = std::chrono::duration<double>(bound_s);
  to_device_.notify_all();
}

int Machine::new_stream() {
  WithoutGIL no_gil;
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::make_unique<Stream>());
  return int(streams_.size()) - 1;
}

void Machine::fail(std::string message) {
  WithoutGIL no_gil;
  std::lock_guard<std::mutex> lock(mutex_);
  failures_.push_back(std::move(message));
}

void Machine::raise_failures() {
  std::string message;
  {
    WithoutGIL no_gil;
    std::lock_guard<std::mutex> lock(mutex_);
    if (failures_.empty()) return;
    message = failures_.front();
    failures_.clear();
  }
  TORCH_CHECK(false, message);
}

// What the host does.

TaskPtr Machine::push(int stream, TaskPtr task) {
  auto& own = *streams_[stream];
  task->stream = stream;
  own.last = task;
  activity_++;
  if (is_dry_) {
    task->is_over = true;
    task->run = nullptr, task->waits_for = nullptr;
    return task;
  }
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([this] { loop(); }).detach();
  }
  own.queue.push_back(task);
  if (mode_ == "random") permits_ += std::uniform_int_distribution<int>(0, 2)(random_);
  to_device_.notify_all();
  return task;
}

TaskPtr Machine::issue(int stream, std::string name, const std::vector<Use>& uses, std::function<bool()> run, Record record,
                       TaskPtr after) {
  raise_failures();
  auto site = here();
  WithoutGIL no_gil;
  std::unique_lock<std::mutex> lock(mutex_);
  auto& own = *streams_[stream];
  auto task = std::make_shared<Task>();
  task->name = std::move(name), task->site = site, task->run = std::move(run);
  task->waits_for = std::move(after);
  join(own.clock, host_);
  if (own.clock.size() <= size_t(stream)) own.clock.resize(stream + 1);
  task->tick = own.clock[stream] = ++own.tick;
  task->clock = own.clock;
  has_issued = true;
  static std::set<std::string> names;
  const Access access{stream, task->tick, &*names.insert(task->name).first, site};
  try {
    if (looks_) {
      for (const auto& use : uses) if (!use.writes) touch(use, access, own.clock);
      for (const auto& use : uses) if (use.writes) touch(use, access, own.clock);
    }
  } catch (...) {  // what was noted of it has an end all the same
    task->run = nullptr;
    push(stream, task);
    throw;
  }
  num_issued++;
  if (is_dry_ && task->run && record.read_bytes + record.written_bytes <= kComputedDry) {
    auto run = std::exchange(task->run, nullptr);
    lock.unlock();
    try {
      run();
    } catch (const std::exception&) {  // of values that nobody computed
    }
    lock.lock();
  }
  if (keeps_records) {
    record.name = task->name, record.label = site->label, record.stream = stream;
    record.allocated_bytes = stats_["allocated_bytes"];
    records_.push_back(std::move(record));
  }
  return push(stream, task);
}

TaskPtr Machine::mark(int stream) {
  WithoutGIL no_gil;
  std::lock_guard<std::mutex> lock(mutex_);
  auto task = std::make_shared<Task>();
  task->name = "mark";
  join(streams_[stream]->clock, host_);
  task->clock = streams_[stream]->clock;
  if (keeps_records) {
    mark_numbers_[task.get()] = ++num_marks_;
    records_.push_back({"mark", "", "", stream, 0, 0, num_marks_, {}, 0});
  }
  return push(stream, task);
}

void Machine::hold(int stream, const TaskPtr& mark) {
  WithoutGIL no_gil;
  std::lock_guard<std::mutex> lock(mutex_);
  join(streams_[stream]->clock, mark->clock);
  if (keeps_records && mark_numbers_.count(mark.get()))
    records_.push_back({"wait", "", "", stream, 0, 0, mark_numbers_[mark.get()], {}, 0});
  auto task = std::make_shared<Task>();
  task->name = "wait for stream " + std::to_string(mark->stream);
  task->waits_for = mark;
  task->clock = streams_[stream]->clock;
  push(stream, task);
}

void Machine::wait(const TaskPtr& task, bool is_known) {
  raise_failures();
  {
    WithoutGIL no_gil;
    std::unique_lock<std::mutex> lock(mutex_);
    activity_++;
    if (keeps_records && is_known) {
      const auto known = mark_numbers_.find(task.get());
      records_.push_back({"host", "", "", task->stream, 0, 0, known != mark_numbers_.end() ? known->second : task->name == "mark" ? 0 : -1, {}, 0});
    }
    if (!task->is_over) {
      targets_.push_back(task);
      to_device_.notify_all();
      const bool is_over = to_host_.wait_for(lock, kLimit, [&] { return task->is_over; });
      targets_.erase(std::find(targets_.begin(), targets_.end(), task));
      if (!is_over) {
        std::string text = "the device hangs: the host waited for '" + task->name + "' of stream " + std::to_string(task->stream);
        for (size_t i = 0; i < streams_.size(); i++)
          if (!streams_[i]->queue.empty()) {
            const auto& head = streams_[i]->queue.front();
            text += "\n  stream " + std::to_string(i) + " is at '" + head->name + "'" + (head->site ? head->site->text() : "");
          }
        lock.unlock();
        TORCH_CHECK(false, text);
      }
    }
    if (is_known) join(host_, task->clock);
  }
  raise_failures();
}

void Machine::wait_stream(int stream, bool is_known) {
  TaskPtr last;
  {
    WithoutGIL no_gil;
    std::lock_guard<std::mutex> lock(mutex_);
    last = streams_[stream]->last;
  }
  if (last) wait(last, is_known);
}

void Machine::wait_all() {
  size_t num_streams;
  {
    WithoutGIL no_gil;
    std::lock_guard<std::mutex> lock(mutex_);
    num_streams = streams_.size();
  }
  for (size_t i = 0; i < num_streams; i++) wait_stream(int(i), true);
}

bool Machine::query(const TaskPtr& task) {
  WithoutGIL no_gil;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!task->is_over) {
    permits_++;  // who asks again and again is answered at last
    to_device_.notify_all();
    to_host_.wait_for(lock, std::chrono::milliseconds(1));
  }
  if (task->is_over && has_issued) join(host_, task->clock);
  return task->is_over;
}

std::vector<Record> Machine::take_records() {
  std::lock_guard<std::mutex> lock(mutex_);
  mark_numbers_.clear();
  return std::exchange(records_, {});
}

// What the device does.

// The stream whose head has to run for `target` to be over.
Machine::Stream* Machine::needed(const TaskPtr& target) {
  auto task = target;
  for (int i = 0; i < 10000; i++) {
    auto& own = *streams_[task->stream];
    if (own.queue.empty()) return nullptr;
    const auto& head = own.queue.front();
    if (!head->waits_for || head->waits_for->is_over) return &own;
    task = head->waits_for;
  }
  return nullptr;
}

TaskPtr Machine::pick() {
  std::vector<Stream*> ready;
  for (auto& own : streams_)
    if (!own->queue.empty() && (!own->queue.front()->waits_for || own->queue.front()->waits_for->is_over)) ready.push_back(own.get());
  if (ready.empty()) return nullptr;
  Stream* wanted = targets_.empty() ? nullptr : needed(targets_[random_() % targets_.size()]);
  const int draw = int(random_() % 8);
  if (mode_ == "lazy" && wanted && draw) return wanted->queue.front();
  if (mode_ == "others first" && ready.size() > 1 && draw)
    ready.erase(std::remove(ready.begin(), ready.end(), wanted), ready.end());
  return ready[random_() % ready.size()]->queue.front();
}

void Machine::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  uint64_t seen = activity_;
  bool is_idle = false;
  while (true) {
    TaskPtr task;
    if (!targets_.empty() || permits_ > 0 || is_idle || mode_ == "eager") task = pick();
    if (!task && std::all_of(streams_.begin(), streams_.end(), [](const auto& own) { return own->queue.empty(); })) {
      is_idle = false;
      to_device_.wait(lock);
      continue;
    }
    if (!task) {
      is_idle = to_device_.wait_for(lock, idle_) == std::cv_status::timeout && seen == activity_;
      seen = activity_;
      continue;
    }
    is_idle = is_idle && seen == activity_;
    bool is_over = true;
    if (task->run) {
      lock.unlock();
      try {
        is_over = task->run();
      } catch (const std::exception& error) {
        fail("'" + task->name + "' failed on the device, after the host had gone on:" + task->site->text() + "\n" + text_of(error));
      }
      if (is_over) task->run = nullptr, task->waits_for = nullptr;  // what it held is let go without the lock
      lock.lock();
    }
    if (is_over) {
      permits_ = std::max<int64_t>(0, permits_ - 1);
      task->is_over = true;
      if (task->tick) num_run++;
      streams_[task->stream]->queue.pop_front();
      to_host_.notify_all();
    } else {
      to_device_.wait_for(lock, std::chrono::microseconds(200));  // for peers
    }
  }
}

// Who uses what, in which order.

std::map<uintptr_t, Machine::Cell>::iterator Machine::cut(uintptr_t at) {
  auto it = shadow_.lower_bound(at);
  if (it != shadow_.end() && it->first == at) return it;
  if (it == shadow_.begin()) return it;
  auto before = std::prev(it);
  if (before->second.end <= at) return it;
  Cell cell = before->second;
  before->second.end = at;
  return shadow_.emplace(at, std::move(cell)).first;
}

void Machine::touch(const Use& use, const Access& access, const Clock& clock) {
  const auto is_before = [&](const Access& other) { return at(clock, other.stream) >= other.tick; };
  for (const auto& range : use.ranges) {
    if (range.begin >= range.end) continue;
    cut(range.end);
    auto it = cut(range.begin);
    uintptr_t from = range.begin;
    while (from < range.end) {
      if (it == shadow_.end() || it->first > from) {
        const uintptr_t end = it == shadow_.end() ? range.end : std::min(range.end, it->first);
        it = shadow_.emplace(from, Cell{end, std::nullopt, {}}).first;
      }
      Cell& cell = it->second;
      if (cell.write && !is_before(*cell.write)) race(range, *cell.write, true, access, use.writes, nullptr);
      if (use.writes) {
        for (const auto& read : cell.reads) if (!is_before(read)) race(range, read, false, access, true, nullptr);
      } else {
        auto known = std::find_if(cell.reads.begin(), cell.reads.end(), [&](const Access& a) { return a.stream == access.stream; });
        if (known != cell.reads.end()) *known = access; else cell.reads.push_back(access);
      }
      from = cell.end;
      ++it;
    }
    if (use.writes) {
      shadow_.erase(shadow_.lower_bound(range.begin), shadow_.lower_bound(range.end));
      shadow_.emplace(range.begin, Cell{range.end, access, {}});
    }
  }
}

void Machine::race(const Range& range, const Access& before, bool wrote, const Access& now, bool writes, const char* how) {
  std::ostringstream out;
  out << "race: nothing orders two uses of the same memory (" << range.end - range.begin << " bytes)";
  if (how) out << ": " << how;
  out << "\n  '" << *now.name << "' on stream " << now.stream << (writes ? " writes it" : " reads it")
      << (now.site ? now.site->text() : "");
  out << "\n  '" << *before.name << "' on stream " << before.stream << (wrote ? " wrote it" : " read it") << " before"
      << (before.site ? before.site->text() : "");
  TORCH_CHECK(false, out.str());
}

void Machine::forget_shadow(uintptr_t begin, uintptr_t end) {
  WithoutGIL no_gil;
  std::lock_guard<std::mutex> lock(mutex_);
  cut(end);
  cut(begin);
  shadow_.erase(shadow_.lower_bound(begin), shadow_.lower_bound(end));
}

// Who gets this memory comes behind what `clock` has seen; the host, who does not ask, learns nothing by it.
void Machine::settle(const Range& range, const Clock& clock) {
  const auto is_over = [&](const Access& other) { return at(clock, other.stream) >= other.tick; };
  cut(range.end);
  for (auto it = cut(range.begin); it != shadow_.end() && it->first < range.end; ++it) {
    Cell& cell = it->second;
    if (cell.write && is_over(*cell.write)) cell.write.reset();
    cell.reads.erase(std::remove_if(cell.reads.begin(), cell.reads.end(), is_over), cell.reads.end());
  }
}

bool Machine::settle(const TaskPtr& task, const std::vector<Range>& ranges) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!task->is_over) return false;
  for (const auto& range : ranges) settle(range, task->clock);
  return true;
}

// Memory.

Machine::Block* Machine::find(Pool& pool, size_t size) {
  Block key{nullptr, size};
  auto it = pool.blocks.lower_bound(&key);
  if (it == pool.blocks.end()) return nullptr;
  Block* block = *it;
  pool.blocks.erase(it);
  return block;
}

void* Machine::allocate(size_t num_bytes, int stream) {
  if (!num_bytes) return nullptr;
  raise_failures();
  auto site = here();
  WithoutGIL no_gil;
  std::unique_lock<std::mutex> lock(mutex_);
  activity_++;
  process_pending(false);
  const size_t size = (num_bytes + kRound - 1) / kRound * kRound;
  const bool is_small = size <= kSmall;
  auto& pool = pools_[{stream, is_small}];
  if (!pool) pool.reset(new Pool{stream, is_small, {}, {}});
  // Whatever was let go may be handed out now: all that used it must come before what this stream does next.
  Clock clock = streams_[stream]->clock;
  join(clock, host_);
  if (looks_) {
    static const std::string reuse = "a new tensor";
    for (const auto& freed : pool->unchecked) {
      cut(freed.range.end);
      for (auto it = cut(freed.range.begin); it != shadow_.end() && it->first < freed.range.end; ++it) {
        const auto check = [&](const Access& other, bool wrote) {
          if (at(clock, other.stream) >= other.tick) return;
          auto where = std::make_shared<Site>(*site);
          where->label += (where->label.empty() ? "" : "; ") + std::string("its memory was let go by") + freed.site->text();
          const Access access{stream, 0, &reuse, where};
          const Range range = freed.range;
          const Access before = other;
          pool->unchecked.clear();
          race(range, before, wrote, access, true, "it was let go while another stream used it, with no record_stream");
        };
        if (it->second.write) check(*it->second.write, true);
        for (const auto& read : it->second.reads) check(read, false);
      }
    }
  }
  if (!is_dry_) {  // and nobody may read it any more
    for (const auto& freed : pool->unchecked) {
      auto task = std::make_shared<Task>();
      task->name = "poison", task->site = freed.site;
      task->clock = streams_[stream]->clock;
      task->run = [range = freed.range] {
        std::memset(reinterpret_cast<void*>(range.begin), 0xFF, range.end - range.begin);
        return true;
      };
      push(stream, task);
    }
  }
  pool->unchecked.clear();
  Block* block = find(*pool, size);
  if (!block) {
    const size_t segment = is_small ? kSmallSegment : size < kLargeFrom ? kLargeSegment : (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
    const auto fits = [&] { return limit_ < 0 || stats_["reserved_bytes"] + int64_t(segment) <= limit_; };
    if (!fits()) {
      stats_["num_alloc_retries"]++;
      lock.unlock();
      wait_all();
      lock.lock();
      process_pending(true);
      release_cached();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, fits(), "sim out of memory. Tried to allocate ", num_bytes, " bytes, of ", limit_,
                     " ", stats_["reserved_bytes"], " are reserved, and of these ", stats_["allocated_bytes"], " in use.");
    void* at = mmap(nullptr, segment, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no memory for the device");
    block = new Block{static_cast<char*>(at), segment};
    block->pool = pool.get();
    block->segment_size = segment;
    stats_["reserved_bytes"] += segment;
    stats_["num_segments"]++;
  }
  const size_t rest = block->size - size;
  if (is_small ? rest >= kRound : rest > kSmall) {
    auto* other = new Block{block->at + size, rest};
    other->pool = pool.get(), other->before = block, other->after = block->after;
    if (block->after) block->after->before = other;
    block->after = other, block->size = size;
    pool->blocks.insert(other);
  }
  block->is_allocated = true, block->requested = num_bytes;
  allocated_[block->at] = block;
  stats_["allocated_bytes"] += block->size;
  stats_["active_bytes"] += block->size;
  stats_["requested_bytes"] += num_bytes;
  stats_["num_allocations"]++;
  for (const char* name : {"allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"}) {
    auto& peak = stats_[std::string("peak_") + name];
    peak = std::max(peak, stats_[name]);
  }
  return block->at;
}

void Machine::free(void* at) {
  if (!at) return;
  auto site = here();
  WithoutGIL no_gil;
  std::lock_guard<std::mutex> lock(mutex_);
  activity_++;
  auto it = allocated_.find(at);
  if (it == allocated_.end()) return;
  Block* block = it->second;
  allocated_.erase(it);
  block->is_allocated = false;
  block->freed = site;
  stats_["allocated_bytes"] -= block->size;
  stats_["requested_bytes"] -= block->requested;
  if (block->streams.empty()) {
    take_back(block);
    return;
  }
  for (int stream : block->streams) {
    auto task = std::make_shared<Task>();
    task->name = "mark";
    join(streams_[stream]->clock, host_);
    task->clock = streams_[stream]->clock;
    block->pending.push_back(push(stream, task));
  }
  block->streams.clear();
  pending_.insert(block);
}

// A block goes to the pool of its stream, and is one with its neighbours there.
void Machine::take_back(Block* block) {
  const Range range{reinterpret_cast<uintptr_t>(block->at), reinterpret_cast<uintptr_t>(block->at) + block->size};
  Pool& pool = *block->pool;
  stats_["active_bytes"] -= block->size;
  pool.unchecked.push_back({range, block->freed});
  const auto merge = [&](Block* one, Block* next) {  // into `one`
    one->size += next->size;
    one->after = next->after;
    if (next->after) next->after->before = one;
  };
  const auto is_free = [&](Block* other) { return other && !other->is_allocated && !pending_.count(other); };
  if (is_free(block->after)) {
    Block* other = block->after;
    pool.blocks.erase(other);
    merge(block, other);
    delete other;
  }
  if (is_free(block->before)) {
    Block* other = block->before;
    pool.blocks.erase(other);
    merge(other, block);
    delete block;
    block = other;
  }
  pool.blocks.insert(block);
}

// Blocks that other streams had used are free once those have come so far.
void Machine::process_pending(bool waits) {
  for (auto it = pending_.begin(); it != pending_.end();) {
    Block* block = *it;
    // A dry run does all at once; a lazy one's blocks are in use until the host has waited for what uses them.
    const bool is_late = is_dry_ && mode_ == "lazy";
    const bool is_over = std::all_of(block->pending.begin(), block->pending.end(), [&](const TaskPtr& task) {
      return is_late ? at(host_, task->stream) >= at(task->clock, task->stream) : task->is_over;
    });
    if (!is_over && !waits) {
      ++it;
      continue;
    }
    const auto begin = reinterpret_cast<uintptr_t>(block->at);
    for (const auto& task : block->pending) settle({begin, begin + block->size}, task->clock);
    block->pending.clear();
    it = pending_.erase(it);
    take_back(block);
  }
}

bool Machine::release_cached() {
  bool has_any = false;
  for (auto& [_, pool] : pools_) {
    for (auto it = pool->blocks.begin(); it != pool->blocks.end();) {
      Block* block = *it;
      if (block->before || block->after) {
        ++it;
        continue;
      }
      it = pool->blocks.erase(it);
      const auto begin = reinterpret_cast<uintptr_t>(block->at), end = begin + block->size;
      pool->unchecked.erase(std::remove_if(pool->unchecked.begin(), pool->unchecked.end(),
                                           [&](const Freed& f) { return f.range.begin >= begin && f.range.end <= end; }),
                            pool->unchecked.end());
      shadow_.erase(shadow_.lower_bound(begin), shadow_.lower_bound(end));
      munmap(block->at, block->size);
      stats_["reserved_bytes"] -= block->size;
      stats_["num_segments"]--;
      delete block;
      has_any = true;
    }
  }
  return has_any;
}

void Machine::empty_cache() {
  wait_all();
  std::lock_guard<std::mutex> lock(mutex_);
  process_pending(true);
  release_cached();
}

void Machine::record_stream(void* at, int stream) {
  WithoutGIL no_gil;
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = allocated_.find(at);
  if (it != allocated_.end() && it->second->pool->stream != stream) it->second->streams.insert(stream);
}

std::map<std::string, int64_t> Machine::stats() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto out = stats_;
  out["num_comm_allocations"] = num_comm_allocations;
  out["num_streams"] = int64_t(streams_.size());
  return out;
}

void Machine::reset_peaks() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const char* name : {"allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"})
    stats_[std::string("peak_") + name] = stats_[name];
}

}  // namespace sim
