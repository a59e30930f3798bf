"""Record -> live `nn.Module` and its inputs. Takes bytes through callables, knows no store."""

from modulelens.rebuild.module import Rebuilder, Strategy
from modulelens.rebuild.payload import Payload
from modulelens.rebuild.script import class_of_script
from modulelens.rebuild.synthesize import Synthesizer
from modulelens.rebuild.tensors import Tensors, usable_device

__all__ = [
    "Payload",
    "Rebuilder",
    "Strategy",
    "Synthesizer",
    "Tensors",
    "class_of_script",
    "usable_device",
]
