// What MLX asks a CUDA device for: buffers, and graphs of kernels that read and write them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace graphs {

using Handle = uintptr_t;

struct Access {
  uintptr_t place;
  bool writes;
};

struct Node {
  std::string name;
  std::vector<Access> touched;
};

// Memory of so many bytes, which is never handed back: no other buffer ever begins there.
void* allocate(size_t bytes);

Handle begin();
void end(Handle graph);
Handle add(Handle graph, Node node);
void order(Handle graph, const Handle* before, const Handle* after, size_t count);
// All that the nodes of a captured graph touch, as one node of another.
Node whole(Handle graph);

// Counts the nodes, and the pairs of them that touch one buffer without an order. Called before a graph is launched.
void check(Handle graph);

// A kernel by its mangled name. Its node, from the addresses of the arguments of one call.
void name_kernel(Handle kernel, const char* mangled);
Node call(Handle kernel, void** arguments);

// cuBLAS, which may be given arrays of pointers that a kernel has filled in before.
Node product(const void* a, const void* b, const void* c, void* d, void* workspace);

} // namespace graphs
