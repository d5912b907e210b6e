"""Make the sampling options of commands from the declaration of ``SamplingParams``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, get_type_hints

import msgspec
import typer

from ..errors import UsageError
from ..inference.sampling import DEFAULT_MAX_NEW_TOKENS, FIELDS, SamplingParams
from ..inference.sampling_fields import Field
from ..wire.codec import malformed

OPTIONS: Final = [field for field in FIELDS.values() if field.names.option]
"""The sampling parameters that commands have as options."""


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter ``sampling`` of a command by an option for each sampling parameter.

    The command itself is called with a ``SamplingParams`` made from the values of the options.
    """
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name == "sampling":
            parameters += [_option(field, parameter.kind) for field in OPTIONS]
        else:
            parameters.append(parameter.replace(annotation=hints[parameter.name]))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {field.name: _value(field, values.pop(field.name)) for field in OPTIONS}
        given = {name: value for name, value in given.items() if value is not None}
        command(**values, sampling=SamplingParams(**given))

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    return run


def option_names(field: Field) -> list[str]:
    """Return the names of a parameter's option. A second name, if there is one, means False."""
    name = field.name.replace("_", "-")
    return [f"--{name}", f"--no-{name}"] if field.default is True else [f"--{name}"]


def option_default(field: Field) -> str:
    """Return the default value of an option as the help and the reference pages show it."""
    if field.name == "max_new_tokens":
        return str(DEFAULT_MAX_NEW_TOKENS)
    if field.default is False:
        return "off"
    if field.default is True:
        return field.name
    return "none" if field.default in (None, ()) else str(field.default)


def option_text(field: Field) -> str:
    """Return the description of an option: the first sentence about the field, without its dot."""
    text = field.text.replace("``", "").removesuffix(".")
    return f"{text}; may be repeated" if field.kind.option in (list[str], list[int]) else text


def _option(field: Field, kind: Any) -> inspect.Parameter:
    """Return the function parameter from which typer makes the option."""
    text = option_text(field)
    default = None if field.default == () else field.default
    option = typer.Option(
        default,
        "/".join(option_names(field)),
        help=f"{text[:1].upper()}{text[1:]}.",
        metavar="JSON" if field.kind.option is None else None,
        show_default=option_default(field) if field.name == "max_new_tokens" else True,
    )
    type_: Any = field.kind.option or str
    annotation = type_ | None if default is None else type_
    return inspect.Parameter(field.name, kind, default=option, annotation=annotation)


def _value(field: Field, given: Any) -> Any:
    """Return the value of an option for ``SamplingParams``, or None if it is not given."""
    if given in (None, []) or field.kind.option is not None:
        return None if given == [] else given
    try:
        return msgspec.json.decode(given)
    except msgspec.DecodeError as error:
        why = malformed(error, given)
        raise UsageError(
            f"{option_names(field)[0]} must be JSON, got {given!r:.200}: {why}"
        ) from None
