// What the fast attention's texts share.
namespace straightline {

CONSTANT int CHUNK = 32 * READS; // values of a row that a warp reads at once
CONSTANT int CHUNKS = HEAD_DIM / CHUNK;
CONSTANT int HELD = READS * CHUNKS; // values of a row that a lane holds
CONSTANT int WARPS = BLOCK / 32;
CONSTANT int SCORES = GROUP * TAKEN; // of a warp at a time
CONSTANT float LEAST = -1e30f;       // the highest of no scores: finite, so that it can be subtracted from itself
CONSTANT float LOG2_E = 1.44269504f;
CONSTANT unsigned LANES = 0xffffffffu;

} // namespace straightline
