"""mlx_lm.generate on a specialized model. Every flag is mlx-lm's, but for --kv-config, --kernels and --tier."""

from .loader import specialized, split


def run(arguments: list[str]) -> int:
    """At the end, standard error says which path served, how often and why."""
    wishes, rest = split(arguments, "straightline generate")
    with specialized("mlx_lm.generate", wishes, rest) as program:
        program.main()
    return 0
