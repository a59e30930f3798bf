"""The ambient state of a call: torch's process-wide switches and the random streams.

Knows how to read, apply and restore both. Knows no module, no record of a call, no disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modulelens.records import Ambient, Autocast

_C: Any = torch._C
_cuda: Any = torch.cuda
_MIXED = "mixed"
_TWISTER_BYTES = 4 * (624 + 1)
_PULSE_BYTES = 64
_PYTHON: Any = random._inst
_SDPA = ("flash", "mem_efficient", "math", "cudnn", "overrideable")
_DENORMAL = math.nextafter(0.0, 1.0)  # a number in the source is rounded by the switch itself
_FP32 = tuple((f"{b}.{op}", b, op) for b in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn"))


def read_ambient() -> Ambient:
    """The switches as they are now, of this thread where a switch is per thread."""
    values = {name: read() for name, (read, _) in _SWITCHES.items()}
    return Ambient(
        grad_enabled=torch.is_grad_enabled(),
        inference_mode=torch.is_inference_mode_enabled(),
        autocast=_read_autocast() if _C._is_any_autocast_enabled() else (),
        **values,
    )


class AmbientWatch:
    """Reads the switches cheaply, again and again: the same object while none moved."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._ambient = Ambient()

    def read(self) -> Ambient:
        """The switches now, of this thread where a switch is per thread."""
        seen = [read() for read in _GETTERS]
        if seen != self._seen or _C._is_any_autocast_enabled():
            self._seen, self._ambient = seen, read_ambient()
        return self._ambient


@contextlib.contextmanager
def under(ambient: Ambient, *, device: str = "cpu") -> Iterator[None]:
    """Applies every switch of `ambient`; afterwards all are as they were, also after an error.

    Args:
        ambient: The switches to apply.
        device: Where the tensors of the body live. The autocast of an accelerator that this
            machine lacks is applied to this device type instead.
    """
    before = read_ambient()
    with contextlib.ExitStack() as stack:
        stack.callback(_switch, before)
        _switch(ambient)
        stack.enter_context(torch.inference_mode(ambient.inference_mode))
        stack.enter_context(torch.set_grad_enabled(ambient.grad_enabled))
        _enter_autocast(stack, ambient, device)
        yield


@dataclass(frozen=True, eq=False)
class RngState:
    """Random streams at one moment. Plain tensors, tuples and scalars; None: stream not kept.

    `torch` is the CPU generator's state (uint8). `python` is (625 int64 words, next Gaussian or
    None). `numpy` is (624 int64 words, position, has a next Gaussian, that Gaussian): the legacy
    global stream, where it is a Mersenne Twister. `devices` holds one uint8 state per CUDA device.
    """

    torch: Tensor | None = None
    python: tuple[Tensor, float | None] | None = None
    numpy: tuple[Tensor, int, int, float] | None = None
    devices: tuple[Tensor, ...] = ()


class RngWatch:
    """Reads the random streams cheaply, again and again.

    `read` compares the part of each generator's memory that every draw and every seed changes:
    its position and the words beside it. Only a stream that moved is taken.
    """

    def __init__(self) -> None:
        self._seen: tuple[Any, ...] = (None,) * 4
        self._state = RngState()

    def read(self) -> RngState:
        """The streams now; the same object as before while nothing was drawn."""
        state = torch.default_generator.get_state()
        seen = (
            _ends(state),
            (_PYTHON_PULSE.raw, _PYTHON.gauss_next),
            _numpy_pulse(),
            _device_states(),
        )
        if seen != self._seen:
            old, last = self._seen, self._state
            with torch.inference_mode(False):
                self._state = RngState(
                    torch=last.torch if seen[0] == old[0] else state.clone(),
                    python=last.python if seen[1] == old[1] else _take_python(),
                    numpy=last.numpy if seen[2] == old[2] else _take_numpy(),
                    devices=tuple(map(_bytes_tensor, seen[3])),
                )
            self._seen = seen
        return self._state


