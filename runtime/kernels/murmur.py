"""The hash of a text that C++ programs built with GCC's library take: std::hash<std::string> of 64 bits."""

SEED = 0xC70F6907
MULTIPLIER = 0xC6A4A7935BD1E995
WORD = 0xFFFFFFFFFFFFFFFF


def string_hash(text: bytes) -> int:
    """MurmurHash64A, as libstdc++ seeds it."""
    whole = len(text) & ~7
    state = SEED ^ (len(text) * MULTIPLIER & WORD)
    for start in range(0, whole, 8):
        word = _shifted(int.from_bytes(text[start : start + 8], "little") * MULTIPLIER & WORD) * MULTIPLIER & WORD
        state = (state ^ word) * MULTIPLIER & WORD
    if whole < len(text):
        state = (state ^ int.from_bytes(text[whole:], "little")) * MULTIPLIER & WORD
    return _shifted(_shifted(state) * MULTIPLIER & WORD)


def _shifted(word: int) -> int:
    return word ^ word >> 47
