"""Classes that were defined in a script (`__main__`): their definitions, without running it.

Takes from the file only the statements that the class needs: imports, definitions, and the
assignments of the names that these use. A training loop at module level does not run.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from pathlib import Path
from typing import Any

from modulelens.errors import ClassNotFound
from modulelens.tree.slices import slice_of


def class_of_script(file: str, name: str) -> Any:
    """The class (or function) of that qualified name from a script that is there and trusted.

    Raises:
        ClassNotFound: It does not define the name.
    """
    path = Path(file)
    script = _script(str(path.resolve()), path.stat().st_mtime_ns)
    script.define(name.partition(".")[0])
    found: Any = vars(script.module)
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
        if found is None:
            raise ClassNotFound(f"{file} defines no {name!r} any more", hint="was it renamed?")
    return found


class _Script:
    """One state of a file and the module that its definitions fill, each run once.

    All names come from one module: classes of one script know each other by identity.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._done: set[int] = set()
        self.module = types.ModuleType("__main__")
        self.module.__file__ = file
        try:
            self._body = ast.parse(Path(file).read_text(), file).body
        except SyntaxError as error:
            text = f"{file}:{error.lineno}: {error.msg}"
            raise ClassNotFound(text, hint="mend the file") from error

    def define(self, name: str) -> None:
        """Runs what the name needs and was not run yet, in the order of the file."""
        needed = [number for number in slice_of(self._body, name) if number not in self._done]
        folder = str(Path(self._file).parent)
        sys.path.append(folder)
        try:
            tree = ast.Module([self._body[number] for number in needed], [])
            exec(compile(tree, self._file, "exec", dont_inherit=True), vars(self.module))
        except Exception as error:  # boundary: the user's definitions
            text = f"{self._file}: {type(error).__name__}: {error}"
            raise ClassNotFound(text, hint="its definitions do not run") from error
        finally:
            sys.path.remove(folder)
        self._done.update(needed)


@functools.lru_cache(maxsize=16)
def _script(file: str, _modified: int) -> _Script:
    return _Script(file)
