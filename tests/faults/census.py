"""What is alive in a process: tensors, objects by type, entries of containers, files, threads, hooks, memory."""

import atexit
import ctypes
import functools
import gc
import os
import sys
import threading
import warnings
import weakref
from collections import Counter, deque
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

from dshard.collectives import BufferPool
from dshard.optimizer.steps import num_listeners
from dshard.tensor import ShardedTensor
from dshard.units.unit import Unit

_CONTAINERS = (dict, list, set, frozenset, deque)
_SIZED = (*_CONTAINERS, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "used", "fordblks", "keep")
    )


def heap_bytes() -> int:
    """Bytes that malloc has given out and not got back; 0 where the C library does not say."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return found.used + found.hblkhd


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def tensor_bytes(objects) -> int:
    """Of the storages of all tensors that Python knows, each counted once; those of a compiler hold no bytes."""
    found = {}
    for each in objects:
        own = type(each)
        if issubclass(own, torch.Tensor) and not issubclass(own, (ShardedTensor, FakeTensor)) and not each.is_meta:
            try:
                storage = each.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def type_counts(objects) -> Counter:
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in objects)


def num_entries(objects) -> int:
    """Of all lists, dicts and sets, also of those that hold nothing that could be part of a cycle."""
    total, seen = 0, set()
    for each in objects:
        if isinstance(each, _CONTAINERS):
            total += len(each)
        for inner in gc.get_referents(each):
            if type(inner) in (dict, list, set) and not gc.is_tracked(inner) and id(inner) not in seen:
                seen.add(id(inner))
                total += len(inner)
    return total


def module_state() -> dict[str, int]:
    """How many entries everything has that dshard's modules and classes hold, and how many results they cache."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("dshard") or not isinstance(module, ModuleType):
            continue
        holders = {name: vars(module)}
        holders |= {f"{name}.{k}": dict(vars(v)) for k, v in vars(module).items() if isinstance(v, type)}
        for where, values in holders.items():
            for key, value in values.items():
                if key.startswith("__"):
                    continue
                if isinstance(value, functools._lru_cache_wrapper):
                    found[f"{where}.{key}()"] = value.cache_info().currsize
                elif isinstance(value, _SIZED):
                    found[f"{where}.{key}"] = len(value)
    return found


def num_hooks(*models: nn.Module) -> dict[str, int]:
    """Of modules, of their parameters, and of everything that calls back in this process."""
    found = Counter()
    for model in models:
        for module in model.modules():
            for key, value in vars(module).items():
                if key.endswith("_hooks"):
                    found["of modules"] += len(value)
        for param in model.parameters():
            found["of parameters"] += len(param._backward_hooks or ()) + len(param._post_accumulate_grad_hooks or ())
    for key, value in vars(nn.modules.module).items():
        if key.startswith("_global_") and isinstance(value, dict):
            found["of all modules"] += len(value)
    found["of all optimizers"] = len(torch_optimizer._global_optimizer_pre_hooks)
    found["of all optimizers"] += len(torch_optimizer._global_optimizer_post_hooks)
    found["ahead of steps"], found["after steps"] = num_listeners()
    found["at exit"] = atexit._ncallbacks() + len(threading._threading_atexits)
    found["of the collector"] = len(gc.callbacks)
    return dict(found)


def pooled(model: nn.Module) -> dict[str, int]:
    pools: list[BufferPool] = list({id(u.model.pool): u.model.pool for u in Unit.alive}.values())
    own = model._context()
    return {
        "pools": len(pools),
        "bytes kept": sum(pool.kept_bytes for pool in pools),
        "bytes out": own.pool.out_bytes,
        "lent": sum(buffer.readers is None for buffer in own.pool._away),
        "gathered bytes": own.gathered_bytes,
        "units alive": len(Unit.alive),
        "pins": sum(unit.num_pins + unit.num_active for unit in own.units),
    }


def census(model: nn.Module, folder: Path) -> dict[str, int]:
    """Name to number, of everything that must not grow; to be called at rest."""
    gc.unfreeze()  # what a rank found imported may hold more, too
    gc.collect()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at objects of all types
        found = {"tensor bytes": tensor_bytes(gc.get_objects())}  # which makes the Python objects of storages: first
        objects = gc.get_objects()
        types = type_counts(objects)
        found |= {
            "objects": len(objects),
            "entries": num_entries(objects),
        }
    del objects
    found |= {
        "heap bytes": heap_bytes(),
        "resident bytes": rss_bytes(),
        "python blocks": sys.getallocatedblocks(),
        "file handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "files": sum(1 for _ in folder.rglob("*")),
    }
    found |= {f"hooks {key}": value for key, value in num_hooks(model).items()}
    found |= {f"pool {key}": value for key, value in pooled(model).items()}
    found |= {f"in {key}": value for key, value in module_state().items()}
    return found | {f"type {key}": value for key, value in types.items()}
