"""A recorded module -> a live `nn.Module`, in two ways.

`structure` makes every module without its constructor and gives it its state. `init` calls the
outermost constructor on the meta device and lays the captured state over the result. Neither is
enough alone (`docs/rebuild.md`); verification picks the one that replays exactly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize

from modulelens.context import preserved_rng
from modulelens.errors import ClassNotFound, Corrupted, ModuleLensError, NotRebuildable, text_of
from modulelens.rebuild.ancestor import Ancestor
from modulelens.rebuild.initial import spared_values
from modulelens.rebuild.payload import Payload
from modulelens.rebuild.tensors import Tensors
from modulelens.rebuild.today import lay_state
from modulelens.records import ModuleNode
from modulelens.tree import Decoder, Importer, display_path

Strategy = Literal["structure", "init"]
_Places = list[tuple[str, contextlib.AbstractContextManager[None]]]
#: Initial values of fewer elements take no time.
_LARGE = 1 << 14
_HOOKS: dict[str, Callable[..., Any]] = {
    "_forward_pre_hooks": nn.Module.register_forward_pre_hook,
    "_forward_hooks": nn.Module.register_forward_hook,
}
_INTERNAL = frozenset(vars(nn.Module())) | {"_modelulens_init", "_compiled_call_impl"}


@dataclass(eq=False)
class Rebuilder:
    """Rebuilds the modules of one entry at one moment.

    Args:
        payload: The entry.
        importer: Imports the classes.
        tensors: Makes the tensors; shared with the inputs, so that they may alias the module.
        drifted: Class paths whose source changed since the capture: today's code constructs
            them, and `notes` says where its choice differs from what was captured.
    """

    payload: Payload
    importer: Importer
    tensors: Tensors
    drifted: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list, init=False)
    _nodes: dict[int, ModuleNode] = field(default_factory=dict, init=False)
    _made: dict[int, nn.Module] = field(default_factory=dict, init=False)
    _root: int = field(default=-1, init=False)

    def rebuild(self, digest: str, strategy: Strategy) -> nn.Module:
        """The module whose node has that digest.

        Raises:
            NotRebuildable: For a reason of `records.Reason`.
            ClassNotFound: A class cannot be imported here.
        """
        root = self._load(digest)
        self._root = root.number
        module = self._by_init(root) if strategy == "init" else self._by_structure(root)
        _clear_hooks(module, keep_weight_hooks=True)
        return module

    def _load(self, digest: str) -> ModuleNode:
        nodes = self.payload.nodes(digest)
        for node in nodes:
            reason, _, text = node.refused.partition(": ")
            if reason and not (reason == "not_importable" and node.cls in self.drifted):
                raise NotRebuildable(f"{node.fqn or 'the module'}: {text}", reason=reason)
            if taken := _INTERNAL & node.attributes.keys():
                where = node.fqn or "the module"
                raise Corrupted(f"{where}: {min(taken)} is torch's own attribute")
            self._nodes.setdefault(node.number, node)
        return nodes[0]

    def _class(self, node: ModuleNode) -> type[nn.Module]:
        cls = self.importer.get(node.cls)
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ClassNotFound(f"{node.cls} is no nn.Module class", hint="was it replaced?")
        return cls

    # ---- without constructors

    def _by_structure(self, node: ModuleNode) -> nn.Module:
        if node.number in self._made:
            return self._made[node.number]
        if node.cls in self.drifted and node.init is not None and node.number != self._root:
            return self._by_init(node)
        module: nn.Module = object.__new__(self._class(node))
        nn.Module.__init__(module)
        self._made[node.number] = module
        for name, child in node.children.items():
            module._modules[name] = child and self._by_structure(self._nodes[child[1]])
        self._fill(module, node, known=frozenset())
        if node.parametrized:
            parametrize._inject_new_class(module)
            for name in node.parametrized:
                parametrize._inject_property(module, name)
        return module

    def _fill(self, module: nn.Module, node: ModuleNode, known: frozenset[str]) -> None:
        """State, mode and hooks. `known` are attributes to leave alone where theirs is opaque."""
        decoder = self._decoder()
        inside = vars(module)
        _replace(module._parameters, decoder.tensors(node.parameters))
        _replace(module._buffers, decoder.tensors(node.buffers))
        module._non_persistent_buffers_set = set(node.non_persistent)
        for name, made in decoder.named(node.attributes).items():
            if not (name in node.opaque and name in known):
                inside[name] = made
        inside["training"] = node.training
        self._hook(module, node)

    def _hook(self, module: nn.Module, node: ModuleNode) -> None:
        if node.foreign_hooks and node.number != self._root:
            names = ", ".join(node.foreign_hooks)
            text = f"{node.fqn}: its hook {names} has no importable name"
            raise NotRebuildable(text, reason="foreign_hook")
        _clear_hooks(module)
        for hook in node.hooks or ():
            if node.number == self._root and not _is_weight_hook(hook.hook):
                continue  # a call is recorded inside the module's own hooks
            made = self._decoder().decode(hook.hook)
            _HOOKS[hook.kind](module, made, with_kwargs=hook.kwargs)

    def _decoder(self, strict: str = "") -> Decoder:
        get, device = self.tensors.get, self.tensors.device
        return Decoder(get, self.importer, self.module_value, device, strict)

    def module_value(self, body: dict[str, Any]) -> Any:
        """The module that a `$module` value stands for: one made here, or a stand-in."""
        if body.get("gone"):
            text = "a module passed to the constructor is gone"
            raise NotRebuildable(text, reason="opaque_argument")
        number = body.get("number", -1)
        if number in self._nodes:
            return self._by_structure(self._nodes[number])
        if body.get("node"):
            return self._by_structure(self._load(body["node"]))
        return Ancestor(body.get("fqn", "?"), body.get("cls", "?"), body.get("scalars", {}))

    def bare(self, digest: str) -> nn.Module:
        """Plain modules that hold the parameters and buffers, whatever class they were of."""
        node, decoder = self.payload.node(digest), self._decoder()
        if node.number in self._made:
            return self._made[node.number]
        module = self._made[node.number] = nn.Module()
        module._parameters.update({k: decoder.decode(v) for k, v in node.parameters.items()})
        module._buffers.update({k: decoder.decode(v) for k, v in node.buffers.items()})
        for name, child in node.children.items():
            module._modules[name] = child and self.bare(child[0])
        return module

    # ---- with constructors

    def _by_init(self, node: ModuleNode) -> nn.Module:
        # On the meta device initialising is wasted work, and the first `trunc_normal_` imports 800
        # modules, which takes as long as importing torch. New code may make new parameters, and
        # those need values: it runs on the real device.
        device, least = (self.tensors.device, _LARGE) if self.drifted else ("meta", 0)
        spared: list[StorageWeakRef] = []
        plain: _Places = [(self.tensors.device, contextlib.nullcontext())]
        module = self._construct(node, [(device, spared_values(least, spared)), *plain])
        if type(module) is not self._class(node) and not node.parametrized:
            text = f"{node.cls} constructs a {display_path(type(module))}"
            raise NotRebuildable(text, reason="mismatch")
        if not self.drifted:
            return self._lay_over(module, node)
        self._made[node.number] = module
        notes = self._lay_today(module, node)
        if not all(memory.expired() for memory in spared):
            module = self._made[node.number] = self._construct(node, plain)
            notes = self._lay_today(module, node)
        self.notes += notes
        return module

    def _lay_today(self, module: nn.Module, node: ModuleNode, path: str = "") -> list[str]:
        notes = lay_state(module, node, self._decoder(), path)
        vars(module)["training"] = node.training
        self._hook(module, node)
        for name, child in node.children.items():
            live = module._modules.get(name)
            if live is not None and child is not None:
                notes += self._lay_today(live, self._nodes[child[1]], f"{path}{name}.")
            elif child is not None:
                notes.append(f"the captured module {path}{name} has no place in today's code")
        return notes

    def _construct(self, node: ModuleNode, places: _Places) -> nn.Module:
        name = node.fqn or node.cls
        if node.init is None:
            raise NotRebuildable(f"{name}: its constructor call is not known", reason="not_kept")
        cls = self._class(node)
        failure: Exception | SystemExit | None = None
        for device, initial_values in places:
            decoder = self._decoder(strict=f"the constructor of {node.cls}")
            args, kwargs = decoder.decode(node.init.args), decoder.decode(node.init.kwargs)
            try:
                with preserved_rng(), torch.device(device), initial_values:
                    return cls(*args, **kwargs)
            except ModuleLensError:
                raise
            except (Exception, SystemExit) as error:  # noqa: BLE001 - boundary: the user's
                failure = error
        text = f"its constructor raised {type(failure).__name__}: {text_of(failure)}"
        raise NotRebuildable(f"{name}: {text}", reason="runtime_error") from failure

    def _lay_over(self, module: nn.Module, node: ModuleNode) -> nn.Module:
        self._made[node.number] = module
        known = frozenset(vars(module))
        for name, child in node.children.items():
            live = module._modules.get(name)
            module._modules[name] = child and self._child(live, self._nodes[child[1]])
        for name in known - set(node.attributes) - _INTERNAL:
            del vars(module)[name]
        _replace(module._modules, {name: module._modules[name] for name in node.children})
        self._fill(module, node, known)
        return module

    def _child(self, live: nn.Module | None, node: ModuleNode) -> nn.Module:
        if node.number in self._made:
            return self._made[node.number]
        if live is None or type(live).__mro__[bool(node.parametrized)] is not self._class(node):
            return self._by_structure(node)
        return self._lay_over(live, node)


def _replace(live: dict[str, Any], captured: dict[str, Any]) -> None:
    live.clear()
    live.update(captured)


def _clear_hooks(module: nn.Module, *, keep_weight_hooks: bool = False) -> None:
    for kind in _HOOKS:
        hooks = getattr(module, kind)
        for hook_id, hook in list(hooks.items()):
            if not (keep_weight_hooks and type(hook).__module__.startswith("torch.nn.utils.")):
                del hooks[hook_id]


def _is_weight_hook(hook: Any) -> bool:
    body = hook.get("$object") if isinstance(hook, dict) else None
    return isinstance(body, dict) and str(body.get("cls")).startswith("torch.nn.utils.")
