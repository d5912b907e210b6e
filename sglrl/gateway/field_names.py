"""Name fields in errors as the client wrote them.

Sampling parameters have names of their own behind the dialects. An error of theirs that reaches a
client has the names of its dialect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import InvalidRequest

_QUOTED = re.compile(r"""('[^']*'|"[^"]*")""")


def named(error: Exception, names: Mapping[str, str]) -> Exception:
    """Return an error with the client's names of the fields.

    The values in it, which come after "got" or in quotation marks, are not changed.

    Args:
        names: by our name.
    """
    if not names or type(error) is not InvalidRequest:
        return error
    what, got, value = str(error).partition(", got ")
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    parts = _QUOTED.split(what)
    # Every second part is in quotation marks.
    parts[::2] = [pattern.sub(lambda found: names[found[1]], part) for part in parts[::2]]
    made = InvalidRequest("".join(parts) + got + value)
    made.__cause__ = error
    return made
