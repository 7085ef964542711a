#include "graphs.h"

#include <cxxabi.h>

#include <algorithm>
#include <bitset>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace graphs {
namespace {

constexpr size_t MOST_NODES = 4096;
constexpr size_t PAGE = 512;
constexpr size_t SCALAR_POOL = 65536;  // MLX keeps arrays of up to 8 bytes side by side in an allocation of this size
constexpr uintptr_t SCALAR = 8;

struct Graph {
  std::vector<Handle> nodes;
  std::vector<std::pair<Handle, Handle>> edges;
};

enum class Kind { value, read, write };

struct Kernel {
  std::string name;
  std::vector<Kind> arguments;
};

struct Written {  // behind MLX's back, through a pointer to const
  std::string fragment;
  size_t from_the_end;
};

// One for the process, never taken down: MLX frees arrays until the very end.
struct State {
  std::recursive_mutex mutex;
  std::map<uintptr_t, size_t> buffers;
  std::unordered_map<Handle, Graph> graphs;
  std::unordered_map<Handle, Node> nodes;
  std::unordered_map<Handle, Kernel> kernels;
  std::unordered_map<uintptr_t, std::vector<uintptr_t>> pointer_arrays;
  std::vector<Written> written;
  std::map<std::string, long> unordered;
  long checked = 0, seen = 0;
  Handle last = 0x10000;
};

State& state() {
  static State* one = new State;
  return *one;
}

#define LOCKED std::lock_guard<std::recursive_mutex> lock(state().mutex)

// Where the buffer begins that holds this place; 0 for memory that is not the device's.
uintptr_t buffer_of(uintptr_t place) {
  auto& buffers = state().buffers;
  auto next = buffers.upper_bound(place);
  if (next == buffers.begin()) return 0;
  auto [start, size] = *std::prev(next);
  if (place >= start + size) return 0;
  return size == SCALAR_POOL ? place / SCALAR * SCALAR : start;
}

// The arguments of a signature, "a, b<c, d>" as {"a", "b<c, d>"}.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (char one : text) {
    depth += (one == '<' || one == '(') - (one == '>' || one == ')');
    if (one == ',' && depth == 0) {
      parts.push_back(part);
      part.clear();
    } else {
      part += one;
    }
  }
  if (!part.empty()) parts.push_back(part);
  return parts;
}

Kind kind_of(std::string argument) {
  while (!argument.empty() && argument.back() == ' ') argument.pop_back();
  if (argument.empty() || argument.back() != '*') return Kind::value;
  return argument.find("const*") == std::string::npos ? Kind::write : Kind::read;
}

Kernel parse(const char* mangled) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string text = demangled ? demangled : mangled;
  free(demangled);
  size_t close = text.rfind(')'), open = close;
  if (close == std::string::npos) return {text, {}};
  for (int depth = 0; open != std::string::npos; open--) {
    depth += (text[open] == ')') - (text[open] == '(');
    if (depth == 0) break;
  }
  Kernel kernel{text.substr(0, open), {}};
  for (auto& one : split(text.substr(open + 1, close - open - 1))) kernel.arguments.push_back(kind_of(one));
  // all_reduce and its like take "T* in" and never write to it; init_reduce has the one that it does write to alone.
  auto pointers = std::count_if(kernel.arguments.begin(), kernel.arguments.end(), [](Kind one) { return one != Kind::value; });
  if (kernel.name.find("_reduce<") != std::string::npos && pointers > 1) kernel.arguments[0] = Kind::read;
  std::vector<size_t> read;
  for (size_t i = 0; i < kernel.arguments.size(); i++)
    if (kernel.arguments[i] == Kind::read) read.push_back(i);
  for (auto& [fragment, from_the_end] : state().written)
    if (text.find(fragment) != std::string::npos && read.size() >= from_the_end)
      kernel.arguments[read[read.size() - from_the_end]] = Kind::write;
  return kernel;
}

using Nodes = std::bitset<MOST_NODES>;

// For each node, by its place in the graph, all those that it waits for.
std::vector<Nodes> waited_for(const Graph& graph) {
  std::unordered_map<Handle, size_t> place;
  for (size_t i = 0; i < graph.nodes.size(); i++) place[graph.nodes[i]] = i;
  std::vector<std::vector<size_t>> before(graph.nodes.size());
  for (auto [from, to] : graph.edges) before[place.at(to)].push_back(place.at(from));
  std::vector<Nodes> found(graph.nodes.size());
  std::vector<bool> done(graph.nodes.size());
  auto visit = [&](auto& self, size_t node) -> void {
    if (done[node]) return;
    done[node] = true;
    for (size_t one : before[node]) {
      self(self, one);
      found[node] |= found[one];
      found[node].set(one);
    }
  };
  for (size_t i = 0; i < graph.nodes.size(); i++) visit(visit, i);
  return found;
}

} // namespace

void* allocate(size_t bytes) {
  LOCKED;
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  void* start = aligned_alloc(PAGE, size);  // its pages are not touched, so that full-size weights take none
  state().buffers[uintptr_t(start)] = size;
  return start;
}

