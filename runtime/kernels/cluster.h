// CLUSTER blocks along x that run at the same time and reach each other's shared memory. Nothing is left in memory for
// the next launch, so launches may overlap as they like.
// MLX writes `__global__ void` itself; this is the one way to say how large its clusters are.
#undef __global__
#define __global__ __attribute__((global)) __cluster_dims__(straightline::CLUSTER, 1, 1)

namespace straightline {

// All threads of all blocks of the cluster; what they have written before is seen after.
DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive;\n\tbarrier.cluster.wait;" ::: "memory");
}

// Where another block has what this one has at `own` in its shared memory.
template <typename V>
DEVICE unsigned place_in(const V* own, int block) {
  const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(own));
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  return there;
}

DEVICE float of_block(const float* own, int block) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(place_in(own, block)) : "memory");
  return value;
}

DEVICE void put_in_block(const T* own, int block, T value) {
  const unsigned short bits = __bfloat16_as_ushort(value);
  asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(place_in(own, block)), "h"(bits) : "memory");
}

} // namespace straightline
