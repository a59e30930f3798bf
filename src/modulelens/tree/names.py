"""Objects <-> importable names. Knows what may be imported for a record."""

from __future__ import annotations

import importlib
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from modulelens.errors import ClassNotFound, NotRebuildable, text_of

T = TypeVar("T")

#: Packages whose classes any record may name: their data classes are plain, and they are what
#: models are made of. A record's own packages come on top (see `Metadata.packages`).
ALLOWED_PACKAGES = frozenset(
    {"torch", "torchrec", "torch_geometric", "torchao", "tensordict", "numpy", "omegaconf"}
    | {"transformers", "diffusers", "timm"}
    | {"argparse", "collections", "enum", "math", "operator", "pathlib", "types"}
)

#: The only builtins that a record may name: they make or measure values, and touch nothing else.
_SAFE_BUILTINS = frozenset(
    {"abs", "all", "any", "bool", "bytes", "complex", "dict", "float", "frozenset", "int", "len"}
    | {"list", "max", "min", "object", "pow", "range", "reversed", "round", "set", "slice"}
    | {"sorted", "str", "sum", "tuple", "type", "zip", "Exception", "NoneType"}
)
#: Marks of the standard library that signatures hold; their modules do more than that.
_MARKS = frozenset({"inspect:_empty", "typing:Any"})
#: What lies in allowed packages and fetches or runs code that its arguments name, or writes files.
_LOADING_MODULES = (
    *("torch.hub", "torch.package", "torch.utils.cpp_extension", "torch.utils.model_zoo"),
    *("torch.utils._cpp", "torch.distributed.rpc", "numpy.f2py", "numpy.distutils"),
)
_LOADERS = frozenset(
    {"torch:classes", "torch:ops", "torch.jit:script", "torch.jit:CompilationUnit"}
    | {"torch:from_file", "numpy:memmap", "numpy:DataSource"}
)
#: Beginnings of such names, whatever module of torch or numpy they are reached through.
_LOADING_NAMES = ("load", "save", "export", "fromfile", "tofile", "fromregex", "genfromtxt")
_BUILTIN_HOMES = ("torch", "torch.nn.functional", "torch._C._nn", "math", "operator", "builtins")


def path_of(value: Any) -> str | None:
    """`module:qualname` from which importing gives this very object, None when nothing does."""
    homes: tuple[Any, ...] = (getattr(value, "__module__", None),)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if value is types.NoneType:
        return "types:NoneType"
    if isinstance(value, types.BuiltinFunctionType):
        # What C code says of its home is often not where it can be imported from.
        homes, name = (*_BUILTIN_HOMES, *homes), value.__name__
    if isinstance(name, str) and "<" not in name:
        for home in homes:
            if isinstance(home, str) and _lookup(home, name) is value:
                return f"{home}:{name}"
    return None


def _lookup(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if found is None:
            return None
        found = vars(found).get(part) if isinstance(found, type) else getattr(found, part, None)
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__ if isinstance(found, staticmethod) else None
    return found


def display_path(cls: type) -> str:
    """`module:qualname` of a class, importable or not."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _loads(path: str, module: str, name: str) -> bool:
    if path in _LOADERS or module.startswith(_LOADING_MODULES):
        return True
    of_torch = module.partition(".")[0] in ("torch", "numpy")
    return of_torch and name.rpartition(".")[2].startswith(_LOADING_NAMES)


def untrusted(message: str, hint: str = "") -> NotRebuildable:
    """The error for a name that a record may not use."""
    return NotRebuildable(message, reason="untrusted_class", hint=hint)


class Importer:
    """Imports what a record names, from allowed packages only.

    Args:
        packages: Top-level packages allowed besides `ALLOWED_PACKAGES`.
        redirect: Class path -> object, for classes that live elsewhere today (`class_map`).
        main: Qualified name -> object of the script that was `__main__` at capture time.
    """

    def __init__(
        self,
        packages: Iterable[str] = (),
        redirect: dict[str, Any] | None = None,
        main: Callable[[str], Any] | None = None,
    ) -> None:
        self.packages = ALLOWED_PACKAGES | frozenset(packages)
        self.redirect = redirect or {}
        self.main = main
        self._failed: dict[str, BaseException] = {}

    def get(self, path: str) -> Any:
        """The object that `module:qualname` names.

        Raises:
            NotRebuildable: The package is not allowed for this record.
            ClassNotFound: It cannot be imported here.
        """
        if path in self.redirect:
            return self.redirect[path]
        module, _, name = path.partition(":")
        package = module.partition(".")[0]
        safe = (module == "builtins" and name in _SAFE_BUILTINS) or path in _MARKS
        if package not in self.packages and not safe:
            hint = f"allow it: Repo(..., allow=[{package!r}])"
            raise untrusted(f"{path} is outside the packages allowed for this entry", hint)
        if _loads(path, module, name) or ".__main__" in module:
            raise untrusted(f"{path} loads code from elsewhere; no record may name it")
        if not name or "<" in name:
            raise ClassNotFound(f"{path} is not importable: it is defined inside a function")
        if module == "__main__" and self.main is not None:
            return self.main(name)
        return self._import(path, module, name)

    def get_class(self, path: str, base: type[T]) -> type[T]:
        """The class of that name, which extends `base`.

        Raises:
            NotRebuildable: It is something else; and as `get` does.
        """
        found = self.get(path)
        if not (isinstance(found, type) and issubclass(found, base)):
            raise untrusted(f"{path} is no class of {base.__name__}")
        return found

    def module(self, name: str) -> Any:
        """The module of that dotted name; raises as `get` does."""
        self.get(f"{name}:__name__")
        return sys.modules[name]

    def _import(self, path: str, module: str, name: str) -> Any:
        try:
            # A second try would fail in another way, at what the first one left half done.
            if module in self._failed:
                raise self._failed[module]  # noqa: TRY301
            found: Any = importlib.import_module(module)
        except (Exception, SystemExit) as error:  # boundary: importing runs the user's module
            self._failed[module] = error
            hint = f"`python -c 'import {module}'` shows the failure"
            if isinstance(error, ImportError):
                hint = f"install or add to PYTHONPATH what provides {error.name or module!r}"
            raise ClassNotFound(
                f"{path} cannot be imported: {type(error).__name__}: {_told(error)}", hint=hint
            ) from error
        for part in name.split("."):
            owner, found = found, getattr(found, part, None)
            if found is None:
                raise ClassNotFound(
                    f"{path} is gone: {module} ({getattr(owner, '__file__', '?')}) has no {name!r}",
                    hint="pass class_map={old: new} if it was moved or renamed",
                )
            if path not in _MARKS and not self._belongs(found):
                raise untrusted(f"{path} leads out of the packages allowed for this entry")
        return found

    def _belongs(self, found: Any) -> bool:
        """Not so a module, nor what an allowed module imported from the standard library."""
        home = getattr(found, "__module__", None)
        package = home.partition(".")[0] if isinstance(home, str) else ""
        if isinstance(found, types.ModuleType) or (package == "pathlib" and callable(found)):
            return isinstance(found, type)  # a path is data, its methods are not
        if package == "builtins":
            return getattr(found, "__name__", "") in _SAFE_BUILTINS
        return package not in sys.stdlib_module_names or package.lstrip("_") in self.packages


def _told(error: BaseException) -> str:
    """What happened, and in which line of which file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.msg} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, importlib.__file__)  # it did not get as far as the user's code
    places = [f for f in frames if not f.filename.startswith("<") and f.filename not in ours]
    return text_of(error) + "".join(f" ({f.filename}:{f.lineno})" for f in places[-1:])
