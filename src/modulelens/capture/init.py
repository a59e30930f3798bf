"""Constructor calls of `nn.Module`s, remembered from `track_init()` on.

Two patches: `nn.Module.__new__` records the outermost call's arguments before any code of the
class runs, `nn.Module.__init__` confirms that a constructor really ran (deepcopy and unpickling
call `__new__` without arguments, and would leave a record that is wrong in silence). The record
travels in the module's `__dict__`, so a deepcopy carries it; it vanishes from pickles.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from modulelens.capture.wrappers import own_class
from modulelens.records import InitCall, TensorRef
from modulelens.tree import Encoder, display_path, spec_of

KEY = "_modulelens_init"
T = TypeVar("T", bound=Callable[..., Any])
_SMALL_BYTES = 64 << 10
_module: Any = nn.Module
_original_init: Any = nn.Module.__init__


class InitRecord:
    """One constructor call. Copies share it; a pickle of it is None."""

    __slots__ = ("args", "cls", "confirmed", "kwargs", "modules", "owner", "tensors")

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.cls = type(module)
        self.owner = weakref.ref(module)
        self.confirmed = False
        self.tensors: list[Tensor] = []
        self.modules: list[weakref.ref[nn.Module]] = []
        self._encode(args, kwargs)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        encoder = Encoder(self._keep, module=self._refer)
        self.args = [encoder.encode(value) for value in args]
        self.kwargs = {name: encoder.encode(value) for name, value in kwargs.items()}

    def _keep(self, tensor: Tensor) -> Any:
        # Large tensors become weights, and those are captured; their initial values are not kept.
        if tensor.numel() * tensor.element_size() > _SMALL_BYTES or tensor.device.type == "meta":
            return TensorRef(spec=spec_of(tensor), group=-1)
        self.tensors.append(tensor.detach().clone())
        return {"init": len(self.tensors) - 1, "requires_grad": tensor.requires_grad}

    def _refer(self, module: nn.Module) -> Any:
        self.modules.append(weakref.ref(module))
        return {"init": len(self.modules) - 1}

    def __deepcopy__(self, memo: Any) -> InitRecord:
        return self

    def __copy__(self) -> InitRecord:
        return self

    def __reduce__(self) -> Any:
        return (NoneType, ())


def init_record(module: nn.Module) -> InitRecord | None:
    """The record of the module's constructor call, None when there is none that can be trusted.

    A record is dropped when no constructor confirmed it, when the module's class changed since
    (lazy modules), or when it does not bind to the class's signature.
    """
    record, cls = vars(module).get(KEY), own_class(type(module))
    if not isinstance(record, InitRecord) or not record.confirmed or record.cls is not cls:
        return None
    try:
        inspect.signature(record.cls.__init__).bind(module, *record.args, **record.kwargs)
    except (TypeError, ValueError):
        return None
    return record


def init_call(
    module: nn.Module, tensor: Callable[[Tensor], TensorRef], refer: Callable[[nn.Module], Any]
) -> InitCall | None:
    """The module's constructor call with its tensors and modules handed to the callables."""
    record = init_record(module)
    if record is None:
        return None

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        return {key: resolve_body(key, body) for key, body in node.items()}

    def resolve_body(key: str, body: Any) -> Any:
        if key in ("$tensor", "$parameter") and isinstance(body, dict):
            return tensor(record.tensors[body["init"]].requires_grad_(body["requires_grad"]))
        if key == "$module":
            target = record.modules[body["init"]]()
            return {"gone": True} if target is None else refer(target)
        return resolve(body)

    how = "constructed" if record.owner() is module else "copied"
    return InitCall(
        cls=display_path(record.cls),
        args=resolve(record.args),
        kwargs=resolve(record.kwargs),
        how=how,
    )


class track_init:  # noqa: N801 - used as a function and as a context manager
    """From here on, constructor calls of `nn.Module`s are remembered.

    Use it as a plain call at the top of a script, or as a context manager around the code that
    builds the model. Several may be active; the last one that ends removes the patches. Modules
    built before can still be rebuilt, from their structure.

    Example:
        >>> import modulelens as ml
        >>> tracking = ml.track_init()
        >>> # build the model ...
        >>> tracking.stop()
    """

    def __init__(self) -> None:
        self._active = True
        _Patches.start()

    def stop(self) -> None:
        """Ends this tracking. Safe to call twice."""
        if self._active:
            self._active = False
            _Patches.stop()

    def __enter__(self) -> track_init:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Patches:
    """The patches of `nn.Module`, counted. `__new__` can't be deleted again, only made plain."""

    users = 0
    wrapped: list[tuple[Any, Any]] = []  # noqa: RUF012 - the one process-wide list

    @classmethod
    def start(cls) -> None:
        cls.users += 1
        if cls.users == 1:
            _module.__new__ = staticmethod(_recording_new)
            _module.__init__ = _confirming_init

    @classmethod
    def stop(cls) -> None:
        cls.users -= 1
        if cls.users == 0:
            # Deleting __new__ would break every later construction: object.__new__ then refuses
            # arguments for classes that define __init__ only.
            _module.__new__ = staticmethod(_plain_new)
            _module.__init__ = _original_init
            while cls.wrapped:
                owner, init = cls.wrapped.pop()
                owner.__init__ = init


def _unseen(function: T) -> T:
    """Lets Dynamo run the function as it is: compiling it alone, it meets a half-made module.

    As `torch.compiler.disable(recursive=False)`, which would import Dynamo.
    """
    frames: Any = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def _plain_new(cls: type, *_args: Any, **_kwargs: Any) -> Any:
    return object.__new__(cls)


@_unseen
def _recording_new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    made = object.__new__(cls)
    if torch.compiler.is_compiling():  # a module of compiled code's own is made and gone
        return made
    if cls.__new__ is not _recording_new:
        # A class with its own __new__ may not pass its arguments on: take them at its __init__.
        _wrap_init(cls)
    elif isinstance(made, nn.Module):
        made.__dict__[KEY] = InitRecord(made, args, kwargs)
    return made


def _wrap_init(cls: Any) -> None:
    init = cls.__init__
    if getattr(init, "_modulelens", False):
        return

    @_unseen
    @functools.wraps(init)
    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        if _Patches.users and KEY not in self.__dict__:
            self.__dict__[KEY] = InitRecord(self, args, kwargs)
        init(self, *args, **kwargs)

    recording._modulelens = True  # type: ignore[attr-defined]
    owned = "__init__" in vars(cls)
    if owned:
        _Patches.wrapped.append((cls, init))
        cls.__init__ = recording


@_unseen
@functools.wraps(_original_init)
def _confirming_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    _original_init(self, *args, **kwargs)
    record = self.__dict__.get(KEY)
    if isinstance(record, InitRecord):
        record.confirmed = True
