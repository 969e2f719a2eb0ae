"""How much tensor memory a piece of code takes at its worst moment."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages made inside it: ``live`` bytes now, and ``peak``."""

    def __init__(self):
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id_of(t) for t in tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for tensor in tensors(out):
            key = id_of(tensor)
            if key not in self._sizes and key not in given:
                storage = tensor.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key):
        self.live -= self._sizes.pop(key)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def id_of(tensor):
    return tensor.untyped_storage()._cdata
