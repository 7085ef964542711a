"""Plan to source text, through templates/. Pure but for reading the templates. Writes nothing."""

from pathlib import Path

import jinja2

from .errors import SpecError, show
from .plan import Plan

TEMPLATES = Path(__file__).parent.parent / "templates"


def python_literal(value: object) -> str:
    """The filter `py`: the only way a value gets into the text. Refuses all but plain literals."""
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) is tuple:
        items = ", ".join(python_literal(item) for item in value)
        return f"({items},)" if len(value) == 1 else f"({items})"
    raise SpecError(f"templates: {show(value)} was given to the filter py; expected a plain literal")


def environment() -> jinja2.Environment:
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters = {"py": python_literal}
    return env


def render(plan: Plan) -> str:
    try:
        return environment().get_template("file.py.j2").render(plan=plan)
    except jinja2.TemplateError as error:
        raise SpecError(f"templates: {error.message}; expected only fields of the plan") from None
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise SpecError(f"templates: {error}; expected UTF-8 text, and only fields of the plan") from None
