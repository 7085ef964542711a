// geglu(gate, up) for lines of SIZE values. Joined: a line of `gate_up` holds SIZE of gate, then SIZE of up.
namespace straightline {

template <typename G, typename U, typename O>
DEVICE void geglu_lines(G gate, U up, O out, Place here) {
  const int index = here.block * BLOCK + here.tid;
  if (index * READS >= SIZE) return;
  const Vec g = read(gate, index), u = read(up, index);
  Vec result;
  UNROLL
  for (int i = 0; i < READS; i++) result.v[i] = geglu(g.v[i], u.v[i]);
  write(out + here.row * SIZE, index, result);
}

template <typename G, typename O>
DEVICE void geglu_joined(G gate_up, O out, Place here) {
  const G gate = gate_up + here.row * 2 * SIZE;
  geglu_lines(gate, gate + SIZE, out, here);
}

template <typename G, typename U, typename O>
DEVICE void geglu_apart(G gate, U up, O out, Place here) {
  geglu_lines(gate + here.row * SIZE, up + here.row * SIZE, out, here);
}

// gelu_approx(gate) * per_layer[:, :, layer, :]; per_layer holds LAYERS lines a row.
template <typename G, typename L, typename I, typename O>
DEVICE void per_layer_gate(G gate, L per_layer, I layer, O out, Place here) {
  if (here.tid * READS >= SIZE) return;
  const Vec g = read(gate + here.row * SIZE, here.tid);
  const Vec u = read(per_layer + (here.row * LAYERS + at(layer, 0)) * SIZE, here.tid);
  Vec result;
  UNROLL
  for (int i = 0; i < READS; i++) result.v[i] = gelu_times(g.v[i], u.v[i]);
  write(out + here.row * SIZE, here.tid, result);
}

} // namespace straightline
