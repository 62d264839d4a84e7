// A simulated accelerator, "sim": what differs on one is time, and time is what this is about.
//
// The host only *issues* tasks to streams; a thread of the device's own runs them on the CPU, in an order that a seed
// draws among those that events allow. Each task carries a vector clock. An access to memory that no event, wait or
// synchronization orders behind a conflicting one raises at once, whatever ran when.
#pragma once
#define AT_PER_OPERATOR_HEADERS  // all operators would take three times as long to build
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
using Clock = std::vector<uint64_t>;  // of each stream, how many of its tasks are known to be over

// Where in Python something was asked for, and for what.
struct Site {
  std::string label;  // ranges that are open, the innermost first
  std::vector<const std::string*> lines;  // the innermost first
  std::string text() const;
};
using SitePtr = std::shared_ptr<const Site>;
SitePtr here();  // takes the GIL: to be called without the lock

struct Range {
  uintptr_t begin, end;
};

struct Use {
  std::vector<Range> ranges;
  bool writes;
};

// What a stream is to do.
struct Task {
  std::string name;
  int stream = 0;
  uint64_t tick = 0;
  Clock clock;  // what is over once it is
  SitePtr site;
  std::function<bool()> run;  // whether it is over; asked again until it is
  std::shared_ptr<Task> waits_for;  // in another stream
  bool is_over = false;
};
using TaskPtr = std::shared_ptr<Task>;

// What a timeline can be made of; see timeline.py.
struct Record {
  std::string kind, name, label;  // kind: op, copy, collective, mark, wait, host
  int stream;
  int64_t read_bytes, written_bytes, number;  // number: of a mark, or of that which is waited for; ranks of a collective
  std::vector<std::vector<int64_t>> shapes;
  int64_t itemsize;
  int64_t allocated_bytes = 0;  // when it was issued
};

class Machine {
 public:
  static Machine& get();

  // The host's side. None of these may be called with the lock.
  TaskPtr issue(int stream, std::string name, const std::vector<Use>& uses, std::function<bool()> run, Record record,
                TaskPtr after = nullptr);  // which runs later than that, though nobody may build on it
  TaskPtr mark(int stream);  // over when all before it in the stream is
  void hold(int stream, const TaskPtr& mark);  // the stream waits for it
  void wait(const TaskPtr& task, bool is_known);  // the host does; and whether it knows afterwards what is over
  void wait_stream(int stream, bool is_known);
  void wait_all();
  bool query(const TaskPtr& task);
  int new_stream();
  void fail(std::string message);  // raised at the next call of the host
  void raise_failures();

  // Memory.
  void* allocate(size_t num_bytes, int stream);
  void free(void* at);
  void record_stream(void* at, int stream);
  void empty_cache();
  void forget_shadow(uintptr_t begin, uintptr_t end);
  bool settle(const TaskPtr& task, const std::vector<Range>& ranges);  // if it is over, whoever is given these is behind it
  std::map<std::string, int64_t> stats();
  void reset_peaks();
  void set_limit(int64_t num_bytes) { limit_ = num_bytes; }

  // How it is run.
  void configure(uint64_t seed, const std::string& mode, bool looks, bool is_dry);
  std::vector<Record> take_records();
  bool is_dry() const { return is_dry_; }
  void set_times(double idle_s, double bound_s);
  std::chrono::duration<double> bound() const { return bound_; }  // for which a collective waits for peers
  bool keeps_records = false;
  int64_t num_issued = 0, num_run = 0;
  std::atomic<int64_t> num_comm_allocations = 0;  // tensors by a process group's own allocator

 private:
  struct Stream {
    std::deque<TaskPtr> queue;
    Clock clock;
    uint64_t tick = 0;
    TaskPtr last;
  };
  struct Access {
    int stream;
    uint64_t tick;
    const std::string* name;
    SitePtr site;
  };
  struct Cell {
    uintptr_t end;
    std::optional<Access> write;
    std::vector<Access> reads;
  };
  struct Pool;
  struct Block {
    char* at;
    size_t size, requested = 0;
    Pool* pool;
    bool is_allocated = false;
    Block *before = nullptr, *after = nullptr;  // in its segment
    std::set<int> streams;  // that it was recorded on
    std::vector<TaskPtr> pending;
    SitePtr freed;
    uint64_t segment_size = 0;
  };
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return a->size != b->size ? a->size < b->size : a->at < b->at;
    }
  };
  struct Freed {
    Range range;
    SitePtr site;
  };
  struct Pool {
    int stream;
    bool is_small;
    std::set<Block*, BySize> blocks;
    std::vector<Freed> unchecked;
  };

  Machine();
  void loop();
  TaskPtr pick();
  Stream* needed(const TaskPtr& target);
  TaskPtr push(int stream, TaskPtr task);
  void touch(const Use& use, const Access& access, const Clock& clock);
  [[noreturn]] void race(const Range& range, const Access& before, bool wrote, const Access& now, bool writes,
                         const char* how);
  std::map<uintptr_t, Cell>::iterator cut(uintptr_t at);
  void take_back(Block* block);
  void process_pending(bool waits);
  void settle(const Range& range, const Clock& clock);
  bool release_cached();
  Block* find(Pool& pool, size_t size);

  std::mutex mutex_;
  std::condition_variable to_device_, to_host_;
  std::vector<std::unique_ptr<Stream>> streams_;
  Clock host_;
  std::map<uintptr_t, Cell> shadow_;
  std::map<std::pair<int, bool>, std::unique_ptr<Pool>> pools_;
  std::map<void*, Block*> allocated_;
  std::set<Block*> pending_;
  std::map<std::string, int64_t> stats_;
  int64_t limit_ = -1;
  std::vector<std::string> failures_;
  std::vector<Record> records_;
  std::vector<TaskPtr> targets_;
  std::mt19937_64 random_;
  std::string mode_ = "random";
  int64_t permits_ = 0;
  bool looks_ = true, is_dry_ = false, has_thread_ = false;
  std::chrono::duration<double> idle_{0.003};  // of the host, after which the device goes on by itself
  std::chrono::duration<double> bound_{60};
  uint64_t activity_ = 0;
  int64_t num_marks_ = 0;
  std::map<const Task*, int64_t> mark_numbers_;
};

// Releases the GIL, if this thread has it, for as long as it waits.
class WithoutGIL {
 public:
  WithoutGIL();
  ~WithoutGIL();

 private:
  void* state_ = nullptr;
};

int current_stream();
int exchange_stream(int stream);
std::vector<Range> ranges_of(const at::Tensor& tensor);
at::Tensor host_alias(const at::Tensor& tensor);  // the memory of a tensor of the device as one of the CPU
void register_group(void* module);

}  // namespace sim
