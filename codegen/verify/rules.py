"""Every rule that a generated file keeps, as one table.

Rules are checked in this order and the first broken one ends the check, so each may rely on those above it.
"""

from .claim import check_claim
from .model import check_decode, check_forward, check_taps, check_weights
from .names import check_names
from .reach import check_attributes, check_calls
from .rule import Rule
from .shape import check_header, check_nodes, check_shape, check_text
from .surface import check_docstrings, check_functions, check_imports
from .values import check_constants, check_literals, check_words

RULES = (
    Rule("header", "The first two lines say where the file comes from and how to change it.", check_header),
    Rule("text", "The text is printable ASCII, and each comment is one that a template spells.", check_text),
    Rule("nodes", "Only assignments, returns, names, numbers, calls, subscripts, + and * occur.", check_nodes),
    Rule("shape", "A docstring, imports, constants, then functions of assignments and one return.", check_shape),
    Rule("imports", "Only mlx.core, as mx, and known names of the runtime's ops are imported.", check_imports),
    Rule("functions", "The functions and their parameters are the plan's, in its order.", check_functions),
    Rule("docstrings", "Each docstring is the plan's.", check_docstrings),
    Rule("attributes", "Only known attributes of known names are read, and no handle is passed on.", check_attributes),
    Rule("calls", "Each call is one that the templates make, down to its keywords.", check_calls),
    Rule("names", "Each name is bound before it is read, and read after it is bound.", check_names),
    Rule("literals", "Each number is the plan's for the call that it stands in, and there is no text.", check_literals),
    Rule("words", "Text in data is made of known words, or is the fingerprint.", check_words),
    Rule("constants", "Each constant works out to what the plan's layers say.", check_constants),
    Rule("weights", "Each function reads exactly the slots that its weights declare.", check_weights),
    Rule("taps", "The taps are -1 to the number of layers, each once, in order.", check_taps),
    Rule(
        "forward", "Each layer is its kind's, on its own weights, mask and keys, tapped as it is used.", check_forward
    ),
    Rule("decode", "Each function for one token is, statement by statement, that of its kind.", check_decode),
    Rule("claim", "The title's counts are those of the lines of forward.", check_claim),
)
