"""The machine and software a capture ran on, and the ambient state of one call."""

from __future__ import annotations

from typing import Annotated

import msgspec

from modulelens.records.tensor import Structure


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Software, hardware and repository at capture time.

    `job` is the same on all ranks of one process group, and of no other. `run` is the Weights &
    Biases run of this process, "entity/project/id".
    """

    python: str = ""
    torch: str = ""
    platform: str = ""
    cpu: str = ""
    devices: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    git_commit: str = ""
    git_dirty: bool = False
    git_root: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    hostname: str = ""
    rank: int = 0
    world_size: int = 1
    job: str = ""
    run: str = ""


class Autocast(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Autocast of one device type."""

    device: str
    dtype: str


class Ambient(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Process-wide switches that change what a forward computes.

    `fp32_precision` maps "backend.operator" to torch's own word for it, which says more than
    `matmul_precision`, `allow_tf32` and `cudnn_tf32` do once both of torch's interfaces were used
    (`matmul_precision` is then "mixed").
    """

    grad_enabled: bool = True
    inference_mode: bool = False
    autocast: tuple[Autocast, ...] = ()
    autocast_cache: bool = True
    default_dtype: str = "float32"
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    onednn: bool = True
    matmul_precision: str = "highest"
    deterministic: bool = False
    deterministic_warn_only: bool = False
    allow_tf32: bool = False
    cudnn_enabled: bool = True
    cudnn_benchmark: bool = False
    cudnn_tf32: bool = True
    fp32_precision: dict[str, str] = {}
    sdpa: tuple[str, ...] = ()
    flush_denormal: bool = False


class Rng(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Random streams at call entry. Each is a structure; None where the stream was not kept."""

    torch: Structure = None
    numpy: Structure = None
    python: Structure = None
    devices: Structure = None


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything outside the module and its arguments that one call depends on."""

    ambient: Ambient
    rng: Rng = Rng()
