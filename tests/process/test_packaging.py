"""What an installation has that a folder of sources has not."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig


def test_the_compiled_part_is_there_where_a_compiler_is() -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    compiled = importlib.util.find_spec("sglrl._ids") is not None
    assert compiled or shutil.which(compiler) is None