def set_rng(state: RngState) -> None:
    """Sets every stream that `state` holds; the others stay as they are."""
    if state.torch is not None:
        torch.default_generator.set_state(state.torch)
    if state.python is not None:
        words, gauss = state.python
        random.setstate((3, tuple(words.tolist()), gauss))
    if state.numpy is not None:
        keys, position, has_gauss, cached = state.numpy
        np.random.set_state(
            ("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached)
        )
    for index, device_state in enumerate(state.devices[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, index)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Afterwards all random streams are bit for bit as they were, also after an error."""
    state = RngWatch().read()
    try:
        yield
    finally:
        set_rng(state)


# -- switches ------------------------------------------------------------------------------------


def _read_matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses once its per-backend interface was used as well
        return _MIXED


def _set_matmul_precision(name: str) -> None:
    if name != _MIXED:
        torch.set_float32_matmul_precision(name)


def _read_fp32() -> dict[str, str]:
    return {key: _C._get_fp32_precision_getter(b, op) for key, b, op in _FP32}


def _set_fp32(values: dict[str, str]) -> None:
    now = _read_fp32()
    for key, value in values.items():
        if now.get(key) != value:
            _C._set_fp32_precision_setter(*key.split("."), value)


def _read_sdpa() -> tuple[str, ...]:
    return tuple(name for name, read in _SDPA_READERS if read())


def _set_sdpa(names: tuple[str, ...]) -> None:
    for name in _SDPA if names else ():  # none at all: the record does not say
        getattr(_C, f"_set_sdp_use_{name}")(name in names)


def _flushes() -> bool:
    return _DENORMAL * 1.0 == 0.0  # torch does not tell; Python's numbers follow the same switch


_SDPA_READERS = [(name, getattr(_C, f"_get_{name}_sdp_enabled")) for name in _SDPA]

#: Field of `Ambient` -> how to read it, how to set it. In the order of setting: the old interface
#: for float32 precision overwrites the new one, so `fp32_precision` comes after both of its words.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default_dtype": (
        lambda: str(torch.get_default_dtype())[len("torch.") :],
        lambda name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "autocast_cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "onednn": (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    "deterministic": (
        _C._get_deterministic_algorithms,
        lambda on: _C._set_deterministic_algorithms(
            on, warn_only=_C._get_deterministic_algorithms_warn_only()
        ),
    ),
    "deterministic_warn_only": (
        _C._get_deterministic_algorithms_warn_only,
        lambda on: _C._set_deterministic_algorithms(
            _C._get_deterministic_algorithms(), warn_only=on
        ),
    ),
    "cudnn_enabled": (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    "cudnn_benchmark": (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    "matmul_precision": (_read_matmul_precision, _set_matmul_precision),
    "allow_tf32": (
        lambda: _C._get_fp32_precision_getter("cuda", "matmul") == "tf32",
        _C._set_cublas_allow_tf32,
    ),
    "cudnn_tf32": (
        lambda: _C._get_fp32_precision_getter("cuda", "conv") == "tf32",
        _C._set_cudnn_allow_tf32,
    ),
    "fp32_precision": (_read_fp32, _set_fp32),
    "sdpa": (_read_sdpa, _set_sdpa),
    "flush_denormal": (_flushes, torch.set_flush_denormal),
}


#: Whatever `read_ambient` reads, apart from autocast's details, moves with one of these.
_GETTERS: tuple[Callable[[], Any], ...] = (
    *(torch.is_grad_enabled, torch.is_inference_mode_enabled, _C._is_any_autocast_enabled),
    *(torch.get_default_dtype, torch.is_autocast_cache_enabled, torch.get_num_threads),
    *(_C._get_mkldnn_enabled, _C._get_cudnn_enabled, _C._get_cudnn_benchmark),
    *(_C._get_deterministic_algorithms, _C._get_deterministic_algorithms_warn_only),
    *(functools.partial(_C._get_fp32_precision_getter, b, op) for _, b, op in _FP32),
    *(_flushes, *(read for _, read in _SDPA_READERS)),
)


def _switch(target: Ambient) -> None:
    for name, (read, write) in _SWITCHES.items():
        wanted = getattr(target, name)
        if read() != wanted:
            write(wanted)


def _read_autocast() -> tuple[Autocast, ...]:
    return tuple(
        Autocast(device=device, dtype=str(torch.get_autocast_dtype(device))[len("torch.") :])
        for device in _C._autocast_supported_devices()
        if torch.is_autocast_enabled(device)
    )


def _enter_autocast(stack: contextlib.ExitStack, ambient: Ambient, device: str) -> None:
    here = torch.device(device).type
    wanted = {
        (entry.device if _usable(entry.device) else here): getattr(torch, entry.dtype)
        for entry in sorted(ambient.autocast, key=lambda entry: _usable(entry.device))
    }
    torch.clear_autocast_cache()  # casts of weights that may have changed in place since
    for entry in _read_autocast():
        if entry.device not in wanted:
            stack.enter_context(torch.autocast(entry.device, enabled=False))
    for kind, dtype in wanted.items():
        stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=ambient.autocast_cache))


def _usable(device: str) -> bool:
    module = getattr(torch, device, None)
    return device == "cpu" or bool(module and module.is_available())


# -- random streams ------------------------------------------------------------------------------


def _bytes_tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _take_python() -> tuple[Tensor, float | None]:
    _, words, gauss = random.getstate()
    return torch.from_numpy(np.array(words, dtype=np.int64)), gauss


def _take_numpy() -> tuple[Tensor, int, int, float] | None:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    words = torch.from_numpy(state["state"]["key"].astype(np.int64))
    return words, int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])


def _device_states() -> tuple[bytes, ...]:
    if not _cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return ()
    states = (torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count()))
    return tuple(state.numpy().tobytes() for state in states)


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


def _ends(state: Tensor) -> tuple[bytes, bytes]:
    """A state of torch's generator: seed, position and first words; its cached normals."""
    start, end = state.data_ptr(), state.data_ptr() + state.numel()
    return _memory(start, _PULSE_BYTES).raw, _memory(end - _PULSE_BYTES, _PULSE_BYTES).raw


#: Position and first words, which lie behind the head of the stream's object.
_PYTHON_PULSE = _memory(id(_PYTHON) + object.__basicsize__, _PULSE_BYTES)


def _numpy_pulse() -> tuple[bytes, ...]:
    """Where the global stream's next Gaussian lies, and its last words and position."""
    stream = np.random.mtrand._rand
    return tuple(view.raw for view in _numpy_memory(stream, stream._bit_generator))


@functools.lru_cache(maxsize=1)
def _numpy_memory(stream: Any, generator: Any) -> tuple[Any, ...]:
    if type(generator) is not np.random.MT19937:
        return ()
    head = object.__basicsize__
    end = generator.ctypes.state_address + _TWISTER_BYTES
    return (
        _memory(id(stream) + head, type(stream).__basicsize__ - head),
        _memory(end - _PULSE_BYTES, _PULSE_BYTES),
    )