Handle begin() {
  LOCKED;
  state().graphs[++state().last];
  return state().last;
}

void end(Handle graph) {
  LOCKED;
  for (Handle node : state().graphs[graph].nodes) state().nodes.erase(node);
  state().graphs.erase(graph);
}

Handle add(Handle graph, Node node) {
  LOCKED;
  Handle handle = ++state().last;
  state().nodes[handle] = std::move(node);
  state().graphs[graph].nodes.push_back(handle);
  return handle;
}

void order(Handle graph, const Handle* before, const Handle* after, size_t count) {
  LOCKED;
  for (size_t i = 0; i < count; i++) state().graphs[graph].edges.push_back({before[i], after[i]});
}

Node whole(Handle graph) {
  LOCKED;
  Node all;
  for (Handle one : state().graphs[graph].nodes) {
    const Node& node = state().nodes[one];
    all.name += (all.name.empty() ? "" : ", ") + node.name;
    all.touched.insert(all.touched.end(), node.touched.begin(), node.touched.end());
  }
  return all;
}

void check(Handle handle) {
  LOCKED;
  const Graph& graph = state().graphs[handle];
  state().checked++;
  state().seen += graph.nodes.size();
  if (graph.nodes.size() > MOST_NODES) {
    fprintf(stderr, "stand-in: a graph of %zu nodes; at most %zu can be checked\n", graph.nodes.size(), MOST_NODES);
    abort();
  }
  std::vector<Nodes> before = waited_for(graph);
  std::unordered_map<uintptr_t, std::vector<std::pair<size_t, Access>>> users;
  for (size_t i = 0; i < graph.nodes.size(); i++)
    for (const Access& one : state().nodes[graph.nodes[i]].touched)
      if (uintptr_t buffer = buffer_of(one.place)) users[buffer].push_back({i, one});
  for (auto& [buffer, all] : users)
    for (size_t i = 0; i < all.size(); i++)
      for (size_t j = i + 1; j < all.size(); j++) {
        auto [first, one] = all[i];
        auto [second, other] = all[j];
        if (first == second || before[first][second] || before[second][first]) continue;
        if (!one.writes && !other.writes) continue;
        // Parts of one concatenation, side by side.
        if (one.writes && other.writes && one.place != other.place) continue;
        const std::string& name = state().nodes[graph.nodes[first]].name;
        const std::string& other_name = state().nodes[graph.nodes[second]].name;
        auto verb = [](const Access& access) { return access.writes ? " writes" : " reads"; };
        state().unordered[name + verb(one) + " and " + other_name + verb(other)]++;
      }
}

void name_kernel(Handle kernel, const char* mangled) {
  LOCKED;
  state().kernels[kernel] = parse(mangled);
}

Node call(Handle handle, void** arguments) {
  LOCKED;
  const Kernel& kernel = state().kernels[handle];
  Node node{kernel.name, {}};
  std::vector<uintptr_t> pointers;
  for (size_t i = 0; arguments && i < kernel.arguments.size(); i++) {
    if (kernel.arguments[i] == Kind::value) continue;
    uintptr_t place = *static_cast<uintptr_t*>(arguments[i]);
    pointers.push_back(place);
    if (place) node.touched.push_back({place, kernel.arguments[i] == Kind::write});
  }
  if (kernel.name.find("mm_device_pointers") != std::string::npos) {  // writes pointers only, behind the first one
    node.touched.resize(1);
    state().pointer_arrays[buffer_of(pointers[0])] = {pointers.begin() + 1, pointers.end()};
  }
  return node;
}

Node product(const void* a, const void* b, const void* c, void* d, void* workspace) {
  LOCKED;
  Node node{"cublasLtMatmul", {{uintptr_t(workspace), true}}};
  auto filled = state().pointer_arrays.find(buffer_of(uintptr_t(a)));
  if (filled == state().pointer_arrays.end()) {
    for (const void* one : {a, b, c}) node.touched.push_back({uintptr_t(one), false});
    node.touched.push_back({uintptr_t(d), true});
    return node;
  }
  node.touched.push_back({uintptr_t(a), false});
  for (uintptr_t one : filled->second) node.touched.push_back({one, one == filled->second.back()});
  return node;
}

} // namespace graphs

// For ordered.py.
extern "C" {

// Kernels with this in their name write through one of their pointers to const, the so-manieth of these from the end.
void stand_in_written(const char* fragment, size_t from_the_end) {
  graphs::state().written.push_back({fragment, from_the_end});
}

// A line for each kind of unordered pair; how many kinds.
int stand_in_report() {
  using graphs::state;
  LOCKED;
  for (auto& [pair, times] : state().unordered) printf("%6ld times unordered: %s\n", times, pair.c_str());
  printf("%ld graphs, %ld nodes, %zu kinds of unordered pairs\n", state().checked, state().seen, state().unordered.size());
  fflush(stdout);
  return int(state().unordered.size());
}
}
