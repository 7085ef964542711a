"""mlx_lm.server on a specialized model. Every flag is mlx-lm's, but for --kv-config and --kernels."""

from .loader import specialized, split


def run(arguments: list[str]) -> int:
    """Until it is interrupted; then standard error says which path served, how often and why."""
    wishes, rest = split(arguments, "straightline serve")
    with specialized("mlx_lm.server", wishes, rest) as program:
        from .speculation import speculation

        with speculation(program):
            program.main()
    return 0
