"""Compiles the modules that ``sglrl/_compiled.py`` names; all else is in ``pyproject.toml``.

Where there is no C compiler, no headers of Python or no mypy they are used as they are.
``SGLRL_COMPILED=0`` leaves them so; with ``SGLRL_COMPILED=1`` it is an error if they stay so.
"""

import os
import runpy
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).parent
BUILDS = {"bdist_wheel", "build", "build_ext", "editable_wheel"}
"""Commands that compile. Others only ask what this package is."""


def remove_old() -> None:
    """What was compiled before, in this folder, for this Python."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for old in [*HERE.glob(f"sglrl_*__mypyc{suffix}"), *HERE.glob(f"sglrl/**/*{suffix}")]:
        old.unlink()


def compiled() -> list[Extension]:
    """One for the code of all of these modules, and a small one for each of them."""
    wish = os.environ.get("SGLRL_COMPILED")
    if wish == "0" or not BUILDS.intersection(sys.argv):
        return []
    if {"editable_wheel", "--inplace"}.intersection(sys.argv):
        remove_old()
    modules = runpy.run_path(str(HERE / "sglrl" / "_compiled.py"))
    group = modules["group_name"]()
    paths = [os.path.relpath(path, HERE) for path in modules["SOURCES"].values()]
    # What these import is looked at, but not complained of: much of it is not installed here.
    options = ["--ignore-missing-imports", "--follow-imports=silent", "--no-warn-unused-ignores"]
    try:
        from mypyc.build import mypycify

        found = mypycify([*options, *paths], group_name=group, debug_level="0")
    except (ImportError, SystemExit) as error:
        if wish == "1":
            raise
        sys.stderr.write(f"sglrl: nothing is compiled with mypyc: {error!r}\n")
        return []
    for extension in found:
        extension.optional = wish != "1"
    return found


# Without a compiler tokens.py does without.
ids = Extension("sglrl._ids", ["sglrl/_ids.c"], optional=True)
setup(ext_modules=[ids, *compiled()])
