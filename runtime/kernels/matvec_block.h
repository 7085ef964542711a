// What a kernel of one product with ROWS rows a warp has: its rows, and which of the results a warp writes.
namespace straightline {

using Rows = Matvec<INPUTS, BITS, GROUP, ROWS, UNROLLED>;

CONSTANT int FINISHED = GLU ? ROWS / 2 : ROWS; // values that a warp writes
CONSTANT int RESULTS = GLU ? OUTPUTS / 2 : OUTPUTS;

// The first of the values that a warp writes.
DEVICE int first_of(Place here) { return (here.block * (BLOCK / 32) + (here.tid >> 5)) * FINISHED; }

} // namespace straightline
